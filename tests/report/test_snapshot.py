"""The memory snapshot: torch's own tools open it, and its events add up to the predicted peak."""

from __future__ import annotations

import copy
import pickle
import pickletools
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from llama import Shape, training_step
from torch import nn
from torch.cuda import _memory_viz

import memfit
from memfit.analysis.report import Report
from memfit.capture import Category
from memfit.memory import Timeline, reserved
from memfit.report.snapshot import write_snapshot
from tests.devices import without_workspaces

H100 = without_workspaces()

SMALL = Shape(layers=3, hidden=256, heads=4, key_value_heads=2, feed_forward=512, vocabulary=512)

# What the unpickler of memory_viz knows.
OPCODES = {
    *("APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET"),
    *("MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINUNICODE"),
    *("NEWTRUE", "NONE", "SETITEM"),
}


@lru_cache
def tight(device: str = "h100-sxm", ranks: int = 1) -> Report:
    trace = memfit.trace(training_step(SMALL, batch=2, length=512), target=without_workspaces(device))
    free = memfit.plan(trace, ranks=ranks, progress=False)
    plan = memfit.plan(trace, ranks=ranks, budget=int(free.baseline.peak_bytes * 0.8), progress=False)
    assert plan.checkpoint
    return Report.of(plan, trace)


def read(report: Report, folder: Path, **options: Any) -> dict[str, Any]:
    return pickle.loads(write_snapshot(report, folder / "snapshot.pickle", **options).read_bytes())


def replayed_peak(snapshot: dict[str, Any]) -> int:
    """The highest sum of live allocations; no event may break the rules of an allocator."""
    (events,) = snapshot["device_traces"]
    live: dict[int, int] = {}
    segments: dict[int, int] = {}
    now = peak = 0
    for event in events:
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "segment_alloc":
            assert address not in segments
            segments[address] = size
        elif action == "segment_free":
            assert segments.pop(address) == size
        elif action == "alloc":
            assert address not in live and size > 0
            assert any(begin <= address and address + size <= begin + n for begin, n in segments.items())
            live[address] = size
            now += size
        elif action == "free_requested":
            assert live[address] == size
        elif action == "free_completed":
            now -= live.pop(address)
        peak = max(peak, now)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    left = {block["address"]: block["size"] for block in blocks if block["state"] == "active_allocated"}
    assert left == live
    assert {segment["address"]: segment["total_size"] for segment in snapshot["segments"]} == segments
    return peak


@pytest.mark.parametrize(("device", "ranks"), [("h100-sxm", 1), ("h100-sxm", 4), ("cpu", 1)])
@pytest.mark.parametrize("baseline", [False, True])
def test_its_events_give_the_predicted_peak_to_the_byte(
    device: str, ranks: int, baseline: bool, tmp_path: Path
) -> None:
    report = tight(device, ranks)
    timeline = report.baseline if baseline else report.planned
    assert isinstance(timeline, Timeline)
    predicted = reserved(timeline.allocations, report.target.device)
    snapshot = read(report, tmp_path, baseline=baseline)
    assert replayed_peak(snapshot) == predicted.peak_allocated_bytes
    held = sum(segment["total_size"] for segment in snapshot["segments"])
    if device == "cpu":
        assert predicted.peak_allocated_bytes == timeline.peak_bytes
    else:
        assert predicted.first_step_reserved_bytes <= held <= predicted.peak_reserved_bytes


