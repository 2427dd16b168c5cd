"""Plans on a hybrid mesh of two replicas of two ranks: the bits and the memory of training under them, and `verify`."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from memfit.plans import Plan
from tests.distributed import fsdp2_plans as plans
from tests.distributed import hybrid_plans as hybrid
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@functools.cache
def planned(name: str, engine: str) -> Plan:
    case = plans.FOUR[name]
    return dataclasses.replace(case, shard={**case.shard, "engine": engine}).plan(4)


@pytest.mark.parametrize("name", [pytest.param("hybrid", marks=pytest.mark.zoo), "hybrid, bfloat16"])
def test_a_plan_on_the_sharded_runtime_trains_to_its_bits(four_ranks: Ranks, name: str) -> None:
    four_ranks.run(hybrid.trains_to_the_bits_of_shard, name, planned(name, "sharded").to_json())


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("hybrid", "fsdp2"),
        pytest.param("hybrid", "sharded", marks=pytest.mark.zoo),
        pytest.param("hybrid, bfloat16", "sharded", marks=pytest.mark.zoo),
    ],
)
def test_a_plan_holds_on_every_rank(four_ranks: Ranks, name: str, engine: str) -> None:
    plan = planned(name, engine)
    assert plan.shard is not None
    records = four_ranks.run(hybrid.verified, name, plan.to_json(), engine)
    assert all(each == records[0] for each in records), "ranks have different records"
    found = records[0]
    assert found.ok, found.findings
    assert found.engine == engine and [each.rank for each in found.ranks] == [0, 1, 2, 3]
    assert found.exactness is not None and found.exactness.equal
    assert plan.engine == engine and found.peak.predicted_bytes == plan.shard.peak_by_engine[plan.engine]
    for each in found.ranks:
        assert each.baseline_peak is not None
        assert each.peak.error == pytest.approx(0, abs=0.001) == each.baseline_peak.error


@pytest.mark.parametrize("engine", ["sharded"])
def test_a_fault_reaches_ranks_that_share_no_group_with_it(four_ranks: Ranks, engine: str) -> None:
    document = planned("hybrid", engine).to_json()
    *others, failed = four_ranks.run(hybrid.fails_on_rank_3, document, engine)
    assert failed[:2] == ("ZeroDivisionError", "a fault of the test")
    for kind, text, seconds in others:
        assert (kind, text) == (
            "RankError",
            "the step with the plan failed on rank 3: ZeroDivisionError: a fault of the test",
        )
        assert seconds < 30, "a timeout was waited for"
    assert four_ranks.run(hybrid.verified, "hybrid", document, engine)[0].ok
