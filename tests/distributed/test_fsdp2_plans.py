"""Plans on PyTorch's FSDP2, on real ranks: the bits and the memory of training under them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import msgspec
import pytest

from memfit.engines.selection import resolve_engine
from memfit.errors import InputError
from memfit.plans import Plan
from memfit.sharding import ShardOptions
from tests.distributed import fsdp2_plans as plans
from tests.distributed.measured_steps import bounds_of, check_peak
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@functools.cache
def planned(name: str, ranks: int = 2) -> Plan:
    return plans.PLANS[name].plan(ranks)


def compare_peaks(plan: Plan, ranks: Ranks, name: str) -> None:
    """The first rank has what is predicted, but for some rows in bfloat16; the last one's shards have no padding."""
    assert plan.predicted is not None
    tolerance = 0.001 if plan.trace.autocast is not None else 0.0
    for rank, steps in enumerate(ranks.run(plans.measured, name, plan.to_json())):
        bounds = [each + steps[0]["held_bytes"] for each in bounds_of(steps)]
        check_peak(plan.predicted.peak_bytes, bounds, f"rank {rank}", tolerance=tolerance if rank == 0 else 0.01)


@pytest.mark.parametrize("name", plans.PLANS)
def test_a_plan_on_fsdp2_trains_to_the_bits_of_fsdp2(two_ranks: Ranks, name: str) -> None:
    plan = planned(name)
    assert {entry.unit for entry in plan.checkpoint} >= set(plans.PLANS[name].force)
    two_ranks.run(plans.trains_to_the_same_bits, name, plan.to_json())


@pytest.mark.parametrize(
    "name",
    [
        "checkpointed",
        "kept",
        "nothing checkpointed",
        "autocast",
        "autocast, embedding in bfloat16",
        "bfloat16 parameters",
        "accumulation",
    ],
)
def test_the_peak_of_a_rank_is_the_predicted_one(two_ranks: Ranks, name: str) -> None:
    compare_peaks(planned(name), two_ranks, name)


def test_bits_and_peak_on_four_ranks(four_ranks: Ranks) -> None:
    plan = planned("checkpointed", 4)
    four_ranks.run(plans.trains_to_the_same_bits, "checkpointed", plan.to_json())
    compare_peaks(plan, four_ranks, "checkpointed")


@pytest.mark.parametrize("name", plans.FOUR)
def test_settings_on_four_ranks(four_ranks: Ranks, name: str) -> None:
    plan = plans.FOUR[name].plan(4)
    assert plan.shard is not None and plan.shard.ranks * plan.shard.replicas == 4
    four_ranks.run(plans.trains_to_the_same_bits, name, plan.to_json())
    compare_peaks(plan, four_ranks, name)


@pytest.mark.parametrize(
    "what",
    [
        plans.whole_again,
        plans.goes_on_from_state_and_back,
        plans.optimizer_made_after_is_made_whole_too,
        plans.stays_sharded_where_the_user_sharded_it,
    ],
)
def test_apply_and_remove(two_ranks: Ranks, what: Callable[[str], None]) -> None:
    two_ranks.run(what, planned("checkpointed").to_json())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_another_prefetch_than_fsdp2s_own_gives_the_same_bits(two_ranks: Ranks, prefetch: int) -> None:
    plan = planned("checkpointed")
    assert plan.shard is not None
    other = msgspec.structs.replace(plan, shard=msgspec.structs.replace(plan.shard, prefetch=prefetch))
    two_ranks.run(plans.trains_to_the_same_bits, "checkpointed", other.to_json())


def test_a_plan_names_its_engine() -> None:
    plan = dataclasses.replace(plans.PLANS["nothing checkpointed"], shard={"engine": "fsdp2"}).plan(2)
    assert plan.engine == "fsdp2" and resolve_engine(plan, None, []) == "fsdp2"
    assert resolve_engine(plan, "sharded", []) == "sharded"
    assert resolve_engine(planned("nothing checkpointed"), None, []) == "sharded"
    assert "on engine fsdp2" in str(plan)
    with pytest.raises(InputError, match="engine is 'local', which is for one rank, and shard"):
        Plan.from_json(msgspec.structs.replace(plan, engine="local").to_json())
    with pytest.raises(InputError, match="engine is 'zero'; write 'fsdp2'"):
        ShardOptions(engine="zero")  # type: ignore[arg-type]
