"""A step as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: what runs when, and memory meanwhile.

One process is the step with the plan and one the step without. Each has a track of ops, one of module calls, under
sharding one for each kind of collective, where units offload one for each way, where the loss is computed in chunks one
for these, and counters of memory. Times are those of `memfit.report.streams`.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from memfit._version import __version__
from memfit.analysis import Report
from memfit.capture import NO_INDEX, Op, Phase, Trace, short
from memfit.cost import Collective
from memfit.files import write_whole
from memfit.memory import BETWEEN, CATEGORIES, Timeline
from memfit.paths import module_label
from memfit.report.headline import without_plan_of
from memfit.report.lanes import Span, find_chunks
from memfit.report.streams import Clock, Copy, Sending, Wait, build_clock

_MODULES, _COMPUTE, _TIMELESS = 1, 2, 5
_TRACKS = {_MODULES: "modules", _COMPUTE: "compute", _TIMELESS: "ops that take no time"}
_COLLECTIVES = {Collective.ALL_GATHER: (3, "all-gather"), Collective.REDUCE_SCATTER: (4, "reduce-scatter")}
_COPIES = {True: (6, "offload to the host"), False: (7, "offload back")}
_CHUNKS = 8
_AGAIN = "second run"


class _Event(msgspec.Struct, omit_defaults=True, gc=False):
    """An event of the format; `ph` is its kind, times are in microseconds."""

    ph: str
    name: str
    pid: int
    tid: int = 0
    ts: float | None = None
    dur: float | None = None
    cat: str = ""
    s: str = ""
    args: dict[str, Any] | None = None


def write_perfetto(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the trace, compressed where the path ends in `.gz`; the same report is the same bytes."""
    document = {"displayTimeUnit": "ms", "otherData": _about(report), "traceEvents": list(_events(report))}
    content = msgspec.json.encode(document)
    if str(path).endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    return write_whole(path, content, "step.perfetto.json.gz")


def _about(report: Report) -> dict[str, str]:
    found = {"memfit": __version__, "fingerprint": report.trace.fingerprint, "device": report.target.device.title}
    return found | {"ranks": str(report.target.ranks)}


def _events(report: Report) -> Iterator[_Event]:
    """Yield every event; the process that people want to see comes first."""
    without = without_plan_of(report)
    steps = [] if report.planned is None else [("with the plan", report.planned)]
    for pid, (name, timeline) in enumerate([*steps, (without, report.baseline)], start=1):
        yield from _Process(report, timeline, pid, name).events()


