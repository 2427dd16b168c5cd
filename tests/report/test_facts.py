"""A report replays its plan: the same peaks and times as the document has."""

from __future__ import annotations

import dataclasses

import pytest
from llama import Shape, training_step

import memfit
from memfit.plan import PlanMismatch
from memfit.report.facts import Report

SMALL = Shape(layers=3, hidden=256, heads=4, key_value_heads=2, feed_forward=512, vocabulary=512)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_report_has_the_peaks_and_times_of_its_plan(ranks: int) -> None:
    trace = memfit.trace(training_step(SMALL, batch=2, length=512), target="h100-sxm")
    free = memfit.plan(trace, ranks=ranks, progress=False)
    plan = memfit.plan(trace, ranks=ranks, budget=int(free.baseline.peak_bytes * 0.8), progress=False)
    assert plan.checkpoint and plan.predicted is not None
    report = Report.of(plan, trace)
    assert report.baseline.peak_bytes == plan.baseline.peak_bytes
    assert report.planned is not None and report.planned.peak_bytes == plan.predicted.peak_bytes
    assert report.planned.peak_by_category == plan.predicted.peak_by_category
    exposed, op_ms = plan.predicted.exposed_communication_ms, report.runtime.op_ms
    assert report.baseline.starts_ms(op_ms)[-1] + exposed == pytest.approx(plan.baseline.step_ms, rel=1e-6)
    assert report.planned.starts_ms(op_ms)[-1] + exposed == pytest.approx(plan.predicted.step_ms, rel=1e-6)
    assert len(report.with_curve(points=3).curve.points) == 3


def test_a_report_of_another_step_is_refused() -> None:
    step = training_step(SMALL, batch=2, length=64)
    plan = memfit.plan(step, target="h100-sxm", progress=False)
    assert Report.of(plan, step).planned is not None
    with pytest.raises(PlanMismatch):
        Report.of(plan, training_step(dataclasses.replace(SMALL, layers=2), batch=2, length=64))
