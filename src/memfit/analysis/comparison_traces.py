"""What two traces do, where that differs: memory, what modules hold and compute, kinds of ops."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from memfit.analysis.words import place
from memfit.capture import NEVER, Category, Trace
from memfit.memory import Timeline, module_memory, reserved
from memfit.paths import alike, folded
from memfit.plans import peak_at


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesChange:
    """Bytes of one thing on both sides, None where there is no such thing."""

    name: str
    first_bytes: int | None
    second_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountChange:
    """How often, or how many, on both sides."""

    name: str
    first: int
    second: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """Modules whose paths differ in numbers only, with the modules inside them, added up: what they leave for
    backward, and FLOPs of forward and backward."""

    module: str
    first_modules: int
    second_modules: int
    first_activation_bytes: int
    second_activation_bytes: int
    first_flops: int
    second_flops: int


def traced_memory(first: Trace, second: Trace) -> tuple[tuple[BytesChange, ...], tuple[str, str]]:
    """The peaks of both, taken apart, and where they are."""
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
    places = [place(peak_at(side.trace, side.peak_op)) for side in sides]
    return tuple(rows), (places[0], places[1])


def total_flops(trace: Trace) -> int:
    """FLOPs of the whole step."""
    return sum(op.flops for op in trace.ops)


@dataclass(slots=True)
class _Work:
    """What modules of one pattern hold and compute."""

    modules: list[str] = field(default_factory=list)
    activation_bytes: int = 0
    flops: int = 0


def changed_work(first: Trace, second: Trace) -> tuple[ModuleChange, ...]:
    """Modules that hold or compute something else, those whose bytes change most first."""
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
                module=(folded(names) if alone else pattern) or "(model)",
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
    """By pattern of module paths, of modules that are called."""
    flops: dict[str, int] = defaultdict(int)
    by_call: dict[int, int] = defaultdict(int)
    for op in trace.ops:
        if op.call != NEVER:
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


def changed_ops(first: Trace, second: Trace) -> tuple[CountChange, ...]:
    """Kinds of ops that do not run as often, those that change most first."""
    one, other = (Counter(op.name for op in trace.ops) for trace in (first, second))
    rows = [CountChange(name=name, first=one[name], second=other[name]) for name in sorted({*one, *other})]
    changed = [row for row in rows if row.first != row.second]
    return tuple(sorted(changed, key=lambda row: -abs(row.second - row.first)))
