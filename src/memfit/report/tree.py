"""The modules of a step as a tree: what each holds at the peak, how long it runs, and what the plan does with it.

Bytes and times are those of a module itself, without the modules inside it; over the whole tree they add up to the
peak and to the step's time. Waiting for communication is of no module but of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from memfit.analysis import Report, allocation_bytes
from memfit.capture import BEFORE_STEP, NO_INDEX, Category, Op, Phase, Trace
from memfit.memory import BETWEEN, CATEGORIES, Timeline
from memfit.paths import module_label
from memfit.plans import Plan

NONE, KEPT, PARTLY, FULLY, OFFLOADED = range(5)
"""What a plan does with a module; NONE is for one that has units inside, and for a step without a plan."""
FORWARD, BACKWARD, AGAIN, OPTIMIZER, WAITING = range(5)
"""The kinds of time."""

_STEP, _LOSS, _OPTIMIZER, _BATCH = "the step", "loss", "optimizer", "batch"
_TEMPORARY = CATEGORIES.index(Category.TEMPORARY)
_KIND_OF_TIME = {
    Phase.FORWARD: FORWARD,
    Phase.LOSS: FORWARD,
    Phase.BACKWARD: BACKWARD,
    Phase.OPTIMIZER: OPTIMIZER,
}
Key = tuple[str, bool]
"""A path, and whether it is a module's."""


def module_tree(report: Report, strings: Strings) -> dict[str, Any]:
    """Build the columns of the tree's nodes, parents before children; the first node is the whole step."""
    trace = report.runtime.trace
    keys = [(_STEP, False), *((module.path, True) for module in trace.modules)]
    keys += [(name, False) for name in (_LOSS, _OPTIMIZER, _BATCH)]
    places = {key: place for place, key in enumerate(keys)}
    kinds = {(module.path, True): module.kind for module in trace.modules}
    decided = dict(_decisions(trace, report.plan))
    shards = report.problem.sharding.units if report.problem.sharding is not None else ()
    columns: dict[str, Any] = {
        "name": [strings[_last(key)] for key in keys],
        "path": [strings[module_label(path) if module else path] for path, module in keys],
        "kind": [strings[kinds.get(key, "")] for key in keys],
        "parent": [_parent(key, places) for key in keys],
        "decision": [decided.get(key, NONE) for key in keys],
        "shard": sorted(places[module, True] for unit in shards for module in unit.modules),
    }
    for name, timeline in (("baseline", report.baseline), ("planned", report.planned)):
        if timeline is not None:
            columns[name] = {
                "bytes": _by_place(_held(timeline), places),
                "ms": _by_place(_spent(report, timeline), places),
            }
    return columns


def _by_place(found: dict[Key, dict[int, Any]], places: dict[Key, int]) -> dict[str, dict[str, Any]]:
    """Sum by node; what has no node of its own counts for the nearest module around it."""
    sums: dict[int, dict[int, Any]] = defaultdict(lambda: defaultdict(int))
    for key, parts in found.items():
        while key not in places:
            key = (key[0].rpartition(".")[0], True) if key[0] else (_STEP, False)
        for part, value in parts.items():
            sums[places[key]][part] += value
    return {
        str(place): {str(part): round(value, 6) for part, value in sorted(parts.items()) if value}
        for place, parts in sorted(sums.items())
    }


