"""The JSON document of a report adds up, and is the same each time."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
from llama import Shape, training_step

import memfit
from memfit.analysis.report import Report
from memfit.plans import Plan
from memfit.report.json_document import to_json
from tests.devices import without_workspaces

H100 = without_workspaces()

SMALL = Shape(layers=3, hidden=256, heads=4, key_value_heads=2, feed_forward=512, vocabulary=512)


@lru_cache
def tight(ranks: int = 1, part: float = 0.8) -> Report:
    trace = memfit.trace(training_step(SMALL, batch=2, length=512), target=H100)
    free = memfit.plan(trace, ranks=ranks, progress=False)
    plan = memfit.plan(trace, ranks=ranks, budget=int(free.baseline.peak_bytes * part), progress=False)
    return Report.of(plan, trace)


def strict(text: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("ranks", [1, 4])
def test_modules_categories_and_the_timeline_give_the_peak_and_the_time(ranks: int) -> None:
    report = tight(ranks)
    plan = report.plan
    assert plan is not None and plan.predicted is not None
    document = strict(to_json(report))
    for side, estimate in (("baseline", plan.baseline), ("planned", plan.predicted)):
        summary = document["summary"][side]
        assert summary["peak_bytes"] == estimate.peak_bytes == sum(summary["peak_by_category"].values())
        assert summary["step_ms"] == pytest.approx(estimate.step_ms, abs=1e-5)
        parts = [row[side] for row in document["modules"]]
        assert sum(part["at_peak_bytes"] for part in parts) == estimate.peak_bytes
        for name, n_bytes in summary["peak_by_category"].items():
            assert sum(part["at_peak_by_category"].get(name, 0) for part in parts) == n_bytes
        times = ("forward_ms", "backward_ms", "recompute_ms", "optimizer_ms")
        spent = sum(part[name] for part in parts for name in times)
        assert spent + summary["exposed_communication_ms"] == pytest.approx(estimate.step_ms, rel=1e-4)
        timeline = document["timeline"][side]
        assert max(timeline["bytes"]) == estimate.peak_bytes
        assert timeline["ms"] == sorted(timeline["ms"]) and len(timeline["ms"]) == timeline["points"] <= 400
        assert [sum(levels) for levels in zip(*timeline["by_category"].values(), strict=True)] == timeline["bytes"]
    decided = {row["path"] for row in document["modules"] if row["decision"] in ("partly saved", "runs again in full")}
    assert {entry.module for entry in plan.checkpoint} <= decided


def test_it_holds_the_plan_the_step_and_what_was_assumed() -> None:
    report = tight(1)
    document = strict(to_json(report))
    assert document["schema"] == 1 and document["fingerprint"] == report.trace.fingerprint
    assert Plan.from_json(json.dumps(document["plan"])) == report.plan
    assert document["step"]["inputs"] == [[[2, 512], "int64", 8192]]
    assert "H100" in document["assumptions"]["facts"]["device"]
    figures = {figure["key"]: figure for figure in document["assumptions"]["figures"]}
    assert figures["memory.total_bytes"]["source"] and figures["memory.total_bytes"]["date"]
    assert document["curve"] is None and document["verification"] is None


def test_the_curve_is_there_when_it_was_asked_for() -> None:
    report = tight(1).with_curve(points=3)
    assert report.curve is not None
    points = strict(to_json(report))["curve"]["points"]
    assert [point["budget_bytes"] for point in points] == [point.budget_bytes for point in report.curve.points]


def test_the_same_report_is_the_same_text() -> None:
    report = tight(4)
    again = Report.of(report.plan, report.trace)  # type: ignore[arg-type]
    assert to_json(report) == to_json(report) == to_json(again)


def test_infeasible_and_unplanned_steps_have_no_planned_side() -> None:
    for report in (tight(part=0.3), Report.of_trace(tight(1).trace)):
        document = strict(to_json(report))
        assert set(document["summary"]) == set(document["timeline"]) == {"baseline"}
        assert all("planned" not in row for row in document["modules"])
        assert (document["plan"] is None) == (report.plan is None)
