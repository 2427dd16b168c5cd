"""Plans that FSDP2 cannot run, or not here, are refused with what to do, and nothing is half changed."""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch
from torch import nn

import memfit
from memfit.errors import InputError
from memfit.plans import Plan
from tests.distributed import fsdp2_plans, fsdp2_refusals
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@functools.cache
def planned() -> Plan:
    return fsdp2_plans.PLANS["checkpointed"].plan(2)


@pytest.mark.parametrize("name", fsdp2_refusals.REFUSED)
def test_a_refusal_leaves_everything_as_it_was(two_ranks: Ranks, name: str) -> None:
    for said in two_ranks.run(fsdp2_refusals.refused, name, planned().to_json()):
        assert fsdp2_refusals.REFUSED[name][1] in said


def test_what_fails_midway_is_undone(two_ranks: Ranks) -> None:
    for said in two_ranks.run(fsdp2_refusals.fails_midway, planned().to_json()):
        assert said == "this weight cannot be set"


def test_ranks_are_told_that_another_refuses(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(fsdp2_refusals.one_rank_refuses, planned().to_json())
    assert first.startswith("RankMismatch") and "rank 1 has a refusal" in first and "has a gradient" in first
    assert last.startswith("InputError") and "has a gradient" in last


def test_ranks_compare_their_plans_and_engines_first(two_ranks: Ranks) -> None:
    other = msgspec.structs.replace(planned(), notes=("another",))
    for said in two_ranks.run(fsdp2_refusals.other_plans, [planned().to_json(), other.to_json()]):
        assert "rank 0 has a plan for" in said and "rank 1 has a plan for" in said
    for said in two_ranks.run(fsdp2_refusals.other_engines, planned().to_json()):
        assert "on engine fsdp2" in said and "on engine sharded" in said


def test_there_must_be_a_process_group() -> None:
    plan, model = planned(), fsdp2_plans.built(fsdp2_plans.PLANS["checkpointed"])
    with pytest.raises(InputError, match="there is no process group: start the script with torchrun"):
        plan.apply(model, engine="fsdp2")
    assert all(type(each) is nn.Parameter for each in model.parameters())


def test_a_plan_for_one_rank_is_not_for_several() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    step = memfit.Step(model, torch.randn(2, 8), loss=lambda output, _: output.sum())
    plan = memfit.plan(step, target="cpu", progress=False)
    for engine in ("fsdp2", "sharded"):
        with pytest.raises(InputError, match=f"engine '{engine}' shards a model over several ranks, and this plan is"):
            plan.apply(model, engine=engine)
    plan.apply(model, engine="local")
    plan.remove(model)