@pytest.mark.parametrize(("device", "ranks"), [("h100-sxm", 1), ("h100-sxm", 4), ("cpu", 1)])
def test_torch_opens_it(device: str, ranks: int, tmp_path: Path) -> None:
    snapshot = read(tight(device, ranks), tmp_path)
    (events,) = snapshot["device_traces"]
    told = _memory_viz.trace(snapshot)
    assert f"{len(events)} entries" in told and "free completed" in told
    summed = _memory_viz.segsum(snapshot)
    assert f"segments: {len(snapshot['segments'])}" in summed
    flames = _memory_viz.memory(snapshot, format_flamegraph=str)
    assert "optimizer state" in flames and "active_allocated" in flames
    assert _memory_viz.segments(snapshot, format_flamegraph=str).count("\n") >= len(snapshot["segments"])
    for plot in (_memory_viz.trace_plot(copy.deepcopy(snapshot)), _memory_viz.segment_plot(snapshot)):
        assert "MemoryViz.js" in plot and "base64" in plot
    kept = _memory_viz.filter_alloc_free_pairs(copy.deepcopy(snapshot))["device_traces"][0]
    assert sum(event["action"] == "alloc" for event in kept) == sum(
        block["state"] == "active_allocated" for segment in snapshot["segments"] for block in segment["blocks"]
    )


def test_the_web_page_can_read_every_opcode_and_finds_the_category_it_needs(tmp_path: Path) -> None:
    path = write_snapshot(tight("h100-sxm", 1), tmp_path / "snapshot.pickle")
    used = {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())}
    assert used <= OPCODES
    categories = {
        event["category"] for event in read(tight("h100-sxm", 1), tmp_path)["device_traces"][0] if "category" in event
    }
    assert "unknown" in categories and categories <= {*map(str, (c.value for c in Category)), "unknown"}


def test_frames_name_the_line_the_module_and_the_category(tmp_path: Path) -> None:
    (events,) = read(tight("h100-sxm", 1), tmp_path)["device_traces"]
    allocs = [event["frames"] for event in events if event["action"] == "alloc"]
    weights = [frames for frames in allocs if frames[0]["name"] == "parameter layers.0.attention.query.weight"]
    assert weights == [[{"filename": "layers.0.attention.query", "line": 0, "name": weights[0][0]["name"]}]]
    line, _ = next(f for f in allocs if f[-1]["name"] == "activation mm" and "gate" in f[-1]["filename"])
    assert line["filename"].endswith("llama.py") and line["line"] > 0 and line["name"] == "forward"
    again = [frames for frames in allocs if frames[-1]["name"] == "second run"]
    assert again and {frames[-1]["filename"] for frames in again} == {
        entry.unit
        for entry in tight("h100-sxm", 1).plan.checkpoint  # type: ignore[union-attr]
    }
    assert all(event["frames"] for event in events if event["action"] == "free_requested")
    other = read(tight("h100-sxm", 1), tmp_path, baseline=True)["device_traces"][0]
    assert not [event for event in other if any(frame["name"] == "second run" for frame in event["frames"])]


def test_the_same_report_is_the_same_bytes(tmp_path: Path) -> None:
    first = write_snapshot(tight("h100-sxm", 1), tmp_path / "a.pickle").read_bytes()
    assert write_snapshot(tight("h100-sxm", 1), tmp_path / "b.pickle").read_bytes() == first
    assert write_snapshot(tight("h100-sxm", 1), tmp_path / "c.pickle", baseline=True).read_bytes() != first


def test_an_infeasible_plan_has_only_the_step_without_it(tmp_path: Path) -> None:
    step = memfit.Step(lambda: nn.Linear(64, 64), memfit.spec((32, 64)), loss=lambda y, _: y.sum())
    trace = memfit.trace(step, target=H100)
    report = Report.of(memfit.plan(trace, budget=4096, progress=False), trace)
    assert report.planned is None
    for each in (report, Report.of_trace(trace)):
        snapshot = read(each, tmp_path)
        assert snapshot["allocator_settings"]["step"] == "without a plan"
        assert replayed_peak(snapshot) > 4096
    assert read(tight("h100-sxm", 1), tmp_path)["allocator_settings"]["step"] == "with the plan"


def test_tensors_without_bytes_have_no_events(tmp_path: Path) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum() + x.new_empty(0, 8).relu().sum()

    for device in ("cpu", "h100-sxm"):
        report = Report.of_trace(memfit.trace(memfit.Step(Empty, memfit.spec((4, 8))), target=device))
        predicted = reserved(report.baseline.allocations, report.target.device).peak_allocated_bytes
        assert replayed_peak(read(report, tmp_path)) == predicted
