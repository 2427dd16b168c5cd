"""Two plans or two traces side by side: what changed, and what it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from rich.console import RenderableType

from memfit.analysis.step_differences import (
    BytesChange,
    Changed,
    CountChange,
    ModuleChange,
    compare_memory,
    compare_modules,
    compare_ops,
    compare_records,
    compare_work,
    keep_changed,
    total_flops,
)
from memfit.capture import Category, Trace
from memfit.errors import InputError
from memfit.paths import alike, folded, module_label
from memfit.plans import Checkpoint, Estimate, Plan, ShardPlan, describe_peak
from memfit.text import PrintedDocument
from memfit.units import display_bytes

_OWN = "the parameter's own"
_OUTCOMES = {"status", "optimizer's step"}
_ASKED = (
    "both are for the same step, hardware and budget: what was asked of the solver differs (--units, --force, --forbid "
    "or --time-limit), which plans do not record"
)
_TIMED = "both are for the same step, hardware and budget: their ops are timed in other ways (--cost)"
_HOW = "give two memfit.Plan (memfit.load reads one) or two memfit.Trace (memfit.load_trace reads one)"


@dataclass(frozen=True, slots=True, kw_only=True)
class MsChange:
    """Milliseconds of one thing on both sides, None where there is no such thing."""

    name: str
    first_ms: float | None
    second_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionChange:
    """Units that are alike and that the plans treat differently in the same way.

    Bytes are what each of them drops, times what recomputing all of them takes; None for a side that does not
    checkpoint them, or does not have them.
    """

    units: str
    count: int
    kind: str
    first_bytes: int | None
    second_bytes: int | None
    first_ms: float | None
    second_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(PrintedDocument):
    """What differs between two plans or two traces.

    `changed` is what they were made from, the rest what came of it. `memory` and `times` have a row also where nothing
    differs, everything else only what does. `modules`, `ops` and `flops` are of traces, `times` and `decisions` of
    plans. `note` says what must have changed where plans do not record it.
    """

    kind: Literal["plans", "traces"]
    first: str
    second: str
    changed: tuple[Changed, ...]
    memory: tuple[BytesChange, ...]
    times: tuple[MsChange, ...]
    first_peak_at: str
    second_peak_at: str
    decisions: tuple[DecisionChange, ...]
    modules: tuple[ModuleChange, ...]
    ops: tuple[CountChange, ...]
    flops: CountChange | None
    note: str | None = None

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        unlike = self.changed or self.decisions or self.modules or self.ops
        return not unlike and self.first_peak_at == self.second_peak_at and not self.effects

    @property
    def effects(self) -> tuple[BytesChange | MsChange, ...]:
        """The rows of memory and time that differ."""
        memory = (each for each in self.memory if each.first_bytes != each.second_bytes)
        return (*memory, *(each for each in self.times if each.first_ms != each.second_ms))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {"same": self.same, **msgspec.to_builtins(dataclasses.asdict(self))}

    def __rich__(self) -> RenderableType:
        from memfit.report import comparison_report

        return comparison_report(self)


def compare(first: Plan | Trace, second: Plan | Trace) -> Comparison:
    """Compare two plans, or two traces: what changed from the first to the second, and what it did."""
    for each in (first, second):
        if not isinstance(each, Plan | Trace):
            raise InputError(f"cannot compare a {type(each).__name__}; {_HOW}")
    if isinstance(first, Plan) and isinstance(second, Plan):
        return _plans(first, second)
    if isinstance(first, Trace) and isinstance(second, Trace):
        return _traces(first, second)
    kinds = f"a {type(first).__name__} and a {type(second).__name__}"
    raise InputError(f"{kinds} have too little in common to compare; {_HOW}")


def _traces(first: Trace, second: Trace) -> Comparison:
    memory, places = compare_memory(first, second)
    flops = CountChange(name="FLOPs", first=total_flops(first), second=total_flops(second))
    return Comparison(
        kind="traces",
        first=f"{_model(first)} on {first.hardware.title}",
        second=f"{_model(second)} on {second.hardware.title}",
        changed=tuple(dict.fromkeys((*compare_records(first, second), *compare_modules(first, second)))),
        memory=memory,
        times=(),
        first_peak_at=places[0],
        second_peak_at=places[1],
        decisions=(),
        modules=compare_work(first, second),
        ops=compare_ops(first, second),
        flops=flops,
    )


def _model(trace: Trace) -> str:
    return trace.modules[0].kind if trace.modules else "a step"


def _plans(first: Plan, second: Plan) -> Comparison:
    ends = [each.predicted or each.blocker or each.baseline for each in (first, second)]
    changed = (*_changed_setting(first, second), *compare_records(first, second))
    return Comparison(
        kind="plans",
        first=_title(first),
        second=_title(second),
        changed=changed,
        memory=tuple(_memory(first, second)),
        times=tuple(_times(first, second)),
        first_peak_at=describe_peak(ends[0].peak_at),
        second_peak_at=describe_peak(ends[1].peak_at),
        decisions=_decisions(first, second),
        modules=(),
        ops=(),
        flops=None,
        note=None if {each.name for each in changed} - _OUTCOMES else _unrecorded(first, second),
    )


def _unrecorded(first: Plan, second: Plan) -> str | None:
    """Say why plans for the same step, hardware and budget differ; None when they do not."""
    if first.baseline.step_ms != second.baseline.step_ms:
        return _TIMED
    sides = [(plan.status, plan.minimum_budget_bytes, plan.predicted, plan.checkpoint) for plan in (first, second)]
    return _ASKED if sides[0] != sides[1] else None


def _title(plan: Plan) -> str:
    return f"{plan.ranks} x {plan.target.device}, {display_bytes(plan.budget_bytes)}, {plan.status}"


def _changed_setting(first: Plan, second: Plan) -> Iterator[Changed]:
    """Yield what the plans were asked for, and what they decided for the whole step."""
    yield from keep_changed(
        ("device", first.target.title, second.target.title),
        ("ranks", str(first.ranks), str(second.ranks)),
        ("ranks to a node", str(first.target.ranks_per_node), str(second.target.ranks_per_node)),
        ("link inside a node", first.target.intra_node_link, second.target.intra_node_link),
        ("link between nodes", first.target.inter_node_link, second.target.inter_node_link),
        ("budget", *_shown_bytes(first.budget_bytes, second.budget_bytes)),
        ("status", first.status, second.status),
        ("engine", first.engine or "left to apply", second.engine or "left to apply"),
        ("optimizer's step", first.optimizer or "as given", second.optimizer or "as given"),
        ("memfit", first.memfit, second.memfit),
    )
    yield from keep_changed(
        ("forced units", _forced(first), _forced(second)),
        ("sharded units", _sharded(first.shard), _sharded(second.shard)),
    )
    if first.shard is not None and second.shard is not None:
        yield from keep_changed(
            ("gathered from forward to backward", _gathered(first.shard), _gathered(second.shard)),
            ("units gathered ahead", str(first.shard.prefetch), str(second.shard.prefetch)),
        )
    for name in ("shard_dtype", "param_dtype", "reduce_dtype"):
        sides = _dtype(first.shard, name), _dtype(second.shard, name)
        if {*sides} - {None, _OWN}:
            yield from keep_changed((name, *sides))


def _shown_bytes(first: int, second: int) -> tuple[str, str]:
    """Display two sizes; as plain bytes where rounded ones would look the same and are not."""
    shown = display_bytes(first), display_bytes(second)
    return shown if first == second or shown[0] != shown[1] else (f"{first} bytes", f"{second} bytes")


def _sharded(shard: ShardPlan | None) -> str | None:
    if shard is None:
        return None
    return _names(unit.module for unit in shard.units)


def _gathered(shard: ShardPlan) -> str:
    return _names(unit.module for unit in shard.units if not unit.reshard_after_forward) or "none"


def _forced(plan: Plan) -> str | None:
    """Return what is checkpointed on request though the step fits without it; None when nothing is."""
    fits = plan.baseline.peak_bytes <= plan.budget_bytes
    return _names(entry.unit for entry in plan.checkpoint) if fits and plan.checkpoint else None


def _names(modules: Iterable[str]) -> str:
    """Join unit names; those whose paths differ in numbers only become one."""
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(alike(module), []).append(module)
    return ", ".join(module_label(folded(members)) for members in groups.values())


def _dtype(shard: ShardPlan | None, name: str) -> str | None:
    return None if shard is None else getattr(shard, name) or _OWN


def _memory(first: Plan, second: Plan) -> Iterator[BytesChange]:
    """Yield the peaks of both sides; one without a prediction has none with the plan."""
    yield _bytes("peak without a plan", first.baseline, second.baseline, "peak_bytes")
    yield _bytes("peak", first.predicted, second.predicted, "peak_bytes")
    if reserves_more(first) or reserves_more(second):
        yield _bytes("reserved by the allocator", first.predicted, second.predicted, "peak_reserved_bytes")
    least = first.minimum_budget_bytes, second.minimum_budget_bytes
    if least != (None, None):
        yield BytesChange(name="smallest budget that works", first_bytes=least[0], second_bytes=least[1])
    sides = [each.predicted.peak_by_category if each.predicted else {} for each in (first, second)]
    for category in sorted(Category, key=lambda category: -max(side.get(category, 0) for side in sides)):
        if any(category in side for side in sides):
            yield BytesChange(
                name=f"{category.value} at the peak",
                first_bytes=sides[0].get(category, 0) if sides[0] else None,
                second_bytes=sides[1].get(category, 0) if sides[1] else None,
            )


def _bytes(name: str, first: Estimate | None, second: Estimate | None, attribute: str) -> BytesChange:
    values = [None if each is None else int(getattr(each, attribute)) for each in (first, second)]
    return BytesChange(name=name, first_bytes=values[0], second_bytes=values[1])


def _times(first: Plan, second: Plan) -> Iterator[MsChange]:
    yield MsChange(name="step without a plan", first_ms=first.baseline.step_ms, second_ms=second.baseline.step_ms)
    for name, attribute in (
        ("step", "step_ms"),
        ("recomputing", "recompute_ms"),
        ("waiting for communication", "exposed_communication_ms"),
    ):
        values = [None if each.predicted is None else getattr(each.predicted, attribute) for each in (first, second)]
        if any(values) or attribute != "exposed_communication_ms":
            yield MsChange(name=name, first_ms=values[0], second_ms=values[1])


def _decisions(first: Plan, second: Plan) -> tuple[DecisionChange, ...]:
    """Return units that are not treated alike, those that change most bytes first."""
    before, after = ({entry.unit: entry for entry in plan.checkpoint} for plan in (first, second))
    groups: dict[tuple[object, ...], list[tuple[Checkpoint | None, Checkpoint | None]]] = {}
    for unit in dict.fromkeys((*before, *after)):
        pair = before.get(unit), after.get(unit)
        if _policy(pair[0]) != _policy(pair[1]):
            groups.setdefault((alike(unit), _policy(pair[0]), _policy(pair[1])), []).append(pair)
    found = [_decision(pairs) for pairs in groups.values()]
    weights = {id(each): each.count * abs((each.second_bytes or 0) - (each.first_bytes or 0)) for each in found}
    return tuple(sorted(found, key=lambda each: -weights[id(each)]))


def _policy(entry: Checkpoint | None) -> tuple[object, ...] | None:
    if entry is None:
        return None
    return entry.kind, entry.stop, entry.discarded_bytes, entry.saved_ops, entry.recomputed_ops


def _decision(pairs: Sequence[tuple[Checkpoint | None, Checkpoint | None]]) -> DecisionChange:
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    entries = [entry for side in sides for entry in side if entry is not None]
    units = sorted({entry.unit for entry in entries})
    dropped = [None if side[0] is None else side[0].discarded_bytes for side in sides]
    took = [None if side[0] is None else sum(each.recompute_ms for each in side if each) for side in sides]
    return DecisionChange(
        units=module_label(folded(units) if "#" not in units[0] else ", ".join(units)),
        count=len(pairs),
        kind=entries[0].kind,
        first_bytes=dropped[0],
        second_bytes=dropped[1],
        first_ms=took[0],
        second_ms=took[1],
    )


def reserves_more(plan: Plan) -> bool:
    """Return whether the allocator reserves more than the live tensors; a CPU has no caching allocator."""
    estimates = [each for each in (plan.baseline, plan.predicted) if each is not None]
    return any(each.peak_reserved_bytes != each.peak_bytes for each in estimates)
