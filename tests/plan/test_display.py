"""print(plan): what is checkpointed and why, before and after, how tight."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from plan_cases import Case, Stack, captured
from rich.console import Console

from memfit.plan import Plan, ShardedUnit, ShardPlan
from memfit.units import display_bytes, display_ms


@pytest.fixture(scope="module")
def case() -> Case:
    return Case.of(captured())


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_memory_and_time_before_and_after(case: Case) -> None:
    plan = case.plan(case.chosen("layers.0", "layers.1"))
    shown = str(plan)
    assert plan.predicted is not None
    for estimate in (plan.baseline, plan.predicted):
        assert display_bytes(estimate.peak_bytes) in line_of(shown, "peak")
        assert display_bytes(estimate.peak_reserved_bytes) in line_of(shown, "reserved")
        assert display_ms(estimate.step_ms) in line_of(shown, "step")
    assert display_ms(plan.predicted.recompute_ms) in line_of(shown, "  recomputing")
    assert "second run of layers.1" in line_of(shown, "highest in")
    for category, n_bytes in plan.baseline.peak_by_category.items():
        assert display_bytes(n_bytes) in line_of(shown, f"  {category.value}")


def test_how_tight_it_is(case: Case) -> None:
    plan = case.plan(case.chosen("layers.0", "layers.1"))
    shown = str(plan)
    over = plan.baseline.peak_bytes - plan.budget_bytes
    assert f"budget {display_bytes(plan.budget_bytes)}: optimal" in shown
    assert f"without a plan the step is {display_bytes(over)} above the budget" in shown
    assert f"the smallest budget that works is {display_bytes(plan.minimum_budget_bytes or 0)}" in shown
    assert "the plan leaves 4.00 KiB to spare; no plan under this budget is faster (proven)" in shown


def test_an_unproven_plan_shows_its_bound_and_gap(case: Case) -> None:
    bound_ms = case.baseline.step_ms
    shown = str(case.plan(case.chosen("layers.0"), status="feasible", gap=0.125, bound_ms=bound_ms))
    assert f"no plan has a step below {display_ms(bound_ms)} (proven), gap 12.50%" in shown


def test_equal_layers_are_one_row(case: Case) -> None:
    plan = case.plan(case.chosen("layers.0", "layers.1", "layers.2") + case.chosen("layers.3", place=1))
    shown = str(plan)
    row = line_of(shown, "layers.0-2 ")
    assert re.search(r"Block +│ +3 │", row) and "100%" in row and "nothing" in row
    assert display_bytes(plan.checkpoint[0].discarded_bytes) in row
    kept = line_of(shown, "layers.3 ")
    assert plan.checkpoint[3].saved_ops
    assert plan.checkpoint[3].saved_ops[0].name.split(".")[1] in kept


def test_second_calls_are_told_apart() -> None:
    case = Case.of(captured(lambda: Stack(layers=2, twice=True)))
    shown = str(case.plan(case.chosen("layers.0", "layers.1", "layers.0#1", "layers.1#1")))
    assert line_of(shown, "layers.0-1 ")
    assert line_of(shown, "layers.0-1#1 ")


def test_an_infeasible_plan_says_what_would_work(case: Case) -> None:
    shown = str(case.infeasible())
    assert "budget 1.00 MiB: infeasible" in shown
    assert "the smallest budget that works is 3.00 MiB" in shown
    assert "no plan fits this budget" in shown
    assert "note: parameters alone are above the budget" in shown
    assert "with the plan" not in shown and "checkpointed" not in shown


def test_sharding_shows_its_settings(case: Case) -> None:
    units = tuple(ShardedUnit(module=f"layers.{number}", reshard_after_forward=number < 2) for number in range(4))
    shard = ShardPlan(ranks=1, units=units, prefetch=2, reduce_dtype="float32")
    shown = str(case.plan(case.chosen("layers.0"), shard=shard))
    assert "sharded by 1: 4 units, 2 gathered ahead" in shown
    assert "gathered from forward to backward: layers.2-3" in shown
    assert "reduce_dtype: float32" in shown


def test_brackets_are_shown_as_they_are(case: Case) -> None:
    plan = msgspec.structs.replace(case.plan(case.chosen("layers.0")), notes=("a [bold]note[/bold]",))
    assert "note: a [bold]note[/bold]" in str(plan)


def test_a_console_prints_it_too(case: Case) -> None:
    console = Console(file=io.StringIO(), width=60, record=True)
    console.print(case.plan(case.chosen("layers.0")))
    assert "layers.0" in console.export_text()


def test_repr_is_one_short_line(case: Case) -> None:
    plan: Plan = case.plan(case.chosen("layers.0"))
    assert repr(plan).startswith("Plan(optimal for ") and "1 units checkpointed" in repr(plan)
    assert len(repr(plan)) < 150
