"""Memory over a step as it is drawn: few points, the exact highest ones among them, and what is alive at each.

Note [Points]: a step of 126 layers has tens of thousands of instants. They are cut into buckets of neighbours; the
highest and the lowest instant of each are drawn, and so is every instant at which a phase or a recompute begins or
ends. So no local maximum that could be seen is lost, and the highest point drawn is the peak, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.analysis import Report, allocation_bytes, round_to_block
from memfit.capture import NO_INDEX, Category, Phase, short
from memfit.memory import BETWEEN, CATEGORIES, Allocation, Timeline
from memfit.paths import alike, module_label
from memfit.report.lanes import Span, build_lanes
from memfit.report.streams import Clock, build_clock
from memfit.report.tree import Strings

POINTS = 2000
"""About the most points of one timeline."""
_ALIVE = 6
_PHASES = tuple(Phase)
_LEAST_SPAN = 200
"""A phase shorter than this part of the step is drawn as part of the one before it."""

_OF_SHARDING = {
    Category.PARAMETER: "shards of parameters",
    Category.OPTIMIZER_STATE: "shards of optimizer state",
    Category.GRADIENT: "gradients",
    Category.GATHERED_PARAMETER: "gathered parameters",
    Category.COMMUNICATION: "communication buffers",
    Category.TEMPORARY: "temporaries",
}

Ints = npt.NDArray[np.int64]
_Kind = tuple[str, str, Category, bool, int]
"""Name and module without their numbers, category, whether it is recomputed, bytes."""


def draw_timeline(report: Report, timeline: Timeline, strings: Strings) -> dict[str, Any]:
    """Return one timeline for the page; texts are indices into `strings`."""
    trace, ops = timeline.trace, len(timeline.trace.ops)
    phases, runs = _phases(timeline), _second_runs(timeline)
    instants = choose_instants(timeline.during_bytes, (edge for span in (*phases, *runs) for edge in span[1:]))
    clock = build_clock(report, timeline)
    starts_ms = clock.begins_ns / 1e6
    phase_at = np.zeros(len(timeline.op), np.int64)
    for phase, begin, end in phases:
        phase_at[begin:end] = phase
    op, module, source, work = [], [], [], []
    for instant in instants.tolist():
        number, between = int(timeline.op[instant]), int(timeline.run[instant]) == BETWEEN
        if number >= ops or between:
            op.append(strings["between two ops" if between else "end of the step"])
            module.append(NO_INDEX)
            source.append(NO_INDEX)
            work.append(0)
            continue
        found = trace.ops[number]
        op.append(strings[short(found.name)])
        module.append(NO_INDEX if found.call == NO_INDEX else strings[module_label(trace.calls[found.call].module)])
        source.append(strings[trace.source_of(number)] if trace.source_of(number) else NO_INDEX)
        work.append(round_to_block(found.workspace_bytes, timeline.rounding_bytes))
    groups, alive = _alive(timeline, instants, strings)
    edges_ms = np.append(starts_ms, starts_ms[-1])
    return {
        "peak_bytes": timeline.peak_bytes,
        "peak": int(np.flatnonzero(instants == timeline.peak_instant)[0]),
        "instants": len(timeline.op),
        "total_ms": _ms(starts_ms[-1]),
        "instant": instants.tolist(),
        "ms": [_ms(each) for each in starts_ms[instants]],
        "bytes": {
            str(row): timeline.during_by_row[row, instants].tolist()
            for row in range(len(CATEGORIES))
            if timeline.during_by_row[row].any()
        },
        "op": op,
        "module": module,
        "source": source,
        "phase": phase_at[instants].tolist(),
        "run": [
            strings[module_label(timeline.units[run].name)] if run >= 0 else NO_INDEX
            for run in timeline.run[instants].tolist()
        ],
        "workspace": work,
        "groups": groups,
        "alive": alive,
        "phases": [[*span, _ms(edges_ms[span[1]]), _ms(edges_ms[span[2]])] for span in phases],
        "runs": [
            [strings[module_label(timeline.units[run].name)], begin, end, _ms(edges_ms[begin]), _ms(edges_ms[end])]
            for run, begin, end in runs
        ],
        "lanes": {
            key: [_drawn_span(span, clock, strings) for span in spans]
            for key, spans in build_lanes(report, timeline, clock).items()
        },
    }


def _drawn_span(span: Span, clock: Clock, strings: Strings) -> list[float]:
    """Return what it is, the instants and the times from and to which it runs, and its bytes."""
    first, last = (int(np.searchsorted(clock.begins_ns, ns)) for ns in (span.begin_ns, span.end_ns))
    return [strings[span.what], first, max(last, first), span.begin_ns / 1e6, span.end_ns / 1e6, span.size_bytes]


def choose_instants(levels: Ints, edges: Iterable[int], points: int = POINTS) -> Ints:
    """Return the instants to draw (Note [Points])."""
    count = len(levels)
    if count <= points:
        return np.arange(count)
    chosen = {0, count - 1, int(levels.argmax())}
    kept = {edge + side for edge in edges for side in (-1, 0) if 0 <= edge + side < count}
    if len(kept) <= points // 2:
        chosen |= kept
    bounds = np.linspace(0, count, points // 2 + 1).astype(np.int64)
    for begin, end in pairwise(bounds.tolist()):
        part = levels[begin:end]
        chosen |= {begin + int(part.argmax()), begin + int(part.argmin())}
    return np.array(sorted(chosen), np.int64)


def _phases(timeline: Timeline) -> list[tuple[int, int, int]]:
    """Return phase, first instant and end of each phase; a recompute belongs to the phase that it interrupts."""
    of_op = np.array([_PHASES.index(op.phase) for op in timeline.trace.ops], np.int64)
    if not len(of_op):
        return []
    at = of_op[np.minimum(timeline.op, len(of_op) - 1)]
    again = timeline.run >= 0
    at[again] = _PHASES.index(Phase.BACKWARD)
    changes = np.flatnonzero(np.diff(at)) + 1
    bounds = [0, *changes.tolist(), len(at)]
    spans: list[tuple[int, int, int]] = []
    for begin, end in pairwise(bounds):
        phase = int(at[begin])
        little = spans and (end - begin) * _LEAST_SPAN < len(at) and len(bounds) > _LEAST_SPAN // 4
        if little or (spans and spans[-1][0] == phase):
            spans[-1] = (spans[-1][0], spans[-1][1], end)
        else:
            spans.append((phase, begin, end))
    return spans


def _second_runs(timeline: Timeline) -> list[tuple[int, int, int]]:
    """Return unit, first instant and end of every recompute."""
    found = []
    for run in range(len(timeline.units)):
        instants = timeline.recompute_instants(run)
        if len(instants):
            found.append((run, int(instants[0]), int(instants[-1]) + 1))
    return found


def _alive(timeline: Timeline, instants: Ints, strings: Strings) -> tuple[list[list[int]], list[list[int]]]:
    """Return kinds of allocations, and for each instant those that hold most there: number, count, number, count, …

    Allocations are of one kind when they differ in numbers in their paths only, and are equally large.
    """
    sizes = allocation_bytes(timeline)
    kinds: dict[_Kind, list[Allocation]] = {}
    place: dict[_Kind, int] = {}
    group = np.empty(len(sizes), np.int64)
    for number in range(len(sizes)):
        found = timeline.allocation(number)
        key = (alike(found.name), alike(found.module), found.category, found.remade is not None, int(sizes[number]))
        kinds.setdefault(key, []).append(found)
        group[number] = place.setdefault(key, len(place))
    each = np.array([key[-1] for key in kinds], np.int64)
    alive = []
    for instant in instants.tolist():
        counts = np.bincount(group[timeline.alive_at(instant)], minlength=len(kinds))
        held = counts * each
        order = np.argsort(-held, kind="stable")[:_ALIVE]
        alive.append([value for number in order.tolist() if held[number] for value in (number, int(counts[number]))])
    used = sorted({number for numbers in alive for number in numbers[::2]})
    shown = {number: index for index, number in enumerate(used)}
    listed = list(kinds.items())
    return (
        [_described(*listed[number], strings) for number in used],
        [[shown[each] if side % 2 == 0 else each for side, each in enumerate(numbers)] for numbers in alive],
    )


def _described(key: _Kind, members: list[Allocation], strings: Strings) -> list[int]:
    """Return bytes of each, category, name, module, and whether they are recomputed; a single one keeps its names."""
    name, module, category, again, size_bytes = key
    if len(members) == 1:
        name, module = members[0].name, members[0].module
    called = short(name) or _OF_SHARDING.get(category, category.value)
    where = strings[module] if module else NO_INDEX
    return [size_bytes, CATEGORIES.index(category), strings[called], where, int(again)]


def _ms(value: float) -> float:
    return round(float(value), 6)
