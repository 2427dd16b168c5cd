"""What checkpointed units still hold at the peak, and why some of their ops cannot be recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from memfit.analysis.explanation import Checkpointing, StillHeld
from memfit.analysis.holders import Holders
from memfit.analysis.report import Report
from memfit.capture import BEFORE_STEP, GENERATOR, NO_INDEX, Category, Phase, Trace, short
from memfit.cost import repeats
from memfit.memory import Timeline
from memfit.paths import module_label
from memfit.plans import build_policy
from memfit.tradeoff import UPDATES, Policy, Role, TraceColumns, Unit, UnitColumns, lost_inputs
from memfit.units import display_bytes, display_ms

_OWNED = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE, Category.GRADIENT, Category.INPUT)
_FORWARD = (Phase.FORWARD, Phase.LOSS)

SAVED = "result that the policy saves"
FORCED = "result that cannot be made again"
OUTPUT = "output, used after the unit"
PYTHON = "held by Python"
CAST = "autocast's copy of a parameter"
INPUT = "input of the unit"
RUNNING = "the unit runs at the peak"


def explain_checkpointing(report: Report, timeline: Timeline) -> Checkpointing | None:
    """Return what checkpointed units hold at the peak; None when neither a plan nor the model checkpoints anything."""
    if report.plan is not None and report.plan.predicted is not None and report.plan.checkpoint:
        return _of_plan(report, timeline)
    return _of_model(timeline)


def find_kept_by_plan(report: Report, timeline: Timeline) -> dict[int, str]:
    """Return storages that are there because of a plan, each with what it is kept for."""
    found: dict[int, str] = {}
    for unit, policy in _chosen(report):
        problem, own = _cut(report, unit)
        fresh = (
            (problem.role == Role.FRESH) & np.isin(problem.alloc_at, policy.saved) & (problem.alloc_at <= policy.stop)
        )
        for storage in own[fresh].tolist():
            found[storage] = f"kept by the plan, so that the second run of {module_label(unit.name)} need not make it"
        for storage in lost_inputs(report.problem.trace_columns, unit).tolist():
            found[storage] = f"kept as an input of {module_label(unit.name)}, for its second run"
    return found


def _chosen(report: Report) -> list[tuple[Unit, Policy]]:
    if report.plan is None or report.plan.predicted is None:
        return []
    units = {unit.name: unit for unit in report.problem.units}
    return [(units[entry.unit], build_policy(entry)) for entry in report.plan.checkpoint]


def _cut(report: Report, unit: Unit) -> tuple[UnitColumns, np.ndarray]:
    """Return a unit as the frontiers see it, and its storages."""
    trace_columns = report.problem.trace_columns
    low, high = np.searchsorted(trace_columns.forward_alloc_at, (unit.begin, unit.end))
    return UnitColumns.of(trace_columns, unit), trace_columns.forward_storages[low:high]


def _of_plan(report: Report, timeline: Timeline) -> Checkpointing:
    assert report.plan is not None
    instant = timeline.peak_instant
    there = _there(timeline, instant)
    holders = Holders(timeline, instant)
    still: list[StillHeld] = []
    seen: set[int] = set()
    for unit, policy in _chosen(report):
        for storage, reason, why in _reasons(report, unit, policy, holders):
            if storage in there and storage not in seen:
                seen.add(storage)
                still.append(_still(timeline, holders, unit.name, storage, reason, why))
    still.sort(key=lambda each: -each.size_bytes)
    return Checkpointing(
        units=tuple(entry.unit for entry in report.plan.checkpoint),
        by_the_model=False,
        dropped_bytes=sum(entry.discarded_bytes for entry in report.plan.checkpoint),
        peak_without_bytes=report.baseline.peak_bytes,
        peak_bytes=timeline.peak_bytes,
        still_held_bytes=sum(each.size_bytes for each in still),
        still_held=tuple(still),
        findings=tuple(_findings(timeline, still, report.baseline.peak_bytes, running=_running(report, holders))),
    )


def _running(report: Report, holders: Holders) -> bool:
    """Return whether a unit that is checkpointed runs at the peak."""
    return any(_runs(unit, holders.now) for unit, _ in _chosen(report))


def _runs(unit: Unit, op: int) -> bool:
    return unit.begin <= op < unit.end or unit.backward_begin <= op < unit.backward_end


def _reasons(report: Report, unit: Unit, policy: Policy, holders: Holders) -> Iterator[tuple[int, str, str]]:
    """Yield every storage that a unit makes or is given and does not drop, with the reason."""
    trace_columns = report.problem.trace_columns
    problem, own = _cut(report, unit)
    running = _runs(unit, holders.now)
    saved, forced = np.isin(problem.alloc_at, policy.saved), find_forced_ops(trace_columns, unit)
    for place, storage in enumerate(own.tolist()):
        role, op = problem.role[place], int(problem.alloc_at[place])
        if running:
            yield storage, RUNNING, holders.of_storage(storage)[1]
        elif saved[place] and op in forced:
            yield storage, FORCED, f"its op {forced[op]}"
        elif saved[place] and role in (Role.DISCARDABLE, Role.FRESH):
            takes = display_ms(float(problem.ms[op]))
            yield storage, SAVED, f"to make it again takes {takes}, and the budget has room"
        elif role == Role.DISCARDABLE:
            continue
        elif trace_columns.cached[storage]:
            yield storage, CAST, "autocast holds it until its block ends"
        elif trace_columns.last_read[storage] >= unit.end or trace_columns.last_saver[storage] >= unit.end:
            user = max(int(trace_columns.last_read[storage]), int(trace_columns.last_saver[storage]))
            yield storage, OUTPUT, f"used by {holders.op_in(user)}"
        elif not 0 <= trace_columns.released[storage] < unit.end:
            yield storage, PYTHON, "a list, a hook or an attribute keeps it beyond the unit"
        else:
            yield storage, OUTPUT, holders.of_storage(storage)[1]
    for storage in lost_inputs(trace_columns, unit).tolist():
        yield storage, INPUT, "the second run begins with it"


def _of_model(timeline: Timeline) -> Checkpointing | None:
    """Return what modules under the user's own `torch.utils.checkpoint` hold at the peak; None when there are none."""
    trace = timeline.trace
    found = repeats(trace)
    first = sorted(
        {number for again, number in found.items() if trace.calls[again].parent not in found},
        key=lambda number: trace.calls[number].begin,
    )
    if not first:
        return None
    instant = timeline.peak_instant
    there, holders = _there(timeline, instant), Holders(timeline, instant)
    still = []
    for number in first:
        call = trace.calls[number]
        for storage in sorted(there):
            each = trace.storages[storage]
            if call.begin <= each.alloc_at < call.end and each.category not in _OWNED:
                kind, why = holders.of_storage(storage)
                running = call.begin <= holders.now < call.end
                reason = RUNNING if running else PYTHON if kind == "python" else OUTPUT
                still.append(_still(timeline, holders, call.module, storage, reason, why))
    still.sort(key=lambda each: -each.size_bytes)
    return Checkpointing(
        units=tuple(trace.calls[number].module for number in first),
        by_the_model=True,
        dropped_bytes=None,
        peak_without_bytes=None,
        peak_bytes=timeline.peak_bytes,
        still_held_bytes=sum(each.size_bytes for each in still),
        still_held=tuple(still),
        findings=tuple(_findings(timeline, still, None, running=_within(trace, holders.now, {*found, *first}))),
    )


