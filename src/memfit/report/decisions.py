"""The decisions of a plan with their reasons, units that are alike as one row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from memfit.analysis import Report, find_forced_ops
from memfit.capture import short
from memfit.paths import alike, folded, module_label
from memfit.plans import Checkpoint, Plan, UnitOp
from memfit.report.plan_display import same_policy, units_label
from memfit.solve import Candidate
from memfit.units import display_bytes, display_ms

_OPS = 4


def list_decisions(report: Report) -> list[dict[str, Any]]:
    """Return one row for units that are alike and get the same policy, then those that are kept as they are."""
    plan = report.plan
    if plan is None or plan.predicted is None:
        return []
    groups: dict[tuple[object, ...], list[Checkpoint]] = defaultdict(list)
    for entry in plan.checkpoint:
        groups[same_policy(entry)].append(entry)
    columns, units = report.problem.trace_columns, {unit.name: unit for unit in report.problem.units}
    rows = [_checkpointed(members, find_forced_ops(columns, units[members[0].unit])) for members in groups.values()]
    rows.sort(key=lambda row: -row["rate"])
    return [*rows, *_kept(report, plan)]


def _checkpointed(members: Sequence[Checkpoint], forced: Mapping[int, str]) -> dict[str, Any]:
    first = members[0]
    dropped = sum(entry.discarded_bytes for entry in members)
    took = sum(entry.recompute_ms for entry in members)
    rate = dropped / took if took else float(dropped)
    return {
        "unit": label_units(members),
        "kind": first.kind,
        "units": len(members),
        "decision": _decision(first),
        "drops_bytes": first.discarded_bytes,
        "all_bytes": dropped,
        "away_bytes": first.offloaded_bytes or 0,
        "all_away_bytes": sum(entry.offloaded_bytes or 0 for entry in members),
        "share": first.discard_ratio,
        "keeps_bytes": first.cached_bytes - (first.offloaded_bytes or 0),
        "keeps": _named([op for op in first.saved_ops if op not in (first.offload or ())], forced),
        "again": _named(first.recomputed_ops, {}),
        "each_ms": took / len(members),
        "all_ms": took,
        "rate": rate,
        "why": _why(members, dropped, took),
    }


def _decision(entry: Checkpoint) -> str:
    """Say what happens to what a unit holds for its backward."""
    if entry.stop < 0:
        return "offloaded"
    if entry.offloaded_bytes:
        return "partly offloaded"
    return "partly saved" if entry.saved_ops else "runs again in full"


def _why(members: Sequence[Checkpoint], dropped: int, took_ms: float) -> str:
    away = sum(entry.offloaded_bytes or 0 for entry in members)
    waits_ms = sum(entry.exposed_ms or 0.0 for entry in members)
    parts = [_per_ms(dropped, took_ms)] if dropped or not away else []
    if away:
        costs = f"costs {display_ms(waits_ms)}" if waits_ms else "is hidden by compute"
        parts.append(f"moving {display_bytes(away)} there and back {costs}")
    return "; ".join(parts)


def label_units(members: Sequence[Checkpoint]) -> str:
    """Return the name of units that are alike: `layers.0-15.feed_forward`."""
    return module_label(members[0].unit) if len(members) == 1 else units_label(members)


def _per_ms(dropped: int, took_ms: float) -> str:
    if not took_ms:
        return "costs no time"
    return f"frees {display_bytes(dropped / took_ms)} for each ms of recomputing"


def _kept(report: Report, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the outermost units that could be checkpointed and are neither chosen, in a chosen one nor around one."""
    spans = [(entry.begin, entry.end) for entry in plan.checkpoint]
    candidates = report.problem.candidates
    free = [
        not any(begin < candidate.unit.end and candidate.unit.begin < end for begin, end in spans)
        for candidate in candidates
    ]
    groups: dict[tuple[object, ...], list[Candidate]] = defaultdict(list)
    for number, candidate in enumerate(candidates):
        if free[number] and candidate.policies and not (candidate.outer >= 0 and free[candidate.outer]):
            most = candidate.policies[-1]
            key = (alike(candidate.unit.name), candidate.unit.kind, most.discarded_bytes, _why_kept(report, candidate))
            groups[key].append(candidate)
    for members in groups.values():
        most = members[0].policies[-1]
        took = sum(candidate.policies[-1].recompute_ms for candidate in members)
        dropped = sum(candidate.policies[-1].discarded_bytes for candidate in members)
        each = f"{display_bytes(most.discarded_bytes)}{' each' if len(members) > 1 else ''}"
        yield {
            "unit": module_label(folded(candidate.unit.name for candidate in members)),
            "kind": members[0].unit.kind,
            "units": len(members),
            "decision": "kept",
            "drops_bytes": 0,
            "all_bytes": 0,
            "away_bytes": 0,
            "all_away_bytes": 0,
            "share": 0.0,
            "keeps_bytes": None,
            "keeps": "all of it",
            "again": "",
            "each_ms": 0.0,
            "all_ms": 0.0,
            "rate": dropped / took if took else 0.0,
            "why": f"{_why_kept(report, members[0])} (could drop {each} for {display_ms(took / len(members))})",
        }


def _why_kept(report: Report, candidate: Candidate) -> str:
    """Say whether what a unit could drop is there at all when the step is at its highest."""
    if report.baseline.peak_bytes <= (report.plan.budget_bytes if report.plan is not None else 0):
        return "not needed: the step fits without"
    planned = report.planned
    assert planned is not None
    instant = planned.peak_instant
    run = int(planned.run[instant])
    op = int(planned.op[instant]) if run < 0 else planned.units[run].backward_begin
    if op < candidate.unit.end:
        return "no help: the peak comes before its forward is over"
    if op >= candidate.recompute_at:
        return "no help: the peak comes when its backward has begun"
    return "not needed: the others are enough for less"


def _named(ops: Iterable[UnitOp], forced: Mapping[int, str]) -> str:
    """Name ops, those with the largest results first, with why they cannot be recomputed; views are left out."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for op in ops:
        if op.bytes:
            why = f" ({forced[op.offset]})" if op.offset in forced else ""
            sizes[short(op.name) + why].append(op.bytes)
    largest = sorted(sizes, key=lambda name: -sum(sizes[name]))
    shown = [name if len(sizes[name]) == 1 else f"{len(sizes[name])} {name}" for name in largest[:_OPS]]
    more = len(sizes) - _OPS
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
