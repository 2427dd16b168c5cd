from __future__ import annotations

import math

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.distributed.sharded_training import (
    buffers_in,
    clipped,
    different_plans,
    overflow_on_one_rank,
    planned,
    refusals,
    started_from_meta,
    started_from_rank_0,
)

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_gradients_are_clipped_by_the_norm_of_all_ranks(two_ranks: Ranks, norm_type: float) -> None:
    for plain, sharded, same in two_ranks.run(clipped, norm_type):
        assert sharded == pytest.approx(plain, rel=1e-5)
        assert same


def test_what_overflows_on_one_rank_skips_the_step_on_all(two_ranks: Ranks) -> None:
    assert two_ranks.run(overflow_on_one_rank) == [([True, False], True, 512.0)] * 2


@pytest.mark.parametrize("meta_elsewhere", [False, True])
def test_rank_0_gives_its_values_to_all(two_ranks: Ranks, meta_elsewhere: bool) -> None:
    assert two_ranks.run(started_from_rank_0, meta_elsewhere) == [True, True]


def test_a_model_on_meta_gets_its_values_unit_by_unit(two_ranks: Ranks) -> None:
    assert two_ranks.run(started_from_meta) == [(True, True, True)] * 2


def test_buffers_are_cast(two_ranks: Ranks) -> None:
    assert two_ranks.run(buffers_in, torch.float64)[0] == [torch.float64, torch.float64, torch.int64]


def test_what_cannot_be_sharded_is_refused_with_what_to_write_instead(two_ranks: Ranks) -> None:
    said = two_ranks.run(refusals)[0]
    assert "not a list" in said["no module"]
    assert "shard model.module instead" in said["wrapped"]
    assert "sharded already" in said["twice"] and "sharded already" in said["inside"]
    assert "'blocks.7' is no module" in said["unknown unit"] and "'blocks.0'" in said["unknown unit"]
    assert "['blocks.0']" in said["one path"]
    assert "ModuleList, which has no forward" in said["list"]
    assert "'nothing', which is no parameter" in said["ignored"]
    assert "not the model's" in said["foreign"]
    assert "'head', which is no unit" in said["order"]
    assert "divisor of the 2 ranks" in said["part"]
    assert "cannot be copied or pickled" in said["copied"]
    assert all(each.startswith(("InputError", "StateError")) for name, each in said.items() if name != "copied")


def test_ranks_with_different_plans_are_told_before_the_model_is_changed(two_ranks: Ranks) -> None:
    for said in two_ranks.run(different_plans):
        assert said.startswith("RankMismatch") and "a plan for" in said


@pytest.mark.parametrize("recompute", [False, True])
def test_a_plan_for_several_ranks_runs_with_the_same_bits(two_ranks: Ranks, recompute: bool) -> None:
    for with_plan, without, checkpointed, same in two_ranks.run(planned, recompute):
        assert with_plan == without
        assert same
        assert bool(checkpointed) == recompute
