"""Where no plan fits, levers are on top of the plan that needs least, and say whether they are enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.analysis.levers import Case, Lever, describe_shortfall, find_levers
from memfit.analysis.report import Report
from memfit.capture import Category, Step
from memfit.cost import Roofline
from memfit.solve import SolveOptions

ROWS, WIDTH = 4096, 256


class Deep(nn.Module):
    """Blocks whose activations can be dropped, and as much that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def deep(rows: int = ROWS) -> Step:
    return Step(Deep, memfit.spec((rows, WIDTH)), optimizer=torch.optim.AdamW)


def hopeless(budget: int, **options: Any) -> Case:
    solve = SolveOptions(**options)
    step = deep()
    trace = memfit.trace(step, target="h100-sxm")
    plan = memfit.plan(trace, budget=budget, options=solve, progress=False)
    assert plan.status == "infeasible"
    report = Report.of(plan, trace, options=solve)
    return Case(report=report, step=step, cost=Roofline.of(report.target), budget_bytes=budget)


def least_of(step: Step, **options: Any) -> int:
    """The smallest budget that works for a step that is captured afresh."""
    plan = memfit.plan(step, target="h100-sxm", budget=1, options=SolveOptions(**options), progress=False)
    assert plan.minimum_budget_bytes is not None
    return plan.minimum_budget_bytes


def named(levers: tuple[Lever, ...], name: str) -> Lever:
    return next(each for each in levers if each.name.startswith(name))


@pytest.fixture(scope="module")
def least() -> int:
    return least_of(deep())


@pytest.fixture(scope="module")
def case(least: int) -> Case:
    """A budget that is a little too small."""
    return hopeless(least - (1 << 20))


@pytest.fixture(scope="module")
def levers(case: Case) -> tuple[Lever, ...]:
    return find_levers(case)


def test_levers_begin_where_no_plan_gets_lower(least: int, case: Case, levers: tuple[Lever, ...]) -> None:
    blocker = case.report.plan.blocker if case.report.plan is not None else None
    assert blocker is not None and case.peak_bytes <= blocker.peak_bytes <= least
    assert case.peak_bytes == pytest.approx(least, rel=1e-3)
    assert levers and all(each.saves_bytes == case.peak_bytes - each.peak_bytes for each in levers)
    assert not any(each.name.startswith("checkpointing") for each in levers), "there is no more of that"


def test_half_the_micro_batch_on_top_of_the_smallest_plan_needs_no_less_than_a_plan_for_it(
    case: Case, levers: tuple[Lever, ...]
) -> None:
    halved = named(levers, "micro-batch")
    half = Step(Deep, memfit.spec((ROWS // 2, WIDTH)), optimizer=torch.optim.AdamW, accumulation_steps=2)
    best = least_of(half)
    assert best <= halved.peak_bytes < case.peak_bytes
    assert halved.peak_bytes == pytest.approx(best, rel=0.1)


def test_a_lever_says_whether_it_is_enough_or_what_is_missing(case: Case, levers: tuple[Lever, ...]) -> None:
    halved = named(levers, "micro-batch")
    assert describe_shortfall(halved, case.budget_bytes) == "enough by itself"
    assert describe_shortfall(halved, halved.peak_bytes - 3 * 2**20) == "3.00 MiB missing"


def test_what_a_plan_may_not_checkpoint_levers_do_not_either(least: int) -> None:
    names = [f"layers.{number}" for number in range(8)]
    inner = [f"{name}.{part}" for name in names for part in range(3)]
    forbidden = {"forbid": (*names, *inner, "")}
    case = hopeless(least_of(deep(), **forbidden) - (1 << 20), **forbidden)
    assert not set(names) & {unit.name for unit, _ in case.chosen}
    workspaces = case.timeline.peak_by_category[Category.WORKSPACE]
    assert case.peak_bytes - workspaces > 1.5 * (least - workspaces)


def test_a_plan_that_fits_nothing_is_explained_with_the_same_levers(case: Case, levers: tuple[Lever, ...]) -> None:
    plan = case.report.plan
    assert plan is not None
    found = memfit.explain(plan, deep(), progress=False)
    assert found.peak_bytes == case.peak_bytes and not found.fits
    assert [(each.name, each.peak_bytes) for each in found.levers] == [(each.name, each.peak_bytes) for each in levers]
    assert any("under the plan that needs least" in note for note in found.notes)
