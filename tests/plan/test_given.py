"""What `plan` and `curve` are given: what is taken as it is meant, and what is refused with what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import Stack, captured
from torch import nn

import memfit
from memfit.cost import Roofline
from memfit.errors import InputError, MissingFeatureError
from memfit.hardware import Target
from memfit.plan import Plan, PlanMismatch
from memfit.solve import SolveOptions
from memfit.trace import Step, Trace

BATCH = memfit.spec((8, 64))


def total(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.sum()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return captured()


def refused(message: str, *args: Any, error: type[Exception] = InputError, **options: Any) -> None:
    with pytest.raises(error, match=message):
        memfit.plan(*args, **options)


def test_a_trace_knows_its_target(trace: Trace) -> None:
    assert memfit.plan(trace).to_json() == memfit.plan(trace, target="h100-sxm").to_json()
    assert memfit.plan(trace, ranks=2).ranks == 2
    assert memfit.curve(trace, points=2).baseline_bytes == memfit.plan(trace).baseline.peak_bytes


def test_anything_else_needs_a_target() -> None:
    refused("name the hardware to plan for.*target='h100-sxm'.*rtx-4090", Stack, BATCH, loss=total)


def test_a_target_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ntitle = "Mine"\nbase = "h100-sxm"\n')
    assert memfit.plan(Stack, BATCH, loss=total, target=path).target.device == "mine"


def test_a_function_that_runs_the_step_is_captured_and_not_run() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()

    def train_step() -> None:
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = memfit.plan(train_step, target="h100-sxm")
    assert plan.fingerprint == memfit.trace(train_step, target="h100-sxm").fingerprint
    assert torch.equal(model.weight, before)
    refused("loss is part of the function that runs the step", train_step, loss=total, target="h100-sxm")


def test_a_function_that_needs_arguments_is_no_model() -> None:
    def train_step(model: nn.Module, optimizer: object, batch: object) -> None:
        raise AssertionError("never called")

    refused(r"needs arguments \(model, optimizer, batch\).*memfit\.Step\(model, batch", train_step, target="cpu")
    refused(r"LayerNorm needs arguments \(normalized_shape\); write lambda: LayerNorm", nn.LayerNorm, target="cpu")


def test_a_function_that_builds_no_model_is_refused_with_how_to_give_a_step() -> None:
    refused(r"returned a NoneType, not an nn\.Module;.*memfit\.Step\(model, batch,.*run=", lambda: None, target="cpu")


def test_a_model_without_a_loss_is_told_how_to_give_one() -> None:
    refused(r"no loss was given.*a tensor of shape \(8, 64\).*loss=lambda output, batch", Stack, BATCH, target="cpu")
    refused("the loss function returned None", Stack, BATCH, loss=lambda *_: None, target="cpu")


@pytest.mark.parametrize(
    ("whole", "options", "message"),
    [
        (lambda: captured(), {"batch": BATCH, "loss": total}, "batch and loss are part of the Trace; give them there"),
        (lambda: captured(), {"optimizer": torch.optim.SGD}, "optimizer is part of the Trace; give it there"),
        (lambda: Step(Stack, BATCH), {"autocast": torch.bfloat16}, "autocast is part of the Step"),
    ],
)
def test_what_would_be_ignored_is_refused(whole: Callable[[], Any], options: dict[str, Any], message: str) -> None:
    refused(message, whole(), target="h100-sxm", **options)


def test_a_cost_model_goes_by_its_name(trace: Trace) -> None:
    target = Target.parse("h100-sxm")
    assert memfit.plan(trace, cost="roofline") == memfit.plan(trace, cost=Roofline.of(target))
    refused(
        "no cost model is called 'rufline'; write one of roofline", trace, cost="rufline", error=MissingFeatureError
    )
    refused(r"cost is the class Roofline; write Roofline\(\)", trace, cost=Roofline)
    refused("cost is a float; write 'roofline'", trace, cost=1.0)


def test_options_are_not_a_dictionary(trace: Trace) -> None:
    message = r"options is a dict; write options=memfit\.solve\.SolveOptions\(force=\('layers\.0',\)\)"
    refused(message, trace, options={"force": ("layers.0",)})
    refused("options is the class SolveOptions", trace, options=SolveOptions)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("layer.1", "'inner.layers.1'"),
        ("layers.1", "'inner.layers.1'"),
        ("model.inner.layers.1", "'inner.layers.1'"),
        ("inner.layers.11", "'inner.layers.1'"),
        ("up", r"'inner\.layers\.0\.up'"),
        ("zzz", r"see memfit\.tradeoff\.units\(trace\)"),
    ],
)
def test_unknown_units_are_told_what_may_have_been_meant(name: str, hint: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stack(layers=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    refused(f"no unit is called '{name}'; .*{hint}", captured(Outer), options=SolveOptions(forbid=(name,)))


@pytest.mark.parametrize(
    ("budget", "instead"),
    [(1.1e9, "write 1100000000, or '1.1GB'"), (80e9, "write 80000000000, or '80GB'"), (72.0, "for GiB write '72GiB'")],
)
def test_a_float_is_a_fraction_and_not_bytes(trace: Trace, budget: float, instead: str) -> None:
    refused(f"{re.escape(repr(budget))} is a float, which is a fraction.*{instead}", trace, budget=budget)


def test_a_plan_is_checked_against_a_trace_or_a_step(trace: Trace) -> None:
    plan: Plan = memfit.plan(trace)
    step = Step(Stack, memfit.spec((128, 64)), loss=lambda output, _: nn.functional.gelu(output).square().mean())
    plan.check(trace)
    plan.check(step)
    with pytest.raises(PlanMismatch, match="tensor 0 of the batch"):
        plan.check(step.with_batch(memfit.spec((64, 64))))
    with pytest.raises(InputError, match=r"not a str: a memfit\.Trace, or a memfit\.Step"):
        plan.check("x")


def test_a_hopeless_budget_says_what_stands_in_the_way_in_numbers(trace: Trace) -> None:
    plan = memfit.plan(trace, budget="300KiB")
    assert plan.status == "infeasible" and plan.blocker is not None and plan.blocker.levers
    assert plan.blocker.peak_bytes == plan.minimum_budget_bytes
    assert sum(plan.blocker.peak_by_category.values()) == plan.blocker.peak_bytes
    assert all(lever.saves_bytes > 0 and lever.how for lever in plan.blocker.levers)
    assert not any("would save" in note for note in plan.notes)
    assert Plan.from_json(plan.to_json()) == plan


def test_every_error_is_a_memfit_error() -> None:
    assert issubclass(memfit.InputError, memfit.MemfitError) and issubclass(memfit.InputError, ValueError)
    with pytest.raises(memfit.MemfitError):
        memfit.plan(Stack, BATCH)
