"""A report replays its plan: the same peaks and times as the document has."""

from __future__ import annotations

import dataclasses

import pytest
from llama import Shape, training_step

import memfit
from memfit.analysis.holders import allocation_bytes, round_to_block
from memfit.analysis.report import Report
from memfit.capture import BEFORE_STEP
from memfit.plans import PlanMismatch
from memfit.report.streams import build_clock
from tests.devices import without_workspaces

H100 = without_workspaces()

SMALL = Shape(layers=3, hidden=256, heads=4, key_value_heads=2, feed_forward=512, vocabulary=512)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_report_has_the_peaks_and_times_of_its_plan(ranks: int) -> None:
    trace = memfit.trace(training_step(SMALL, batch=2, length=512), target=H100)
    free = memfit.plan(trace, ranks=ranks, progress=False)
    plan = memfit.plan(trace, ranks=ranks, budget=int(free.baseline.peak_bytes * 0.8), progress=False)
    assert plan.checkpoint and plan.predicted is not None
    report = Report.of(plan, trace)
    assert report.baseline.peak_bytes == plan.baseline.peak_bytes
    assert report.planned is not None and report.planned.peak_bytes == plan.predicted.peak_bytes
    assert report.planned.peak_by_category == plan.predicted.peak_by_category
    assert build_clock(report, report.baseline).end_ns / 1e6 == pytest.approx(plan.baseline.step_ms, rel=1e-6)
    assert build_clock(report, report.planned).end_ns / 1e6 == pytest.approx(plan.predicted.step_ms, rel=1e-6)
    assert len(report.with_curve(points=3).curve.points) == 3


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_is_alive_adds_up_to_the_level_of_every_instant(ranks: int) -> None:
    trace = memfit.trace(training_step(SMALL, batch=2, length=256), target=H100)
    least = memfit.plan(trace, ranks=ranks, budget="1B", progress=False).minimum_budget_bytes
    timeline = Report.of(memfit.plan(trace, ranks=ranks, budget=least, progress=False), trace).planned
    assert timeline is not None and timeline.units
    sizes, workspace = allocation_bytes(timeline), timeline.allocations.workspace_bytes
    for instant in range(len(timeline.op)):
        held = int(sizes[timeline.alive_at(instant)].sum())
        beside = round_to_block(int(workspace[instant]), timeline.rounding_bytes) if instant < len(workspace) else 0
        assert held + beside == timeline.during_bytes[instant]
    assert int(sizes[timeline.alive_at(BEFORE_STEP)].sum()) == timeline.before_bytes[0]


def test_a_report_of_another_step_is_refused() -> None:
    step = training_step(SMALL, batch=2, length=64)
    plan = memfit.plan(step, target="h100-sxm", progress=False)
    assert Report.of(plan, step).planned is not None
    with pytest.raises(PlanMismatch):
        Report.of(plan, training_step(dataclasses.replace(SMALL, layers=2), batch=2, length=64))
