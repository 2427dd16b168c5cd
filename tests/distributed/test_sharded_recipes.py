from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import sharded_recipes as cases
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def test_checkpoints_of_dcp_are_those_of_fsdp2(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.checkpoint_with_dcp, str(tmp_path))


def test_checkpoints_are_written_while_training_goes_on(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.asynchronous_checkpoint, str(tmp_path))


def test_checkpoint_of_four_ranks_is_loaded_by_two(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(cases.checkpoint_with_dcp, str(tmp_path))
    found = [ranks.run(cases.load_with_dcp, str(tmp_path))[0] for ranks in (two_ranks, four_ranks)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    "case",
    [
        cases.whole_state_of_torch,
        cases.state_by_distribute_tensor,
        cases.clipping_and_scaling_of_torch,
        cases.optimizers_of_torch,
        cases.losses_of_parameters,
        cases.values_are_drawn_as_on_one_device,
        cases.what_is_refused,
        cases.operations_on_parameters,
        cases.loops_of_torch,
        cases.hooks_and_gathered_modules,
        cases.several_optimizers_in_backward,
    ],
    ids=lambda case: case.__name__,
)
def test_recipes_of_fsdp2(case: object, two_ranks: Ranks) -> None:
    two_ranks.run(case)
