"""What two steps were made from and what they do, where that differs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from memfit.capture import NO_INDEX, Category, Trace
from memfit.memory import Timeline, module_memory, reserved
from memfit.paths import alike, folded, module_label, named_differences
from memfit.plans import (
    InputRecord,
    ParameterRecord,
    Plan,
    TraceRecord,
    build_trace_record,
    describe_input,
    describe_parameter,
    describe_peak,
    peak_at,
)

Row = tuple[str, str | None, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One thing on both sides in words; None on a side that does not have it."""

    name: str
    first: str | None
    second: str | None


def keep_changed(*rows: Row) -> Iterator[Changed]:
    """Yield the rows whose sides differ."""
    for name, first, second in rows:
        if first != second:
            yield Changed(name=name, first=first, second=second)


def compare_records(first: Plan | Trace, second: Plan | Trace) -> Iterator[Changed]:
    """Yield what tells two steps apart, what explains most first."""
    one, other = _trace_record(first), _trace_record(second)
    found = list(_differences(one, other))
    if not found and one.ops == other.ops and first.fingerprint != second.fingerprint:
        found += keep_changed(("fingerprint of the step", first.fingerprint[:12], second.fingerprint[:12]))
    yield from found
    yield from keep_changed(("ops", f"{one.ops:,}", f"{other.ops:,}"))


def _trace_record(each: Plan | Trace) -> TraceRecord:
    return each.trace if isinstance(each, Plan) else build_trace_record(each)


def _differences(one: TraceRecord, other: TraceRecord) -> Iterator[Changed]:
    if one.device_type != other.device_type or one.device != other.device:
        yield Changed(name="captured for", first=one.device, second=other.device)
    yield from keep_changed(
        ("torch", one.torch, other.torch),
        ("threads", str(one.threads or "any"), str(other.threads or "any")),
        ("autocast", one.autocast or "off", other.autocast or "off"),
        ("optimizer", one.optimizer or "none", other.optimizer or "none"),
    )
    yield from _inputs(one.inputs, other.inputs)
    yield from keep_changed(("parameters", _counted(one.parameters), _counted(other.parameters)))
    yield from _parameters(one.parameters, other.parameters)


def _inputs(one: Sequence[InputRecord], other: Sequence[InputRecord]) -> Iterator[Changed]:
    """Yield the tensors of the batch that differ, by their place in it."""
    for place in range(max(len(one), len(other))):
        sides = [describe_input(side[place]) if place < len(side) else None for side in (one, other)]
        yield from keep_changed((f"batch tensor {place}", sides[0], sides[1]))


def _counted(parameters: Sequence[ParameterRecord]) -> str:
    return f"{sum(math.prod(each.shape) for each in parameters):,} in {len(parameters):,} tensors"


def _parameters(one: Sequence[ParameterRecord], other: Sequence[ParameterRecord]) -> Iterator[Changed]:
    """Yield parameters that differ; of layers that only one side has, how many there are."""
    sides = [{each.names[0]: describe_parameter(each) for each in parameters} for parameters in (one, other)]
    return _named_rows("parameter", "parameters", sides[0], sides[1])


def compare_modules(first: Trace, second: Trace) -> Iterator[Changed]:
    """Yield modules of another kind, or that only one side has."""
    sides = [{module_label(each.path): each.kind for each in trace.modules} for trace in (first, second)]
    return _named_rows("module", "modules", sides[0], sides[1])


def _named_rows(what: str, several: str, one: dict[str, str], other: dict[str, str]) -> Iterator[Changed]:
    """Yield rows by name; names that differ in numbers only and change in the same way are one row."""
    found = named_differences(one, other)
    for path, first, second in found.counts:
        yield Changed(name=f"numbered parts of {path or 'the model'}", first=str(first), second=str(second))
    for then, now, names in found.groups:
        label = f"{what} {names[0]}" if len(names) == 1 else f"{several} {folded(names)} ({len(names)})"
        yield Changed(name=label, first=then, second=now)


# What two traces do, where that differs


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesChange:
    """Bytes of one thing on both sides, None where there is no such thing."""

    name: str
    first_bytes: int | None
    second_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountChange:
    """A count on both sides."""

    name: str
    first: int
    second: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """Bytes left for backward and FLOPs of modules whose paths differ in numbers only, their children included."""

    module: str
    first_modules: int
    second_modules: int
    first_activation_bytes: int
    second_activation_bytes: int
    first_flops: int
    second_flops: int