def _within(trace: Trace, op: int, calls: set[int]) -> bool:
    """Return whether an op is part of one of these calls or of one inside them."""
    call = trace.ops[min(op, len(trace.ops) - 1)].call
    return call != NO_INDEX and not calls.isdisjoint(trace.ancestors(call))


def _there(timeline: Timeline, instant: int) -> set[int]:
    """Return storages as they were first made that are there at an instant."""
    table, alive = timeline.allocations, timeline.alive_at(instant)
    return set(table.storage[alive[table.remade[alive] == NO_INDEX]].tolist()) - {NO_INDEX}


def _still(timeline: Timeline, holders: Holders, unit: str, storage: int, reason: str, why: str) -> StillHeld:
    found = timeline.trace.storages[storage]
    name = found.name or (timeline.trace.ops[found.alloc_at].name if found.alloc_at != BEFORE_STEP else "")
    return StillHeld(
        unit=unit,
        size_bytes=found.bytes,
        name=short(name),
        module=found.module,
        source=holders.source(storage),
        reason=reason,
        why=why,
    )


def _findings(timeline: Timeline, still: list[StillHeld], without: int | None, running: bool) -> Iterator[str]:
    """Yield what can be said in a sentence each; `running` says whether a checkpointed unit runs at the peak."""
    trace, instant = timeline.trace, timeline.peak_instant
    op = min(int(timeline.op[instant]), len(trace.ops) - 1)
    phase = trace.ops[op].phase
    again = timeline.recomputed_unit(instant)
    if again is not None:
        made = sum(
            each.size_bytes
            for each in timeline.largest_at(instant, len(timeline.allocations.alloc_at))
            if each.remade is not None
        )
        yield (
            f"the peak is in the second run of {module_label(again)}, which has made {display_bytes(made)} again: "
            "smaller units, or one that saves more, would lower it"
        )
    elif phase is Phase.OPTIMIZER:
        yield "the peak is in the optimizer's step, where nothing is held for the backward: no checkpointing lowers it"
    elif not running:
        outside = timeline.peak_bytes - sum(each.size_bytes for each in still)
        yield (
            f"the peak is in {_place(trace, op)}, outside of what is checkpointed: {display_bytes(outside)} of it are "
            "in no checkpointed unit"
        )
    if without is not None and without == timeline.peak_bytes:
        yield "the peak is as high as without checkpointing: what is released was not there at the peak"
    by_reason: Counter[str] = Counter()
    for each in still:
        by_reason[each.reason] += each.size_bytes
    for reason, size_bytes in by_reason.most_common():
        yield f"{display_bytes(size_bytes)} still there: {reason}"


