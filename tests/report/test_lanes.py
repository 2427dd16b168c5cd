"""Lanes: what a plan does over a step, as long as predicted, on the page and in Perfetto."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import memfit
from memfit.analysis import Report
from memfit.hardware import OffloadLink, Target
from memfit.report.lanes import Span, build_lanes
from memfit.report.markdown import to_markdown
from memfit.report.page.data import page_data
from memfit.report.perfetto import write_perfetto
from memfit.report.streams import build_clock
from memfit.solve import SolveOptions

CLASSES, CHUNKS = 512, 4


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(6)
        )
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), labels)


@lru_cache(1)
def report() -> Report:
    """A step of which some units recompute, some offload over a slow disk, and the loss is in chunks."""
    torch.manual_seed(0)
    target = Target.parse("cpu")
    disk = OffloadLink(name="disk", to_host_bytes_per_s=3e8, to_device_bytes_per_s=2e8, compute_s_per_byte=1e-10)
    target = replace(target, device=replace(target.device, disk=disk))
    step = memfit.Step(Classifier(), {"x": torch.randn(512, 64), "labels": torch.arange(512) % CLASSES})
    options = SolveOptions(decide=("loss", "offload"), loss_chunks=CHUNKS)
    tight = memfit.plan(step, target=target, budget="1KiB", options=options, progress=False)
    assert tight.minimum_budget_bytes is not None
    least = tight.minimum_budget_bytes
    budget = int(least + 0.1 * (tight.baseline.peak_bytes - least))
    plan = memfit.plan(step, target=target, budget=budget, options=options, progress=False)
    assert any(entry.offload for entry in plan.checkpoint) and any(entry.stop >= 0 for entry in plan.checkpoint)
    return Report.of(plan, step)


def lanes() -> dict[str, list[Span]]:
    planned = report().planned
    assert planned is not None
    return build_lanes(report(), planned, build_clock(report(), planned))


def test_the_step_on_the_clock_is_as_long_as_predicted() -> None:
    plan, planned = report().plan, report().planned
    assert plan is not None and plan.predicted is not None and planned is not None
    assert plan.predicted.exposed_offload_ms
    assert build_clock(report(), planned).end_ns / 1e6 == pytest.approx(plan.predicted.step_ms, abs=1e-3)
    assert not build_clock(report(), report().baseline).copies


def test_copies_have_the_link_alone_and_move_what_the_plan_offloads() -> None:
    plan, found = report().plan, lanes()
    assert plan is not None
    away = {entry.unit: entry.offloaded_bytes for entry in plan.checkpoint if entry.offloaded_bytes}
    for key, rate in (("away", 3e8), ("back", 2e8)):
        assert {span.what: span.size_bytes for span in found[key]} == away
        for span in found[key]:
            assert span.end_ns - span.begin_ns == pytest.approx(span.size_bytes / rate * 1e9, abs=2)
        ordered = sorted(found[key], key=lambda span: span.begin_ns)
        assert all(one.end_ns <= other.begin_ns for one, other in itertools.pairwise(ordered))


def test_chunks_run_in_the_forward_and_again_in_the_backward() -> None:
    found = lanes()["chunk"]
    names = [f"chunk {number} of {CHUNKS}" for number in range(1, CHUNKS + 1)]
    assert [span.what for span in found] == [*names, *reversed(names)]
    assert all(span.size_bytes == 512 * CLASSES * 4 // CHUNKS for span in found)
    assert all(one.end_ns <= other.begin_ns for one, other in itertools.pairwise(found))


def test_the_page_perfetto_and_markdown_show_them(tmp_path: Path) -> None:
    data = page_data(report())
    drawn = data["timelines"]["planned"]["lanes"]
    assert set(drawn) == {"recompute", "chunk", "away", "back"}
    for key, spans in lanes().items():
        assert [(data["strings"][each[0]], each[5]) for each in drawn[key]] == [
            (span.what, span.size_bytes) for span in spans
        ]
    assert [row[0] for row in data["decided"]["rows"]] == ["recompute", "offload", "loss in chunks"]
    document = msgspec.json.decode(write_perfetto(report(), tmp_path / "step.json").read_bytes())
    names = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert {"offload to the host", "offload back", "loss in chunks"} <= names
    assert "**Decided together**" in to_markdown(report()) and "| offload |" in to_markdown(report())
    assert "decided together" in str(report().plan)
