"""Markdown for pull requests: the plan's own figures, and nothing in a name that becomes markup."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from llama import Shape, training_step
from markdown_it import MarkdownIt
from markdown_it.token import Token
from torch import nn

import memfit
from memfit.analysis.levers import Case, find_levers
from memfit.analysis.report import Report
from memfit.cost import Roofline
from memfit.report.markdown import to_markdown
from memfit.units import display_bytes, display_ms
from tests.devices import without_workspaces

H100 = without_workspaces()

SMALL = Shape(layers=3, hidden=256, heads=4, key_value_heads=2, feed_forward=512, vocabulary=512)
HOSTILE = "a|b`c``d<img src=x onerror=alert(1)>*e*_f_[g](http://h)@i#1&amp;"


class Hostile(nn.Module):
    """Modules whose names are markup."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(2):
            inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            self.add_module(f"{HOSTILE}{number}", inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


@lru_cache
def tight(ranks: int = 1, part: float = 0.8) -> Report:
    trace = memfit.trace(training_step(SMALL, batch=2, length=512), target=H100)
    free = memfit.plan(trace, ranks=ranks, progress=False)
    plan = memfit.plan(trace, ranks=ranks, budget=int(free.baseline.peak_bytes * part), progress=False)
    return Report.of(plan, trace)


def tokens_of(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def tables_of(text: str) -> list[list[list[str]]]:
    """Cells of every table, as a reader sees them."""
    tables: list[list[list[str]]] = []
    cell = False
    for token in tokens_of(text):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type in ("td_open", "th_open"):
            cell = True
        elif token.type == "inline" and cell:
            tables[-1][-1].append("".join(each.content for each in token.children or ()))
            cell = False
    return tables


@pytest.mark.parametrize("ranks", [1, 4])
def test_tables_have_the_figures_of_the_plan(ranks: int) -> None:
    report = tight(ranks)
    plan = report.plan
    assert plan is not None and plan.predicted is not None
    text = to_markdown(report)
    assert text.startswith("### memfit: fits, peak ") and text.endswith("\n") and text == to_markdown(report)
    before_and_after, decided = tables_of(text)
    rows = {row[0]: row[1:3] for row in before_and_after[1:]}
    both = plan.baseline, plan.predicted
    assert rows["peak"] == [display_bytes(each.peak_bytes) for each in both]
    assert rows["reserved by the allocator"] == [display_bytes(each.peak_reserved_bytes) for each in both]
    assert rows["step"] == [display_ms(each.step_ms) for each in both]
    for category in plan.baseline.peak_by_category:
        assert rows[f"{category.value} at the peak"] == [
            display_bytes(each.peak_by_category.get(category, 0)) for each in both
        ]
    assert ("waiting for communication" in rows) == (ranks > 1)
    assert sum(int(row[1]) for row in decided[1:]) == len(plan.checkpoint)
    if ranks == 1:
        assert [row[0] for row in decided[1:]] == ["layers.0-2.feed_forward"]


def test_what_was_assumed_is_there() -> None:
    text = to_markdown(tight(1))
    for part in ("NVIDIA H100", "int64 2x512", "AdamW", "fingerprint"):
        assert part in text


def test_names_stay_names() -> None:
    step = memfit.Step(Hostile, memfit.spec((4096, 64)), loss=lambda y, _: y.sum())
    trace = memfit.trace(step, target=H100)
    free = memfit.plan(trace, progress=False)
    plan = memfit.plan(trace, budget=int(free.baseline.peak_bytes * 0.7), progress=False)
    assert plan.checkpoint
    text = to_markdown(Report.of(plan, trace))
    for table in tables_of(text):
        assert len({len(row) for row in table}) == 1
    assert any(HOSTILE in row[0] for row in tables_of(text)[1])
    inside = [child for token in tokens_of(text) for child in token.children or ()]
    assert {child.type for child in inside} <= {"text", "text_special", "strong_open", "strong_close", "code_inline"}
    blocks = [token.content for token in tokens_of(text) if token.type == "html_block"]
    assert blocks and all("img" not in block for block in blocks)
    assert HOSTILE in "".join(child.content for child in inside if child.type != "code_inline")


def test_an_infeasible_plan_says_what_is_missing_and_what_would_help() -> None:
    report = tight(part=0.3)
    plan = report.plan
    assert plan is not None and plan.status == "infeasible" and plan.blocker is not None
    case = Case(report=report, step=None, cost=Roofline.of(report.target), budget_bytes=plan.budget_bytes)
    levers = find_levers(case)
    text = to_markdown(report, levers)
    assert text.startswith("### memfit: does not fit")
    assert plan.minimum_budget_bytes is not None and display_bytes(plan.minimum_budget_bytes) in text
    tables = tables_of(text)
    assert tables[0][0][2] == "the lowest there is"
    assert levers and [row[0] for row in tables[1][1:]] == [lever.name for lever in levers]
    for row, lever in zip(tables[1][1:], levers, strict=True):
        assert (row[4] == "enough by itself") == (lever.peak_bytes <= plan.budget_bytes)
    assert "What would help" not in to_markdown(report)


def test_a_step_without_a_plan_and_a_curve_are_shown() -> None:
    report = tight(1)
    alone = Report.of_trace(report.trace)
    (table,) = tables_of(to_markdown(alone))
    assert ["peak", display_bytes(alone.baseline.peak_bytes)] in table
    assert "**Trade-off:** from " in to_markdown(report.with_curve(points=2))


def test_a_verification_is_shown() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)))
    x = torch.randn(512, 32)
    step = memfit.Step(model, x, loss=lambda y, _: y.square().mean())
    free = memfit.plan(step, target="cpu", progress=False)
    plan = memfit.plan(step, target="cpu", budget=int(free.baseline.peak_bytes * 0.75), progress=False)
    found = plan.verify(step, steps=1, time_tolerance=None)
    text = to_markdown(Report.of(plan, step, verification=found))
    assert "**Verified on " in text and ("the plan holds" in text) == found.ok
    rows = {row[0]: row[1:] for row in tables_of(text)[1]}
    measured = [display_bytes(found.peak.predicted_bytes), display_bytes(found.peak.measured_bytes)]
    assert rows["peak with the plan"][:2] == measured