def _held(timeline: Timeline) -> dict[Key, dict[int, int]]:
    """Return bytes at the peak by module and category."""
    table, trace, instant = timeline.allocations, timeline.trace, timeline.peak_instant
    sizes = allocation_bytes(timeline)
    found: dict[Key, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    alive = timeline.alive_at(instant)
    for number in alive.tolist():
        storage = int(timeline.allocations.storage[number])
        if storage == NO_INDEX:
            intervals = timeline.intervals
            key = (intervals[number - (len(sizes) - len(intervals))].module, True)
        else:
            key = _home(trace, storage)
        found[key][int(table.row[number])] += int(sizes[number])
    missing = timeline.peak_bytes - int(sizes[alive].sum())
    if missing:  # the workspace of the op at the peak
        op = trace.ops[min(int(timeline.op[instant]), len(trace.ops) - 1)]
        found[_place_of(trace, op)][_TEMPORARY] += missing
    return found


def _home(trace: Trace, storage: int) -> Key:
    found = trace.storages[storage]
    if found.module or found.call != NO_INDEX:
        return found.module, True
    if found.alloc_at == BEFORE_STEP:
        return (_BATCH, False) if found.category is Category.INPUT else ("", True)
    return _place_of(trace, trace.ops[min(found.alloc_at, len(trace.ops) - 1)])


def _place_of(trace: Trace, op: Op) -> Key:
    """Return the module of an op; outside modules, the optimizer's or the loss's key, in forward or in backward."""
    if op.call != NO_INDEX:
        return trace.calls[op.call].module, True
    if op.phase is Phase.OPTIMIZER:
        return _OPTIMIZER, False
    if op.phase is Phase.LOSS or op.phase is Phase.BACKWARD:
        return _LOSS, False
    return _STEP, False


def _spent(report: Report, timeline: Timeline) -> dict[Key, dict[int, float]]:
    """Return milliseconds by module and kind of time."""
    trace, op_ms = timeline.trace, report.runtime.op_ms
    ran = (timeline.run != BETWEEN) & (timeline.op < len(trace.ops))
    first = np.zeros(len(trace.ops))
    again = np.zeros(len(trace.ops))
    np.add.at(first, timeline.op[ran & (timeline.run < 0)], 1.0)
    np.add.at(again, timeline.op[ran & (timeline.run >= 0)], 1.0)
    found: dict[Key, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for number, op in enumerate(trace.ops):
        parts = found[_place_of(trace, op)]
        parts[_KIND_OF_TIME[op.phase]] += float(first[number] * op_ms[number])
        if again[number]:
            parts[AGAIN] += float(again[number] * op_ms[number])
    for unit in timeline.units:  # what the host takes for it, beyond its ops
        key = (_LOSS, False) if unit.kind == "loss" else (unit.module, True)
        found[key][AGAIN] += report.problem.second_run_ms * (unit.end - unit.begin)
    found[_STEP, False][WAITING] += report.problem.exposed_ms
    return found


def _decisions(trace: Trace, plan: Plan | None) -> Iterator[tuple[Key, int]]:
    """Yield what the plan does with every module: a unit, and the modules inside it, by the ops that it recomputes."""
    if plan is None or plan.predicted is None:
        return
    saved: set[str] = set()
    again: set[str] = set()
    away: set[str] = set()
    units: set[str] = set()
    lost = kept = False
    for entry in plan.checkpoint:
        units.add(entry.module)
        lost |= entry.is_loss
        kept |= entry.is_loss and bool(entry.saved_ops)
        for ops, modules in ((entry.saved_ops, saved), (entry.recomputed_ops, again), (entry.offload or (), away)):
            for op in ops:
                found = trace.ops[entry.begin + op.offset]
                if not found.view and found.call != NO_INDEX:
                    modules.update(_up_to(trace.calls[found.call].module, entry.module))
    around = {outer for unit in units for outer in _above(unit)}
    yield (_LOSS, False), (PARTLY if kept else FULLY) if lost else KEPT
    for module in trace.modules:
        path = module.path
        if path in again:
            yield (path, True), PARTLY if path in saved else FULLY
        elif path in away:
            yield (path, True), OFFLOADED
        elif path not in around:
            yield (path, True), KEPT


def _up_to(path: str, unit: str) -> Iterator[str]:
    """Yield a module and those around it, up to the unit that they are in."""
    yield path
    while path != unit and path:
        path = path.rpartition(".")[0]
        yield path


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _last(key: Key) -> str:
    path, module = key
    return module_label(path.rpartition(".")[2]) if module else path


def _parent(key: Key, places: dict[Key, int]) -> int:
    path, module = key
    if not module:
        return NO_INDEX if path == _STEP else 0
    while path:
        path = path.rpartition(".")[0]
        if (path, True) in places:
            return places[path, True]
    return 0


# Texts that occur many times, kept once


class Strings:
    """Numbers for texts, in the order in which they first come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        """Return the index of a text."""
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        """Every text, by its number."""
        return list(self._numbers)
