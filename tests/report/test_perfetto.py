"""The Perfetto file: events of the format, tracks without overlaps, and the plan's own figures."""

from __future__ import annotations

import gzip
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import torch
from llama import Shape, training_step
from msgspec import Meta
from torch import nn

import memfit
from memfit.analysis.report import Report
from memfit.report.perfetto import write_perfetto
from tests.devices import without_workspaces

H100 = without_workspaces()

SMALL = Shape(layers=3, hidden=256, heads=4, key_value_heads=2, feed_forward=512, vocabulary=512)
Us = Annotated[float, Meta(ge=0)]


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="ph"):
    name: Annotated[str, Meta(min_length=1)]
    pid: Annotated[int, Meta(ge=1)]


class Slice(Strict, tag="X"):
    """A complete event."""

    tid: Annotated[int, Meta(ge=1)]
    ts: Us
    dur: Annotated[float, Meta(gt=0)]
    cat: str
    args: dict[str, Any]


class Instant(Strict, tag="i"):
    tid: Annotated[int, Meta(ge=1)]
    ts: Us
    cat: str
    s: Literal["t"]
    args: dict[str, Any]


class Counter(Strict, tag="C"):
    ts: Us
    args: dict[str, Annotated[int, Meta(ge=0)]]


class Metadata(Strict, tag="M"):
    name: Literal["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
    args: dict[str, Any]
    tid: int = 0


class Document(msgspec.Struct, forbid_unknown_fields=True):
    displayTimeUnit: Literal["ms"]  # noqa: N815
    otherData: dict[str, str]  # noqa: N815
    traceEvents: list[Slice | Instant | Counter | Metadata]  # noqa: N815

    def tracks(self) -> dict[tuple[int, str], list[Slice]]:
        names = {(e.pid, e.tid): e.args["name"] for e in self.of(Metadata) if e.name == "thread_name"}
        found: dict[tuple[int, str], list[Slice]] = defaultdict(list)
        for event in self.of(Slice):
            found[event.pid, names[event.pid, event.tid]].append(event)
        return found

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.traceEvents if isinstance(event, kind)]

    def processes(self) -> dict[int, str]:
        return {e.pid: e.args["name"] for e in self.of(Metadata) if e.name == "process_name"}


@lru_cache
def tight(ranks: int = 1) -> Report:
    trace = memfit.trace(training_step(SMALL, batch=2, length=512), target=H100)
    free = memfit.plan(trace, ranks=ranks, progress=False)
    return Report.of(memfit.plan(trace, ranks=ranks, budget=int(free.baseline.peak_bytes * 0.8), progress=False), trace)


def read(report: Report, folder: Path) -> Document:
    return msgspec.json.decode(write_perfetto(report, folder / "step.json").read_bytes(), type=Document)


def ns(us: float) -> int:
    return round(us * 1000)


@pytest.mark.parametrize("ranks", [1, 4])
def test_slices_of_a_track_do_not_overlap_and_module_calls_nest(ranks: int, tmp_path: Path) -> None:
    tracks = read(tight(ranks), tmp_path).tracks()
    named = {name for _, name in tracks}
    assert named == {"compute", "modules", *(("all-gather", "reduce-scatter") if ranks > 1 else ())}
    for (_, name), slices in tracks.items():
        opened: list[int] = []
        last_ns = 0
        for each in slices if name == "modules" else sorted(slices, key=lambda each: each.ts):
            begin, end = ns(each.ts), ns(each.ts) + ns(each.dur)
            assert begin >= last_ns
            last_ns = begin
            while opened and opened[-1] <= begin:
                opened.pop()
            assert not opened or (name == "modules" and end <= opened[-1]), each
            opened.append(end)


