"""What `plan` and `curve` are given: what is taken as it is meant, and what is refused with what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step, Trace
from memfit.cost import Roofline
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.plans import Plan, PlanMismatch
from memfit.sharding import ShardOptions
from memfit.solve import Limits, SolveOptions
from tests.plans.plan_cases import Stack, captured

BATCH = memfit.spec((8, 64))


def total(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.sum()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return captured()


def refused(message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(InputError, match=message):
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


@pytest.mark.parametrize(
    ("name", "hint"), [("bugdet", "did you mean budget"), ("zebra", "known ones are budget, loss, optimizer")]
)
def test_an_unknown_keyword_is_named_with_what_may_have_been_meant(trace: Trace, name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'; {hint}"):
        memfit.plan(trace, **{name: "3GiB"})


def test_the_smallest_budget_works_as_it_is_printed(trace: Trace) -> None:
    told = str(memfit.plan(trace, budget="1KiB"))
    found = re.search(r"the smallest that works is ([\d.]+ \w+)", told)
    assert found is not None
    assert memfit.plan(trace, budget=found[1]).status == "optimal"


def test_a_cost_model_goes_by_its_name(trace: Trace) -> None:
    target = Target.parse("h100-sxm")
    assert memfit.plan(trace, cost="roofline") == memfit.plan(trace, cost=Roofline.of(target))
    refused("no cost model is called 'rofline'; did you mean 'roofline'", trace, cost="rofline")
    refused("no cost model is called 'magic'; write 'roofline' or 'benchmark'", trace, cost="magic")
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
        ("zzz", "there are <loss>, inner"),
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
    assert plan.status == "infeasible" and plan.blocker is not None
    assert plan.blocker.peak_bytes == plan.minimum_budget_bytes
    assert sum(plan.blocker.peak_by_category.values()) == plan.blocker.peak_bytes
    assert not any("would save" in note for note in plan.notes)
    assert Plan.from_json(plan.to_json()) == plan


def test_every_error_is_a_memfit_error() -> None:
    assert issubclass(memfit.InputError, memfit.MemfitError) and issubclass(memfit.InputError, ValueError)
    with pytest.raises(memfit.MemfitError):
        memfit.plan(Stack, BATCH)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"budget": "1TiB"}, "a budget of '1TiB' does not fit h100-sxm"),
        ({"budget": "lots"}, "cannot read the size 'lots'"),
        ({"start": "plan.json"}, r"start is a plan to begin with, not a str; memfit\.load\(path\) reads one"),
        ({"points": 2.5}, "points is 2.5; write how many budgets"),
        ({"points": "3"}, "points is '3'"),
        ({"points": 1}, "1 points make no curve"),
    ],
)
def test_what_is_asked_is_checked_without_a_capture(asked: dict[str, Any], message: str) -> None:
    def never() -> nn.Module:
        raise AssertionError("the model was built")

    ask = memfit.curve if "points" in asked else memfit.plan
    with pytest.raises(InputError, match=message):
        ask(never, BATCH, target="h100-sxm", **asked)


def test_a_curve_has_a_whole_number_of_points_and_takes_sizes(trace: Trace) -> None:
    for points in (2.5, "3", True):
        with pytest.raises(InputError, match=r"points is .*whole number of at least 2"):
            memfit.curve(trace, points=points)
    curve = memfit.curve(trace, points=2)
    assert curve.price_ms_per_gib("300MiB") == curve.price_ms_per_gib(300 << 20)
    with pytest.raises(InputError, match="no plan meets 1024 bytes; the curve begins at"):
        curve.price_ms_per_gib("1KiB")
    with pytest.raises(InputError, match="cannot read the size"):
        curve.price_ms_per_gib("much")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"gap": "1%"}, "gap is '1%'; write a part from 0 to 1, 0.01 for 1 %"),
        ({"gap": -1}, "gap is -1"),
        ({"gap": 2}, "gap is 2"),
        ({"gap": float("nan")}, "gap is nan"),
        ({"time_limit_s": None}, r"time_limit_s is None; write seconds.*math\.inf"),
        ({"time_limit_s": -1}, "time_limit_s is -1"),
        ({"threads": 0}, "threads is 0; write a whole number of at least 1"),
        ({"threads": 1.5}, "threads is 1.5"),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Limits(**limits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forbid": "layers.0"}, r"forbid='layers\.0' is one name; give a tuple"),
        ({"force": 3}, "force is 3; give a tuple of names"),
        ({"force": ("a",), "forbid": ("a",)}, "'a' is both forced and forbidden"),
        ({"limits": {"gap": 0.1}}, r"limits is .*; write limits=memfit\.solve\.Limits"),
        ({"shard": "bf16"}, r"shard=memfit\.solve\.ShardOptions"),
        ({"points": 0}, "points is 0"),
    ],
)
def test_options_that_cannot_be_are_refused_when_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SolveOptions(**options)


def test_the_model_itself_is_named_as_plans_print_it(trace: Trace) -> None:
    assert SolveOptions(forbid=("(model)",)) == SolveOptions(forbid=("",))
    forced = memfit.plan(trace, options=SolveOptions(force=("(model)",)))
    assert [entry.unit for entry in forced.checkpoint] == [""]


def test_a_forced_unit_need_not_be_among_those_that_may_be(trace: Trace) -> None:
    options = SolveOptions(ac_units=("layers.1",), force=("layers.0",))
    assert [entry.unit for entry in memfit.plan(trace, options=options).checkpoint] == ["layers.0"]


def test_dtypes_are_taken_as_themselves_and_by_name() -> None:
    options: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    assert ShardOptions(**options) == ShardOptions(param_dtype="bfloat16", reduce_dtype="float32")
