"""A plan lives with the modules that it has policies for, whatever is around them."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step
from memfit.engines import plan_of_model, recompute
from memfit.engines.attachment import attached
from memfit.errors import PlanDrift
from memfit.plans import Plan
from memfit.solve import SolveOptions
from tests.engines.engine_cases import plan_for
from tests.engines.test_exact import Block, Blocks, squares

VECTORS = torch.randn(6, 16)
FORCED = SolveOptions(force=("blocks.0", "blocks.1"))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the units that the engine runs, as they run."""
    found: list[str] = []
    remember_context = recompute.RecomputedCall.remember_context

    def noted(self: recompute.RecomputedCall, *args: Any) -> None:
        found.append(self._name)
        remember_context(self, *args)

    monkeypatch.setattr(recompute.RecomputedCall, "remember_context", noted)
    return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for(Step(Blocks(), VECTORS, loss=squares), options=FORCED)


def test_a_plan_for_several_models_outlives_the_container_they_were_given_in(runs: list[str]) -> None:
    a, b = Block(), Block()
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)

    def step() -> None:
        b(a(VECTORS)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = memfit.plan(step, target="cpu", options=SolveOptions(force=("a", "b")), progress=False)
    plan.apply(nn.ModuleDict({"a": a, "b": b}), optimizer)
    gc.collect()
    step()
    assert runs == ["a", "b"]
    a.eval()
    step()
    assert runs == ["a", "b", "b"], "a is in eval mode, b is not"
    assert plan_of_model(a) is not None
    with pytest.raises(memfit.MemfitError, match="already runs a plan"):
        plan.apply(nn.ModuleDict({"a": a, "b": b}), optimizer)
    plan.remove(nn.ModuleDict({"a": a, "b": b}))
    assert attached(a) is None and attached(b) is None and plan_of_model(b) is None


def test_parts_in_train_mode_of_a_model_in_eval_mode_run_their_plan(plan: Plan, runs: list[str]) -> None:
    model = Blocks()
    plan.apply(model)
    model.eval()
    squares(model(VECTORS), None).backward()
    assert runs == []
    model.blocks[0].train()
    squares(model(VECTORS), None).backward()
    assert runs == ["blocks.0"]


def test_parts_kept_in_eval_mode_of_a_model_in_training_run_their_plan(runs: list[str]) -> None:
    def frozen() -> Blocks:
        model = Blocks()
        model.blocks[0].eval()
        return model

    plan = plan_for(Step(frozen(), VECTORS, loss=squares), options=FORCED)
    model = frozen()
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squares(model(VECTORS), None).backward()
    assert runs == ["blocks.0", "blocks.1"]
    with torch.no_grad():
        model(VECTORS)
    assert len(runs) == 2


def test_a_model_trained_in_eval_mode_runs_the_plan_that_was_made_for_it(runs: list[str]) -> None:
    plan = plan_for(Step(Blocks().eval(), VECTORS, loss=squares), options=FORCED)
    plan = Plan.from_json(plan.to_json())
    model = Blocks().eval()
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squares(model(VECTORS), None).backward()
    assert runs == ["blocks.0", "blocks.1"]
    with torch.no_grad():
        model(VECTORS)
    assert len(runs) == 2


def test_only_the_parts_that_were_planned_in_eval_mode_run_there(runs: list[str]) -> None:
    def partly() -> Blocks:
        model = Blocks().eval()
        model.blocks[0].train()
        return model

    plan = plan_for(Step(partly(), VECTORS, loss=squares), options=FORCED)
    model = partly()
    plan.apply(model)
    squares(model(VECTORS), None).backward()
    assert runs == ["blocks.0", "blocks.1"]
    model.eval()
    with pytest.warns(PlanDrift, match=r"unit 'blocks.0', which was called in eval mode and planned in train"):
        squares(model(VECTORS), None).backward()
    assert runs == ["blocks.0", "blocks.1", "blocks.1"]


def test_a_backward_in_eval_mode_without_the_plan_is_said_once(plan: Plan, runs: list[str]) -> None:
    model = Blocks()
    plan.apply(model)
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(VECTORS)  # evaluation that forgets no_grad holds nothing for long
    with pytest.warns(PlanDrift, match=r"called in eval mode and planned in train mode.*model\.train\(\)"):
        squares(model(VECTORS), None).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squares(model(VECTORS), None).backward()
    assert runs == []


@pytest.mark.parametrize("part", ["", "blocks.0"])
def test_scripting_is_refused_with_what_to_do_and_works_on_copies_and_afterwards(
    plan: Plan, runs: list[str], part: str
) -> None:
    model = Blocks()
    expected = copy.deepcopy(model).eval()(VECTORS)
    plan.apply(model)
    with pytest.raises(memfit.MemfitError, match=r"remove the plan first, plan\.remove\(model\)"):
        torch.jit.script(nn.Sequential(model) if part == "" else model.get_submodule(part))
    squares(model(VECTORS), None).backward()
    assert runs == ["blocks.0", "blocks.1"], "the plan is still there"
    assert torch.equal(torch.jit.script(copy.deepcopy(model).eval())(VECTORS), expected)
    plan.remove(model)
    assert torch.equal(torch.jit.script(model.eval())(VECTORS), expected)


@pytest.mark.parametrize("train", [True, False])
def test_an_exported_model_has_no_plan_and_the_same_values(plan: Plan, runs: list[str], train: bool) -> None:
    model = Blocks().train(train)
    torch.manual_seed(0)
    expected = copy.deepcopy(model)(VECTORS)
    plan.apply(model)
    exported = torch.export.export(model, (VECTORS,)).module()
    torch.manual_seed(0)
    assert torch.equal(exported(VECTORS), expected)
    assert runs == []
    model.train()
    squares(model(VECTORS), None).backward()
    assert runs == ["blocks.0", "blocks.1"], "the plan is still there"


def test_a_forward_wrapped_and_unwrapped_by_others_keeps_the_plan(plan: Plan, runs: list[str]) -> None:
    """As accelerate does it: `__func__` bound again, `__wrapped__` followed, the result bound once more."""
    import functools
    import types

    model = Blocks()
    plan.apply(model)
    unit = model.blocks[0]
    inner = unit.forward.__func__

    @functools.wraps(inner)
    def doubled(self: nn.Module, *args: Any) -> Any:
        return 2 * inner(self, *args)

    unit.forward = types.MethodType(doubled, unit)
    model(VECTORS)
    assert runs == ["blocks.0", "blocks.1"]
    assert attached(unit) is not None
    forward: Any = unit.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    unit.forward = types.MethodType(forward, unit)
    model(VECTORS)
    assert runs == ["blocks.0", "blocks.1"] * 2
    before = unit.forward
    plan.remove(model)
    assert unit.forward == before, "what others put there stays"
    model(VECTORS)
    assert runs == ["blocks.0", "blocks.1"] * 2
    plan.apply(model)
    model(VECTORS)
    assert runs == ["blocks.0", "blocks.1"] * 3, "once each, however often it was applied"


def test_a_forward_bound_to_its_module_once_more_takes_the_same_inputs(plan: Plan) -> None:
    import types

    model = Blocks()
    plan.apply(model)
    unit = model.blocks[0]
    unit.eval()
    expected = unit(VECTORS)
    unit.forward = types.MethodType(unit.forward, unit)
    assert torch.equal(unit(VECTORS), expected)