def _place(trace: Trace, op: int) -> str:
    """Return the loss, be it a function, a module or the end of the model's forward; else the module."""
    call = trace.ops[op].call
    if call == NO_INDEX:
        return "the loss"
    module = trace.calls[call].module
    last = max((index for index, each in enumerate(trace.ops) if each.phase in _FORWARD), default=NO_INDEX)
    makes_loss = last != NO_INDEX and trace.ops[last].call == call
    if makes_loss and not module:
        inner = max((each.end for each in trace.calls if each.parent == call and each.phase in _FORWARD), default=0)
        made = trace.ops[op].forward_op if trace.ops[op].phase is Phase.BACKWARD else op
        makes_loss = made >= inner
    return "the loss" if makes_loss else module or "the model itself"


# Why ops of a checkpointed unit cannot be recomputed


def find_forced_ops(trace_columns: TraceColumns, unit: Unit) -> dict[int, str]:
    """Return why ops must not be recomputed, by offset in the unit (Note [Rules] of tradeoff/policy.py, 4)."""
    offsets = np.flatnonzero(UnitColumns.of(trace_columns, unit).forced).tolist()
    return {offset: _why(trace_columns, unit, unit.begin + offset) for offset in offsets}


def _why(trace_columns: TraceColumns, unit: Unit, op: int) -> str:
    found = trace_columns.trace.ops[op]
    if found.name in UPDATES:
        return "updates running statistics"
    if GENERATOR in found.arguments:
        return "draws from a generator of its own"
    if trace_columns.pinned[op]:
        return "writes in place to host memory"
    written = trace_columns.write_storage[trace_columns.write_op == op]
    if (trace_columns.alloc_at[written] < unit.begin).any():
        return "writes in place to what is older than the unit"
    return "reads what is overwritten before its backward"