@pytest.mark.parametrize("ranks", [1, 4])
def test_times_and_peaks_are_those_of_the_plan(ranks: int, tmp_path: Path) -> None:
    report = tight(ranks)
    assert report.plan is not None and report.plan.predicted is not None
    document = read(report, tmp_path)
    assert document.processes() == {1: "with the plan", 2: "without a plan" if ranks == 1 else "only sharded"}
    tracks = document.tracks()
    for pid, estimate in ((1, report.plan.predicted), (2, report.plan.baseline)):
        spent = sum(ns(each.dur) for each in tracks[pid, "compute"])
        assert spent == pytest.approx(estimate.step_ms * 1e6, abs=1)
        counters = [each for each in document.of(Counter) if each.pid == pid]
        assert max(each.args["bytes"] for each in counters if each.name == "memory") == estimate.peak_bytes
        by_category = [each for each in counters if each.name == "memory by category"]
        highest = max(by_category, key=lambda each: sum(each.args.values()))
        assert {name: n for name, n in highest.args.items() if n} == {
            category.value: n for category, n in estimate.peak_by_category.items()
        }
        assert {each.args["bytes"] for each in counters if each.name == "budget"} == {report.plan.budget_bytes}
        times = [each.ts for each in counters if each.name == "memory"]
        assert times == sorted(set(times)) and times[0] == 0


def test_second_runs_are_marked_and_as_long_as_the_plan_recomputes(tmp_path: Path) -> None:
    report = tight(1)
    assert report.plan is not None and report.plan.predicted is not None
    tracks = read(report, tmp_path).tracks()
    again = [each for each in tracks[1, "compute"] if each.args["recomputed"]]
    assert again and all(each.name.endswith("(again)") and each.args["second run of"] for each in again)
    assert sum(ns(each.dur) for each in again) == pytest.approx(
        report.plan.predicted.recompute_ms * 1e6, abs=len(again)
    )
    assert not any(each.args["recomputed"] for each in tracks[2, "compute"])
    runs = {each.args["unit"] for each in tracks[1, "modules"] if each.name.startswith("second run of")}
    assert runs == {entry.unit for entry in report.plan.checkpoint}


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_passes_and_the_work_of_the_host_have_their_time_on_a_cpu(ranks: int, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))

    step = memfit.Step(build, memfit.spec((2048, 64)), loss=lambda y, _: y.square().mean(), accumulation_steps=2)
    trace = memfit.trace(step, target="cpu")
    free = memfit.plan(trace, ranks=ranks, progress=False)
    plan = memfit.plan(trace, ranks=ranks, budget=int(free.baseline.peak_bytes * 0.7), progress=False)
    assert plan.predicted is not None and plan.checkpoint
    tracks = read(Report.of(plan, trace), tmp_path).tracks()
    slices = sorted(tracks[1, "compute"], key=lambda each: each.ts)
    assert sum(ns(each.dur) for each in slices) == pytest.approx(plan.predicted.step_ms * 1e6, abs=1)
    assert all(ns(one.ts) + ns(one.dur) <= ns(other.ts) for one, other in pairwise(slices))
    again = [each for each in slices if each.cat in ("host", "second run")]
    assert {each.cat for each in again} == {"host", "second run"}
    recompute_ns = plan.predicted.recompute_ms * 1e6
    assert sum(ns(each.dur) for each in again) == pytest.approx(recompute_ns, abs=len(again))
    assert len([each for each in tracks[1, "modules"] if each.name == "backward"]) == 2


def test_every_op_is_there_once_with_its_facts(tmp_path: Path) -> None:
    report = tight(1)
    document = read(report, tmp_path)
    slices, instants = document.of(Slice), document.of(Instant)
    ops = [each.args for each in (*slices, *instants) if each.pid == 2 and "op" in each.args]
    assert sorted(each["op"] for each in ops) == list(range(len(report.trace.ops)))
    product = next(each for each in ops if each["name"] == "aten.mm.default" and each["module"].endswith("gate"))
    assert product["FLOPs"] == report.trace.ops[product["op"]].flops > 0
    assert "llama.py:" in product["source"]


