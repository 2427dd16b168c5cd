from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import sharded_subclasses as cases
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def test_subclass_parameters_train_as_with_fsdp2(two_ranks: Ranks) -> None:
    two_ranks.run(cases.trains_as_with_fsdp2)


def test_subclass_parameters_in_inference_mode_and_after_errors(two_ranks: Ranks) -> None:
    two_ranks.run(cases.in_inference_mode_and_after_errors)


def test_state_of_subclass_parameters(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.state_of_subclasses, str(tmp_path))


def test_subclasses_that_say_nothing_of_gathers_are_refused(two_ranks: Ranks) -> None:
    two_ranks.run(cases.what_cannot_be_gathered_is_refused)


def test_subclass_parameters_on_replicas(four_ranks: Ranks) -> None:
    four_ranks.run(cases.trains_on_replicas)