@dataclass(frozen=True, slots=True)
class _Process:
    """One step as a process of the trace."""

    report: Report
    timeline: Timeline
    pid: int
    name: str

    def events(self) -> Iterator[_Event]:
        clock = build_clock(self.report, self.timeline)
        yield from self._names(clock)
        yield from self._ops(clock)
        yield from self._modules(clock)
        yield from self._collectives(clock.sendings)
        yield from self._copies(clock.copies)
        for chunk in self._chunks(clock):
            args = {"bytes": chunk.size_bytes}
            yield self._slice(_CHUNKS, chunk.what, chunk.begin_ns, chunk.end_ns, args, "loss in chunks")
        yield from self._counters(clock)

    def _names(self, clock: Clock) -> Iterator[_Event]:
        yield _Event("M", "process_name", self.pid, args={"name": self.name})
        yield _Event("M", "process_sort_index", self.pid, args={"sort_index": self.pid})
        kinds = {sending.transfer.kind for sending in clock.sendings}
        tracks = _TRACKS | dict(track for kind, track in _COLLECTIVES.items() if kind in kinds)
        tracks |= dict(_COPIES.values()) if clock.copies else {}
        tracks |= {_CHUNKS: "loss in chunks"} if self._chunks(clock) else {}
        for tid, name in sorted(tracks.items()):
            yield _Event("M", "thread_name", self.pid, tid, args={"name": name})
            yield _Event("M", "thread_sort_index", self.pid, tid, args={"sort_index": tid})

    def _slice(self, tid: int, name: str, begin_ns: int, end_ns: int, args: dict[str, Any], cat: str) -> _Event:
        return _Event("X", name, self.pid, tid, begin_ns / 1e3, (end_ns - begin_ns) / 1e3, cat, args=args)

    def _instant(self, tid: int, name: str, ns: int, args: dict[str, Any], cat: str) -> _Event:
        return _Event("i", name, self.pid, tid, ns / 1e3, cat=cat, s="t", args=args)

    def _ops(self, clock: Clock) -> Iterator[_Event]:
        """Yield ops in the order in which they run, and the waits between them."""
        timeline, trace = self.timeline, self.timeline.trace
        for wait in clock.waits:
            yield self._wait(wait)
        for work in clock.host:
            args = {"unit": module_label(work.unit), "note": "hooks of both runs, and answers for what is saved"}
            yield self._slice(_COMPUTE, "host work for a second run", work.begin_ns, work.end_ns, args, "host")
        columns = (timeline.op.tolist(), timeline.run.tolist(), clock.begins_ns.tolist(), clock.ends_ns.tolist())
        for op, run, begin_ns, end_ns in zip(*columns, strict=True):
            if run == BETWEEN or op == len(trace.ops):
                continue
            args = _op_args(trace, op)
            name, cat = short(trace.ops[op].name), trace.ops[op].phase.value
            if run != NO_INDEX:
                args |= {"recomputed": True, "second run of": module_label(timeline.units[run].name)}
                name, cat = f"{name} (again)", _AGAIN
            if begin_ns == end_ns:
                yield self._instant(_TIMELESS, name, begin_ns, args, cat)
            else:
                yield self._slice(_COMPUTE, name, begin_ns, end_ns, args, cat)

    def _wait(self, wait: Wait) -> _Event:
        if wait.transfer is None:
            args = {"note": "waits, copies and slower kernels together; where each of them is, is not known"}
            return self._slice(_COMPUTE, "waiting for collectives", wait.begin_ns, wait.end_ns, args, "wait")
        what = _COLLECTIVES[wait.transfer.kind][1]
        args = {"module": module_label(wait.transfer.module), "bytes": wait.transfer.size_bytes}
        return self._slice(_COMPUTE, f"waiting for {what}", wait.begin_ns, wait.end_ns, args, "wait")

    def _collectives(self, sendings: tuple[Sending, ...]) -> Iterator[_Event]:
        for sending in sendings:
            transfer = sending.transfer
            tid, what = _COLLECTIVES[transfer.kind]
            args = {
                "module": module_label(transfer.module),
                "bytes": transfer.size_bytes,
                "issued before op": transfer.issued,
                "needed before op": transfer.needed,
            }
            name = f"{what} {module_label(transfer.module)}"
            if sending.exact:
                yield self._slice(tid, name, sending.begin_ns, sending.end_ns, args, what)
            else:
                args["note"] = "it runs between these two ops; when, is not known"
                yield self._instant(tid, name, sending.begin_ns, args, what)

    def _chunks(self, clock: Clock) -> list[Span]:
        return list(find_chunks(self.report, self.timeline, clock))

    def _copies(self, copies: tuple[Copy, ...]) -> Iterator[_Event]:
        for copy in copies:
            tid, what = _COPIES[copy.to_host]
            unit = module_label(copy.unit)
            args = {"unit": unit, "bytes": copy.size_bytes}
            yield self._slice(
                tid, f"{'to the host' if copy.to_host else 'back'} {unit}", copy.begin_ns, copy.end_ns, args, what
            )
            if copy.wait is not None:
                note = {"note": "waits, and what copies take from the ops beside them"}
                yield self._slice(_COMPUTE, f"waiting for {what}", *copy.wait, args | note, "wait")

    def _modules(self, clock: Clock) -> Iterator[_Event]:
        """Yield phases, the module calls in them and recomputes, each as long as its ops follow one another.

        Calls nest, so the calls around an op are a path; a slice ends where the path leaves it. Viewers want the outer
        of two slices that begin together first.
        """
        timeline, paths = self.timeline, _Paths(self.timeline)
        opened: list[tuple[Hashable, int]] = []
        found: list[tuple[int, int, int, Hashable]] = []
        end_ns = 0
        columns = (timeline.op.tolist(), timeline.run.tolist(), clock.begins_ns.tolist(), clock.ends_ns.tolist())
        for op, run, begin_ns, next_ns in zip(*columns, strict=True):
            if run == BETWEEN:
                continue
            path = paths.of(op, run)
            same = 0
            while same < min(len(path), len(opened)) and path[same] == opened[same][0]:
                same += 1
            while len(opened) > same:
                place, since_ns = opened.pop()
                if end_ns > since_ns:
                    found.append((since_ns, len(opened), end_ns, place))
            opened += [(place, begin_ns) for place in path[same:]]
            end_ns = next_ns
        for since_ns, _, until_ns, place in sorted(found, key=lambda each: each[:2]):
            name, args, cat = paths.shown(place)
            yield self._slice(_MODULES, name, since_ns, until_ns, args, cat)

    def _counters(self, clock: Clock) -> Iterator[_Event]:
        """Yield memory whenever it changes; of instants without a length the highest counts, for a nanosecond."""
        plan, timeline = self.report.plan, self.timeline
        if plan is not None:
            for ns in (0, clock.end_ns):
                yield _Event("C", "budget", self.pid, ts=ns / 1e3, args={"bytes": plan.budget_bytes})
        rows = [row for row in range(len(CATEGORIES)) if timeline.during_by_row[row].any()]
        names = [CATEGORIES[row].value for row in rows]
        levels = timeline.during_by_row[rows].T.tolist()
        moments = [(ns, levels[instant]) for ns, instant in _moments(timeline.during_bytes, clock)]
        if moments[0][0] > 0:  # the step begins with a wait
            moments.insert(0, (0, timeline.before_by_row[rows, 0].tolist()))
        last: list[int] | None = None
        for ns, found in moments:
            if found != last:
                by_category = dict(zip(names, found, strict=True))
                yield _Event("C", "memory", self.pid, ts=ns / 1e3, args={"bytes": sum(found)})
                yield _Event("C", "memory by category", self.pid, ts=ns / 1e3, args=by_category)
                last = found