def compare_memory(first: Trace, second: Trace) -> tuple[tuple[BytesChange, ...], tuple[str, str]]:
    """Return the peaks of both sides by category, and where they are."""
    sides = [Timeline.of(trace, trace.hardware.allocator.rounding_bytes) for trace in (first, second)]
    held = [reserved(trace, trace.hardware).peak_reserved_bytes for trace in (first, second)]
    one, other = sides
    rows = [
        BytesChange(name="peak", first_bytes=one.peak_bytes, second_bytes=other.peak_bytes),
        BytesChange(name="there at the start", first_bytes=one.start_bytes, second_bytes=other.start_bytes),
    ]
    if held != [one.peak_bytes, other.peak_bytes]:
        rows.insert(1, BytesChange(name="reserved by the allocator", first_bytes=held[0], second_bytes=held[1]))
    parts = [side.peak_by_category for side in sides]
    for category in sorted(Category, key=lambda category: -max(part.get(category, 0) for part in parts)):
        if any(category in part for part in parts):
            sizes = [part.get(category, 0) for part in parts]
            rows.append(BytesChange(name=f"{category.value} at the peak", first_bytes=sizes[0], second_bytes=sizes[1]))
    places = [describe_peak(peak_at(side.trace, side.peak_op)) for side in sides]
    return tuple(rows), (places[0], places[1])


def total_flops(trace: Trace) -> int:
    """Return the FLOPs of the whole step."""
    return sum(op.flops for op in trace.ops)


@dataclass(slots=True)
class _Work:
    """What modules of one pattern hold and compute."""

    modules: list[str] = field(default_factory=list)
    activation_bytes: int = 0
    flops: int = 0


def compare_work(first: Trace, second: Trace) -> tuple[ModuleChange, ...]:
    """Return modules that hold or compute something else, those whose bytes change most first."""
    one, other = _work(first), _work(second)
    found = []
    for pattern in dict.fromkeys((*one, *other)):
        before, after = one.get(pattern, _Work()), other.get(pattern, _Work())
        if (before.activation_bytes, before.flops) == (after.activation_bytes, after.flops):
            continue
        names = {*before.modules, *after.modules}
        alone = len(names) == 1 or before.modules == after.modules
        found.append(
            ModuleChange(
                module=module_label(folded(names) if alone else pattern),
                first_modules=len(before.modules),
                second_modules=len(after.modules),
                first_activation_bytes=before.activation_bytes,
                second_activation_bytes=after.activation_bytes,
                first_flops=before.flops,
                second_flops=after.flops,
            )
        )
    return tuple(sorted(found, key=_by_change))


def _by_change(each: ModuleChange) -> tuple[int, int]:
    more_bytes = each.second_activation_bytes - each.first_activation_bytes
    return -abs(more_bytes), -abs(each.second_flops - each.first_flops)


def _work(trace: Trace) -> dict[str, _Work]:
    """Return bytes and FLOPs of the modules that are called, by pattern of their paths."""
    flops: dict[str, int] = defaultdict(int)
    by_call: dict[int, int] = defaultdict(int)
    for op in trace.ops:
        if op.call != NO_INDEX:
            by_call[op.call] += op.flops
    for call, count in by_call.items():
        for path in {trace.calls[each].module for each in trace.ancestors(call)}:
            flops[path] += count
    found: dict[str, _Work] = defaultdict(_Work)
    for path, memory in module_memory(Timeline.of(trace, trace.hardware.allocator.rounding_bytes)).items():
        if memory.calls:
            work = found[alike(path)]
            work.modules.append(path)
            work.activation_bytes += memory.activation_bytes
            work.flops += flops[path]
    return found


def compare_ops(first: Trace, second: Trace) -> tuple[CountChange, ...]:
    """Return ops that run another number of times, those that change most first."""
    one, other = (Counter(op.name for op in trace.ops) for trace in (first, second))
    rows = [CountChange(name=name, first=one[name], second=other[name]) for name in sorted({*one, *other})]
    changed = [row for row in rows if row.first != row.second]
    return tuple(sorted(changed, key=lambda row: -abs(row.second - row.first)))
