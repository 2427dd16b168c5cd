from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import sharded_state as cases
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def test_full_parameters_have_their_shapes_and_leave_no_trace(two_ranks: Ranks) -> None:
    two_ranks.run(cases.summoned_is_full)


def test_full_parameters_are_written_back_unless_an_exception_ends_the_block(two_ranks: Ranks) -> None:
    two_ranks.run(cases.summoned_writes_back)


def test_full_parameters_of_one_unit(two_ranks: Ranks) -> None:
    two_ranks.run(cases.summoned_by_unit)


def test_full_parameters_are_refused_in_forward_and_backward(two_ranks: Ranks) -> None:
    two_ranks.run(cases.summoning_is_refused_while_the_model_runs)


def test_full_parameters_after_a_backward_that_failed(two_ranks: Ranks) -> None:
    two_ranks.run(cases.summoned_after_a_failed_backward)


def test_state_dict_has_the_names_shapes_and_values_of_a_plain_model(two_ranks: Ranks) -> None:
    two_ranks.run(cases.model_state_has_original_names)


def test_wrong_state_is_refused_and_changes_nothing(two_ranks: Ranks) -> None:
    two_ranks.run(cases.wrong_state_is_refused)


def test_full_state_of_model_and_optimizer_goes_to_a_plain_process_and_back(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(cases.full_state_is_interchangeable)
    assert cases.state_equal(first, second)


def test_scalar_empty_frozen_and_bf16_parameters_keep_their_optimizer_state(two_ranks: Ranks) -> None:
    two_ranks.run(cases.uneven_optimizer_state_is_interchangeable)


def test_optimizer_state_of_other_groups_is_refused(two_ranks: Ranks) -> None:
    two_ranks.run(cases.other_groups_are_refused)


def test_a_hybrid_model_is_saved_once_and_loads_without_replicas(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(cases.hybrid_state_is_full, str(tmp_path))
