"""What each dimension of a mesh does: one record, shown by the terminal, Markdown, the page and JSON."""

from __future__ import annotations

import json

import pytest
import torch

import memfit
from memfit.analysis import Case, Report, find_dimensions
from memfit.analysis.explaining import _dimensions
from memfit.cost import Roofline
from memfit.report import to_json, to_markdown
from memfit.report.page.data import page_data
from tests.plans.test_mesh_search import Model, step_of

MESH = {"dp": 4, "tp": 2}


@pytest.fixture(scope="module")
def report() -> Report:
    step = step_of(8)
    return Report.of(memfit.plan(step, target="h100-sxm", mesh=MESH, progress=False), step)


def test_collectives_are_counted_by_dimension_and_add_up(report: Report) -> None:
    found = {each.name: each for each in find_dimensions(report, report.baseline)}
    assert set(found) == {"dp", "tp"}
    sharding = report.problem.sharding
    assert sharding is not None
    assert sum(each.communication_ms for each in found.values()) == pytest.approx(sharding.communication_ms)
    assert sum(each.exposed_ms for each in found.values()) == pytest.approx(sharding.exposed_ms)
    assert sum(each.collectives for each in found.values()) == len(report.trace.collectives)
    assert sum(each.sent_bytes for each in found.values()) == sum(each.bytes for each in report.trace.collectives)
    dp, tp = found["dp"], found["tp"]
    assert (dp.size, tp.size) == (4, 2) and set(dp.by_kind) == {"all_gather", "reduce_scatter"}
    assert tp.by_kind == {"all_reduce": 6}, "one of each layer in the forward, one in the backward"
    assert tp.sent_bytes == 6 * 8 * 64 * 128 * 4
    assert 0 < dp.at_peak_bytes <= report.baseline.peak_bytes


def test_the_step_without_a_dimension_is_that_step(report: Report) -> None:
    step = step_of(8)
    case = Case(report=report, step=step, cost=Roofline.of(report.target), budget_bytes=report.target.usable_bytes)
    dimensions = _dimensions(case, report.baseline, compared=True)
    assert len(dimensions) == 2 and not case.left_out
    for dimension in dimensions:
        alone = memfit.plan(step, target="h100-sxm", mesh={**MESH, dimension.name: 1}, progress=False)
        assert dimension.without_peak_bytes == alone.baseline.peak_bytes
        assert dimension.without_step_ms == pytest.approx(alone.baseline.step_ms, abs=1e-6)


def test_an_explanation_shows_them_without_captures_where_levers_are_left_out() -> None:
    found = memfit.explain(step_of(8), target="h100-sxm", mesh=MESH, levers=False, progress=False)
    assert "8 ranks (dp 4 x tp 2)" in str(found) and "what each dimension of the mesh does" in str(found)
    assert [each.without_peak_bytes for each in found.dimensions] == [None, None]


def test_every_output_has_the_same_figures(report: Report) -> None:
    found = find_dimensions(report, report.planned or report.baseline)
    kept = json.loads(to_json(report))["mesh"]
    assert kept["sizes"] == MESH
    assert kept["dimensions"] == json.loads(json.dumps(page_data(report)["mesh"]))
    assert [each["sent_bytes"] for each in kept["dimensions"]] == [each.sent_bytes for each in found]
    text = to_markdown(report)
    assert "**The mesh, dp 4 x tp 2:**" in text and "| `tp` | 2 | 1 | 6 |" in text


def test_a_step_that_is_not_on_a_mesh_has_none() -> None:
    step = memfit.Step(Model, memfit.spec((8, 64), torch.int64), loss=lambda output, _: output.square().mean())
    report = Report.of(memfit.plan(step, target="h100-sxm", ranks=4, progress=False), step)
    assert not find_dimensions(report, report.baseline) and "The mesh" not in to_markdown(report)
    assert json.loads(to_json(report))["mesh"] is None
