"""The steps whose pages are opened in a browser: one device, several ranks, too large, unplanned, deep, hostile."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from llama import Shape, training_step
from torch import nn

import memfit
from memfit.analysis.levers import Case, find_levers
from memfit.analysis.report import Report
from memfit.cost import Roofline
from memfit.hardware import Target
from memfit.report.page import write_page
from tests.devices import without_workspaces

SMALL = Shape(layers=3, hidden=256, heads=4, key_value_heads=2, feed_forward=512, vocabulary=512)
DEEP = Shape(layers=126, hidden=128, heads=4, key_value_heads=2, feed_forward=256, vocabulary=512)
LONG = "a_name_without_a_place_to_break_it" * 3
HOSTILE = "</script><img src=x onerror=document&#46;title='broken'><!--\u2028"


class Hostile(nn.Module):
    """A model with a module whose name would be markup, and one whose name is wider than a phone."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(64, 64))
        self.add_module(LONG, nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, LONG)(getattr(self, HOSTILE)(x).relu()).sum()


def report_of(case: str) -> Report:
    """The report of a case, planned for real."""
    if case == "hostile":
        trace = memfit.trace(memfit.Step(Hostile, memfit.spec((8, 64), torch.float32)), target=without_workspaces())
        plan = msgspec.structs.replace(memfit.plan(trace, progress=False), notes=(LONG,))
        return Report.of(plan, trace)
    if case == "verified":
        return verified()
    shape, length = (DEEP, 64) if case == "deep" else (SMALL, 512)
    trace = memfit.trace(training_step(shape, batch=2, length=length), target=without_workspaces())
    ranks = 4 if case == "sharded" else 1
    free = Report.of_trace(trace, target=Target.parse(trace.hardware, ranks=ranks))
    if case == "unplanned":
        return free
    part = {"infeasible": 0.2, "deep": 0.9}.get(case, 0.8)
    budget = int(free.baseline.peak_bytes * part)
    report = Report.of(memfit.plan(trace, ranks=ranks, budget=budget, progress=False), trace)
    return report.with_curve(points=4) if case == "plain" else report


def verified() -> Report:
    """A small step that was really run."""
    given = training_step(SMALL, batch=1, length=32, dtype=torch.float32)
    step = memfit.Step(
        given.model, torch.randint(0, SMALL.vocabulary, (1, 32)), loss=given.loss, optimizer=given.optimizer
    )
    plan = memfit.plan(step, target="cpu", progress=False)
    return Report.of(plan, step, verification=plan.verify(step, steps=1, time_tolerance=None))


CASES = ("plain", "sharded", "infeasible", "unplanned", "verified", "hostile", "deep")


def write_case(case: str, path: Path) -> Path:
    """Write the page of a case; where nothing fits, with its levers, as the command does."""
    report = report_of(case)
    if report.plan is None or report.plan.predicted is not None:
        return write_page(report, path)
    cost = Roofline.of(report.target)
    levers = find_levers(Case(report=report, step=None, cost=cost, budget_bytes=report.plan.budget_bytes))
    return write_page(report, path, levers=levers)
