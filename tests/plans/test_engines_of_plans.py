"""Plans name their engine: they are solved for its buffers, and checked before another one runs them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

import memfit
from memfit.capture import ParameterCast
from memfit.engines.selection import resolve_engine
from memfit.errors import InputError
from memfit.plans import Plan, PlanMismatch, shard_options_of
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from tests.distributed.fsdp2_plans import PLANS


def planned(budget: Any = "1GiB", **given: Any) -> Plan:
    return memfit.plan(PLANS["checkpointed"].step(), budget=budget, target="cpu", progress=False, **given)


def options(**shard: Any) -> SolveOptions:
    return SolveOptions(shard=ShardOptions(**shard))


def least(engine: Any) -> int:
    found = planned("1KiB", ranks=4, engine=engine).minimum_budget_bytes
    assert found is not None
    return found


def test_each_engine_has_its_own_least_budget_and_a_plan_stays_within_it() -> None:
    budgets = {engine: least(engine) for engine in ("fsdp2", "sharded")}
    assert budgets["fsdp2"] != budgets["sharded"]
    for engine, budget in budgets.items():
        plan = planned(budget, ranks=4, engine=engine)
        assert plan.engine == engine and plan.shard is not None and plan.predicted is not None
        assert plan.shard.peak_by_engine[engine] == plan.predicted.peak_bytes <= budget  # type: ignore[index]


def test_an_engine_on_which_a_plan_would_be_above_its_budget_is_refused() -> None:
    lower, higher = sorted(("fsdp2", "sharded"), key=least)
    plan = planned(least(lower), ranks=4, engine=lower)
    assert plan.shard is not None and plan.shard.peak_by_engine[higher] > plan.budget_bytes  # type: ignore[index]
    with pytest.raises(InputError, match=rf"made for engine '{lower}'; on '{higher}' it takes .* plan with engine='"):
        resolve_engine(plan, higher, ())
    assert resolve_engine(plan, None, ()) == lower
    wide = planned(ranks=4, engine=lower)
    assert resolve_engine(wide, higher, ()) == higher


def test_without_an_engine_a_plan_goes_where_it_fits() -> None:
    plan = planned(ranks=4)
    assert plan.engine is None and plan.shard is not None and resolve_engine(plan, None, ()) == "sharded"
    peaks = {**plan.shard.peak_by_engine, "sharded": plan.budget_bytes + 1}
    high = msgspec.structs.replace(plan, shard=msgspec.structs.replace(plan.shard, peak_by_engine=peaks))
    assert resolve_engine(high, None, ()) == "fsdp2"


def test_replicas_are_of_both_engines() -> None:
    plan = planned(ranks=4, options=options(replicas=2))
    assert plan.shard is not None and (plan.shard.replicas, plan.shard.ranks, plan.ranks) == (2, 2, 4)
    assert "sharded by 2, 2 replicas" in str(plan)
    assert plan.shard.peak_by_engine.keys() == {"fsdp2", "sharded"}
    assert resolve_engine(plan, "fsdp2", ()) == "fsdp2" and resolve_engine(plan, "sharded", ()) == "sharded"
    for engine in ("fsdp2", "sharded"):
        own = planned(ranks=4, engine=engine, options=options(replicas=2))
        assert own.predicted is not None and own.predicted.peak_bytes == plan.shard.peak_by_engine[engine]
    for replicas in (3, 4):
        with pytest.raises(InputError, match=f"4 ranks do not divide into {replicas} replicas that are sharded"):
            planned(ranks=4, options=options(replicas=replicas))


@pytest.mark.parametrize(
    "shard",
    [
        {"keep_last": True},
        {"reshard_after_forward": False, "prefetch": 2},
        {"reshard_after_forward": 2, "engine": "sharded"},
        {"replicas": 2, "reduce_dtype": "bfloat16"},
    ],
)
def test_a_plan_keeps_the_options_that_it_was_predicted_with(shard: dict[str, Any]) -> None:
    plan = Plan.from_json(planned(ranks=4, options=options(**shard)).to_json())
    found = shard_options_of(plan)
    assert {name: getattr(found, name) for name in shard} == shard


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": 1, "engine": "fsdp2"}, "over several ranks, and there is one"),
        ({"ranks": 2, "engine": "fsdp2", "options": options(engine="sharded")}, "leave one of them out"),
        ({"ranks": 4, "options": options(reshard_after_forward=3)}, "a divisor of the 4 ranks"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        planned(**given)


@pytest.mark.parametrize(
    "shard", [{"reshard_after_forward": 1}, {"replicas": 0}, {"prefetch": -1}, {"parallel": "ddp", "replicas": 2}]
)
def test_options_without_a_meaning_are_refused(shard: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(name for name in shard if name != "parallel")):
        ShardOptions(**shard)


def test_a_gathered_dtype_is_captured_as_the_engine_runs_it() -> None:
    step = PLANS["checkpointed"].step()
    cast = ParameterCast(dtype="bfloat16", units=("", "blocks.0"))
    plain, low = memfit.trace(step, target="cpu"), memfit.trace(step, target="cpu", cast=cast)
    assert {each.dtype for each in plain.parameters} == {"float32"} and {each.dtype for each in low.parameters} == {
        "bfloat16"
    }
    assert low.cast is not None and low.cast.kept == "float32" and low.fingerprint != plain.fingerprint
    plan = planned(ranks=2, options=options(param_dtype="bfloat16"))
    assert {each.dtype for each in plan.trace.parameters} == {"float32"}, "the model's own"
    assert plan.shard is not None and plan.shard.shard_dtype == "float32"
    plan.check(step)
    with pytest.raises(PlanMismatch, match="the cast of parameters"):
        plan.check(plain)
    with pytest.raises(InputError, match="give the step, not its trace"):
        memfit.plan(plain, ranks=2, options=options(param_dtype="bfloat16"), progress=False)


def test_parameters_of_several_dtypes_cannot_be_gathered_in_another() -> None:
    model = PLANS["checkpointed"].model()
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone().double())  # type: ignore[union-attr]
    step = memfit.Step(model, torch.zeros((2, 8), dtype=torch.int64), loss=lambda output, _: output.sum())
    with pytest.raises(InputError, match="for parameters of one dtype, and the model has float32 and float64"):
        memfit.trace(step, target="cpu", cast=ParameterCast(dtype="bfloat16", units=("",)))
