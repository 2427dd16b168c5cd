"""`tune` on real ranks: all run the same plans, agree on the fastest, and learn of a failure of one."""

from __future__ import annotations

import functools

import pytest

from tests.distributed import fsdp2_plans as plans
from tests.distributed import tuned_ranks as ranks
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@functools.cache
def budget() -> int:
    """What lets blocks be checkpointed or not, and units be kept or not."""
    plan = plans.PLANS["checkpointed"].plan(2)
    assert plan.predicted is not None
    return (plan.predicted.peak_bytes + 3 * plan.baseline.peak_bytes) // 4


@pytest.mark.parametrize("engine", ["fsdp2", "sharded"])
def test_ranks_agree_on_a_plan_that_fits_and_holds(two_ranks: Ranks, engine: str) -> None:
    first, second = two_ranks.run(ranks.tuned, "checkpointed", engine, budget())
    assert first == second, "ranks would apply different plans"
    assert len(first.tried) > 1 and all(each.rounds_ms and each.plan.engine == engine for each in first.tried)
    kept = {tuple(unit.reshard_after_forward for unit in each.plan.shard.units[1:]) for each in first.tried}
    assert len(kept) > 1, "units are kept under some of the plans"
    best = first.tried[0]
    assert best.plan.checkpoint == first.plan.checkpoint and best.plan.shard == first.plan.shard
    held = two_ranks.run(ranks.checks, first.plan.to_json())
    assert all(ok and measured <= budget() for ok, measured in held)


@pytest.mark.parametrize("at", ["building", "a turn"])
def test_a_failure_on_one_rank_is_told_to_all(two_ranks: Ranks, at: str) -> None:
    first, second = two_ranks.run(ranks.fails_on_rank_1, at, budget())
    assert first[0] == "RankError" and "failed on rank 1: ZeroDivisionError: a fault of the test" in first[1]
    assert second[:2] == ("ZeroDivisionError", "a fault of the test")
    assert max(first[2], second[2]) < 60


def test_a_rank_whose_memory_runs_out_ends_that_plans_turn_alone(two_ranks: Ranks) -> None:
    """The first plan's turn fails on rank 1 as if memory ran out; another plan is kept, the same on both ranks."""
    first, second = two_ranks.run(ranks.out_of_memory_on_rank_1, budget())
    assert first == second
    short = [each for each in first.tried if each.rounds_ms == (float("inf"),)]
    assert len(short) == 1 and short[0] != first.tried[0] and "ran out of memory" in first.plan.notes[-1]


def test_nothing_fits_on_every_rank(two_ranks: Ranks) -> None:
    assert two_ranks.run(ranks.in_too_little_memory, 1024) == ["infeasible", "infeasible"]