def _moments(during: np.ndarray, clock: Clock) -> Iterator[tuple[int, int]]:
    """Yield times and the instants whose memory is there from then on: at most one for each nanosecond."""
    begins, ends = clock.begins_ns.tolist(), clock.ends_ns.tolist()
    at, count = 0, len(begins)
    while at < count:
        last = at
        while last + 1 < count and begins[last + 1] == begins[at]:
            last += 1
        highest = at + int(during[at : last + 1].argmax())
        yield begins[at], highest
        if highest != last and ends[last] - begins[last] > 1:
            yield begins[at] + 1, last
        at = last + 1


class _Paths:
    """The slices around each op: its phase, the recompute that it belongs to, the module calls, outermost first."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.trace = timeline, timeline.trace
        self._calls: dict[int, tuple[int, ...]] = {NO_INDEX: ()}

    def of(self, op: int, run: int) -> tuple[Hashable, ...]:
        """Return the slices of an op from outside in; none at the end of the step."""
        ops = self.trace.ops
        if op == len(ops):
            return ()
        found = ops[op]
        if run == NO_INDEX:
            side = "backward" if found.phase is Phase.BACKWARD else ""
            return (found.phase, *((side, call) for call in self._chain(found)))
        unit = self.timeline.units[run]
        chain = [
            call for call in self._chain(found) if unit.call in self.trace.ancestors(call) or unit.call == NO_INDEX
        ]
        return (Phase.BACKWARD, run, *((_AGAIN, run, call) for call in chain))

    def _chain(self, op: Op) -> tuple[int, ...]:
        if op.call not in self._calls:
            self._calls[op.call] = self.trace.ancestors(op.call)[::-1]
        return self._calls[op.call]

    def shown(self, place: Any) -> tuple[str, dict[str, Any], str]:
        """Return name, arguments and category of a slice."""
        if isinstance(place, Phase):
            return place.value, {}, "phase"
        if isinstance(place, int):
            unit = self.timeline.units[place]
            return (
                f"{_AGAIN} of {module_label(unit.name)}",
                {"unit": module_label(unit.name), "kind": unit.kind},
                _AGAIN,
            )
        side, number = place[0], place[-1]
        call = self.trace.calls[number]
        args = {"module": module_label(call.module), "kind": call.kind, "call": call.index}
        again = " (again)" if side == _AGAIN else f" {side}" if side else ""
        return f"{module_label(call.module)}{again}", args, side or "forward"


def _op_args(trace: Trace, index: int) -> dict[str, Any]:
    op = trace.ops[index]
    module = module_label(trace.calls[op.call].module) if op.call != NO_INDEX else "outside any module"
    return {
        "op": index,
        "name": op.name,
        "module": module,
        "source": trace.source_of(index),
        "FLOPs": op.flops,
        "read bytes": op.read_bytes,
        "written bytes": op.written_bytes,
        "recomputed": False,
    }