def test_collectives_are_where_the_step_waits_for_them(tmp_path: Path) -> None:
    report = tight(4)
    sharding = report.problem.sharding
    assert sharding is not None
    tracks = read(report, tmp_path).tracks()
    for pid in (1, 2):
        sent = [*tracks[pid, "all-gather"], *tracks[pid, "reduce-scatter"]]
        assert len(sent) == len(sharding.transfers)
        assert sum(ns(each.dur) for each in sent) == pytest.approx(sharding.communication_ms * 1e6, abs=len(sent))
        waits = [each for each in tracks[pid, "compute"] if each.cat == "wait"]
        assert sum(ns(each.dur) for each in waits) == pytest.approx(sharding.exposed_ms * 1e6, abs=len(waits))
        ops = [each for each in tracks[pid, "compute"] if each.args.get("recomputed") is False]
        began = {each.args["op"]: ns(each.ts) for each in ops}
        for each in sent:
            needed = [op for op in began if op >= each.args["needed before op"]]
            assert not needed or ns(each.ts) + ns(each.dur) <= began[min(needed)] + 1
            before = [op for op in began if op < each.args["issued before op"]]
            # A gather of the forward begins when the one before it has been copied out, ahead of the op.
            assert not before or ns(each.ts) >= began[max(before)] or each.cat == "all-gather"


def test_no_time_is_claimed_for_collectives_whose_order_does_not_give_the_exposed_time(tmp_path: Path) -> None:
    report = tight(4)
    sharding = report.problem.sharding
    assert sharding is not None
    other = replace(sharding, exposed_ms=2 * sharding.exposed_ms)
    changed = Report(problem=replace(report.problem, sharding=other), plan=report.plan)
    document = read(changed, tmp_path)
    tracks = document.tracks()
    assert {name for _, name in tracks} == {"compute", "modules"}
    placed = [each for each in document.of(Instant) if each.cat in ("all-gather", "reduce-scatter") and each.pid == 1]
    assert len(placed) == len(sharding.transfers) and all("not known" in each.args["note"] for each in placed)
    (wait,) = [each for each in tracks[1, "compute"] if each.cat == "wait"]
    assert ns(wait.dur) == pytest.approx(other.exposed_ms * 1e6, abs=1)


def test_the_same_report_is_the_same_bytes_also_compressed(tmp_path: Path) -> None:
    report = tight(1)
    plain = write_perfetto(report, tmp_path / "a.json").read_bytes()
    packed = write_perfetto(report, tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress(packed) == plain and len(packed) < len(plain) // 5
    assert write_perfetto(report, str(tmp_path / "c.json.gz")).read_bytes() == packed


def test_a_step_without_a_plan_is_one_process_without_a_budget(tmp_path: Path) -> None:
    step = memfit.Step(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Flatten()), memfit.spec((4, 8)), loss=lambda y, _: y.sum()
    )
    document = read(Report.of_trace(memfit.trace(step, target="cpu")), tmp_path)
    assert document.processes() == {1: "without a plan"}
    assert not [each for each in document.of(Counter) if each.name == "budget"]


def test_modules_called_twice_and_existing_checkpoints_nest(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(64, 64), nn.GELU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return self.inner(self.inner(x))

    step = memfit.Step(Twice, memfit.spec((256, 64)), loss=lambda y, _: y.sum())
    tracks = read(Report.of_trace(memfit.trace(step, target=H100)), tmp_path).tracks()
    calls = [each for each in tracks[1, "modules"] if each.name == "inner"]
    assert [each.args["call"] for each in calls] == [0, 1, 2]


@pytest.mark.parametrize("path", ["", ".", "nowhere/step.json", 3])
def test_a_path_that_cannot_be_written_is_refused(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(memfit.InputError, match=r"step\.perfetto\.json\.gz|make it first"):
        write_perfetto(tight(1), path)
