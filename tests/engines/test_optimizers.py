"""A plan may change how the optimizer does its step, and nothing else of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step
from memfit.capture.optimizers import implementations, set_flags, set_implementation
from memfit.plans import Plan
from memfit.solve import SolveOptions


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)))


def in_lists(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def squares(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


FREE = SolveOptions(optimizer=True)


@pytest.fixture(scope="module")
def step() -> Step:
    return Step(build, memfit.spec((16, 128)), loss=squares, optimizer=in_lists)


@pytest.fixture(scope="module")
def plan(step: Step) -> Plan:
    whole = memfit.plan(step, target="cpu", progress=False)
    assert whole.baseline.peak_at.phase == "optimizer" and whole.optimizer is None
    return memfit.plan(step, target="cpu", budget=whole.baseline.peak_bytes - 1, options=FREE, progress=False)


def test_a_step_without_temporaries_is_taken_where_that_is_all_it_needs(plan: Plan, step: Step) -> None:
    assert plan.optimizer in ("single", "fused") and plan.checkpoint == () and plan.status == "optimal"
    assert plan.predicted is not None and plan.predicted.peak_bytes <= plan.budget_bytes < plan.baseline.peak_bytes
    plan.check(step)


def test_it_is_left_alone_unless_asked(plan: Plan, step: Step) -> None:
    kept = memfit.plan(step, target="cpu", budget=plan.budget_bytes, progress=False)
    assert kept.optimizer is None and kept.status == "infeasible" and kept.minimum_budget_bytes is not None
    assert kept.minimum_budget_bytes > plan.budget_bytes


def test_more_budget_is_never_slower_and_the_smallest_is_over_all_ways(plan: Plan, step: Step) -> None:
    more = memfit.plan(step, target="cpu", options=FREE, progress=False)
    assert more.predicted is not None and plan.predicted is not None
    assert more.predicted.step_ms <= plan.predicted.step_ms
    hopeless = memfit.plan(step, target="cpu", budget="1KiB", options=FREE, progress=False)
    assert hopeless.minimum_budget_bytes is not None and hopeless.minimum_budget_bytes <= plan.budget_bytes
    least = memfit.plan(step, target="cpu", budget=hopeless.minimum_budget_bytes, options=FREE, progress=False)
    assert least.status == "optimal"


def test_a_trace_cannot_be_captured_another_way(step: Step) -> None:
    with pytest.raises(memfit.InputError, match="give the step"):
        memfit.plan(memfit.trace(step, target="cpu"), options=FREE, progress=False)


def test_apply_changes_the_way_and_remove_changes_it_back(plan: Plan) -> None:
    model = build()
    optimizer = in_lists(model.parameters())
    batch = torch.randn(16, 128)
    for _ in range(2):
        squares(model(batch), None).backward()
        optimizer.step()
    state = {key: value.clone() for each in optimizer.state.values() for key, value in each.items()}
    flags = [dict(group) for group in optimizer.param_groups]
    plan.apply(model, optimizer)
    assert optimizer.param_groups[0]["foreach"] is False
    assert optimizer.param_groups[0]["fused"] is (plan.optimizer == "fused")
    after = {key: value for each in optimizer.state.values() for key, value in each.items()}
    assert all(torch.equal(state[key], after[key]) for key in state)
    squares(model(batch), None).backward()
    optimizer.step()
    plan.remove(model)
    for group, before in zip(optimizer.param_groups, flags, strict=True):
        assert group["foreach"] is before["foreach"] and group["fused"] is before["fused"]
    optimizer.step()


@pytest.mark.parametrize("kind", ["single", "foreach", "fused"])
def test_every_way_trains_alike(kind: Any) -> None:
    batch, found = torch.randn(16, 128), []
    for switched in (False, True):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(4):
            if switched and number == 2:
                set_implementation(optimizer, kind)
            squares(model(batch), None).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found, strict=True))


def test_an_optimizer_that_exists_is_as_before_after_planning(step: Step) -> None:
    model = build()
    optimizer = in_lists(model.parameters())
    flags = [(group["foreach"], group["fused"]) for group in optimizer.param_groups]
    whole = memfit.plan(model, memfit.spec((16, 128)), loss=squares, optimizer=optimizer, target="cpu", progress=False)
    plan = memfit.plan(
        model,
        memfit.spec((16, 128)),
        loss=squares,
        optimizer=optimizer,
        target="cpu",
        budget=whole.baseline.peak_bytes - 1,
        options=FREE,
        progress=False,
    )
    assert plan.optimizer is not None
    assert [(group["foreach"], group["fused"]) for group in optimizer.param_groups] == flags and not optimizer.state


def test_an_optimizer_that_cannot_do_it_is_refused(plan: Plan) -> None:
    model = build()
    with pytest.raises(memfit.InputError, match="apply\\(model, optimizer\\)"):
        plan.apply(model)
    with pytest.raises(memfit.InputError, match="Adafactor has no"):
        plan.apply(model, torch.optim.Adafactor(model.parameters()))


def test_flags_of_groups_are_their_own() -> None:
    model = build()
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "foreach": True}]
    optimizer = torch.optim.AdamW(groups)
    assert implementations(optimizer) == ("single", "foreach", "fused")
    before = set_implementation(optimizer, "single")
    assert [group["foreach"] for group in optimizer.param_groups] == [False, False]
    set_flags(optimizer, before)
    assert [group["foreach"] for group in optimizer.param_groups] == [None, True]
