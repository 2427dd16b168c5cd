"""Plans on models that their own code has made tensor, sequence, context or expert parallel, over Gloo."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import memfit
from memfit import spec
from memfit.memory import Timeline
from memfit.plans import Plan
from tests.distributed import parallel_plans, tensor_parallel_ranks
from tests.distributed.measured_steps import MEASURED, bounds_of, check_peak
from tests.distributed.parallel_plans import CASES
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@functools.cache
def _planned(name: str, rank: int = 0) -> tuple[Plan, int]:
    """The plan of a case under the smallest budget, and the bytes that are there before its step."""
    case = CASES[name]
    trace = memfit.trace(case.step(case.build, spec), target="cpu", mesh=case.sizes, rank=rank)
    least = memfit.plan(trace, budget="1KiB", progress=False).minimum_budget_bytes
    return memfit.plan(trace, budget=least, progress=False), Timeline.of(trace, 1).start_bytes


@pytest.mark.parametrize("name", CASES)
def test_a_plan_keeps_its_budget_and_changes_no_bit(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    ranks: Ranks = request.getfixturevalue("two_ranks" if case.ranks == 2 else "four_ranks")
    # ranks of one sequence attend to different parts of it, and have a plan each; of other ranks one is like all
    plans = [_planned(name, rank if "cp" in case.sizes else 0) for rank in range(case.ranks)]
    documents = [plan.to_json() for plan, _ in plans]
    without, planned = (ranks.run(parallel_plans.trained, name, each) for each in (None, documents))
    for (plan, start_bytes), one, other in zip(plans, without, planned, strict=True):
        assert plan.predicted is not None and plan.predicted.peak_bytes <= plan.budget_bytes < plan.baseline.peak_bytes
        again = len(plan.collectives) if isinstance(plan.collectives, tuple) else 0
        assert all(torch.equal(*each) for each in zip(one.tensors, other.tensors, strict=True))
        assert other.collectives == one.collectives + again * MEASURED
        check_peak(plan.predicted.peak_bytes - start_bytes, bounds_of(other.levels))


def test_collectives_run_again_in_sequence_parallel_units() -> None:
    plan, _ = _planned("sequence parallel")
    assert isinstance(plan.collectives, tuple) and {each.dims for each in plan.collectives} == {("tp",)}
    assert plan.wrappers == ("DTensor",)


def test_a_plain_model_is_refused_for_a_plan_of_a_wrapped_one(two_ranks: Ranks) -> None:
    plan, _ = _planned("tensor parallel")
    for why in two_ranks.run(parallel_plans.refused_plain, "tensor parallel", plan.to_json()):
        assert why.startswith("InputError") and "DTensor" in why


def test_a_refusal_of_one_rank_is_told_to_the_others(two_ranks: Ranks) -> None:
    document = _planned("tensor parallel")[0].to_json()
    why, told = two_ranks.run(parallel_plans.applied, "tensor parallel", [document] * 2, plain_on=0)
    assert why.startswith("InputError") and "DTensor" in why
    assert told.startswith("InputError: rank 0 refuses the plan") and "DTensor" in told


def test_ranks_of_a_group_whose_collectives_would_differ_are_refused(two_ranks: Ranks) -> None:
    plan, _ = _planned("sequence parallel")
    case = CASES["sequence parallel"]
    other = memfit.plan(case.step(case.build, spec), target="cpu", mesh=case.sizes, progress=False)
    assert not other.checkpoint
    for why in two_ranks.run(parallel_plans.applied, "sequence parallel", [plan.to_json(), other.to_json()]):
        assert why.startswith("InputError") and "ranks 0 and 1" in why and "along tp" in why
    assert two_ranks.run(parallel_plans.applied, "sequence parallel", [plan.to_json()] * 2) == ["", ""]


def test_ranks_with_plans_of_other_kinds_are_refused_on_all(two_ranks: Ranks) -> None:
    """A rank that shards its model, or runs collectives of a mesh, would wait for one that does neither."""
    case = CASES["tensor parallel"]
    plain = case.step(tensor_parallel_ranks.Model, spec)
    plans = {
        "a plan of a step on a mesh": _planned("tensor parallel")[0],
        "a plan that shards its model": memfit.plan(plain, target="cpu", ranks=2, progress=False),
        "a plan that only checkpoints": memfit.plan(plain, target="cpu", progress=False),
    }
    for one, other in itertools.permutations(plans, 2):
        plain_on = 1 if "mesh" in one else 0 if "mesh" in other else None
        name = "plain" if plain_on is None else "tensor parallel"
        documents = [plans[one].to_json(), plans[other].to_json()]
        for why in two_ranks.run(parallel_plans.applied, name, documents, plain_on):
            assert why.startswith(f"InputError: rank 0 has {one}, and rank 1 has {other};")


def test_an_engine_that_one_rank_alone_refuses_is_told_to_all(two_ranks: Ranks) -> None:
    plain = CASES["tensor parallel"].step(tensor_parallel_ranks.Model, spec)
    document = memfit.plan(plain, target="cpu", ranks=2, progress=False).to_json()
    told, why = two_ranks.run(parallel_plans.applied, "plain", [document] * 2, engines=("fsdp2", "local"))
    assert why.startswith("InputError: engine 'local' runs on one device")
    assert told.startswith("InputError: rank 1 refuses the plan, so no rank runs it: engine 'local'")


def test_a_plan_of_checkpoints_that_one_rank_alone_refuses_is_told_to_all(two_ranks: Ranks) -> None:
    plain = CASES["tensor parallel"].step(tensor_parallel_ranks.Model, spec)
    documents = [memfit.plan(plain, budget=budget, target="cpu", progress=False).to_json() for budget in ("1GiB", 1024)]
    told, why = two_ranks.run(parallel_plans.applied, "plain", documents)
    assert why.startswith("InputError: this plan is infeasible")
    assert told.startswith("InputError: rank 1 refuses the plan, so no rank runs it: this plan is infeasible")
