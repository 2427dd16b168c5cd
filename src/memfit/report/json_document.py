"""A report as one JSON document, for programs that show or check it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from memfit._version import __version__
from memfit.analysis import Report
from memfit.memory import CATEGORIES, Timeline
from memfit.paths import MODEL_LABEL
from memfit.plans import build_trace_record
from memfit.report.assumed import list_assumptions
from memfit.report.mesh_display import dimension_values
from memfit.report.streams import build_clock
from memfit.report.tree import Strings, module_tree
from memfit.solve import Curve
from memfit.text import json_text

SCHEMA = 1
_POINTS = 400
"""About how many points of a timeline the document has."""
_DIGITS = 6

_DECISIONS = (None, "kept", "partly saved", "runs again in full", "offloaded")
_TIMES = ("forward_ms", "backward_ms", "recompute_ms", "optimizer_ms")


def to_json(report: Report) -> str:
    """Return the report as a JSON document; the same report is the same text."""
    timelines = {"baseline": report.baseline}
    if report.planned is not None:
        timelines["planned"] = report.planned
    assumptions = list_assumptions(report)
    notes = report.plan.notes if report.plan is not None else report.trace.notes
    document = {
        "schema": SCHEMA,
        "memfit": __version__,
        "fingerprint": report.trace.fingerprint,
        "step": msgspec.to_builtins(build_trace_record(report.trace)),
        "plan": None if report.plan is None else msgspec.to_builtins(report.plan, order="deterministic"),
        "summary": {name: _summary(report, each) for name, each in timelines.items()},
        "mesh": {"sizes": report.trace.mesh, "dimensions": dimension_values(report)} if report.trace.mesh else None,
        "modules": _modules(report),
        "timeline": {name: _timeline(report, each) for name, each in timelines.items()},
        "curve": None if report.curve is None else _curve(report.curve),
        "verification": None if report.verification is None else _finite(report.verification.to_dict()),
        "assumptions": {"facts": dict(assumptions["facts"]), "figures": assumptions["figures"], "notes": list(notes)},
    }
    return json_text(msgspec.to_builtins(document))


def _summary(report: Report, timeline: Timeline) -> dict[str, Any]:
    """Return the highest point and the time of a step; categories add up to the peak."""
    instant = timeline.peak_instant
    op = int(timeline.op[instant])
    runs = op < len(timeline.trace.ops)
    return {
        "peak_bytes": timeline.peak_bytes,
        "peak_by_category": {category.value: n for category, n in timeline.peak_by_category.items()},
        "peak_op": op,
        "peak_op_name": timeline.trace.ops[op].name if runs else None,
        "peak_module": timeline.module_of(instant),
        "peak_source": timeline.trace.source_of(op) if runs else "",
        "peak_second_run_of": timeline.recomputed_unit(instant),
        "step_ms": _ms(build_clock(report, timeline).end_ns / 1e6),
        "exposed_communication_ms": _ms(report.problem.exposed_ms),
    }


def _modules(report: Report) -> list[dict[str, Any]]:
    """Return every module: bytes at the peaks by category, its own times, and what the plan does with it.

    Without the modules inside it, so that all rows add up to the peak and to the time of all ops. Rows that are no
    module have a `path` of None, and are left out where they have nothing.
    """
    strings = Strings()
    tree = module_tree(report, strings)
    texts = strings.texts
    paths = {module.path for module in report.runtime.trace.modules}
    count, rows = len(tree["path"]), []
    for place in range(count):
        name = texts[tree["path"][place]]
        path = "" if name == MODEL_LABEL else name
        row: dict[str, Any] = {
            "name": name,
            "path": path if path in paths and texts[tree["kind"][place]] else None,
            "kind": texts[tree["kind"][place]] or None,
            "decision": _DECISIONS[tree["decision"][place]],
        }
        for side in ("baseline", "planned"):
            if side in tree:
                held, spent = (tree[side][what].get(str(place), {}) for what in ("bytes", "ms"))
                row[side] = {
                    "at_peak_bytes": sum(held.values()),
                    "at_peak_by_category": {CATEGORIES[int(at)].value: n for at, n in held.items()},
                    **{name: spent.get(str(kind), 0.0) for kind, name in enumerate(_TIMES)},
                }
        if row["path"] is not None or any(_holds(row[side]) for side in ("baseline", "planned") if side in row):
            rows.append(row)
    return rows


def _holds(side: dict[str, Any]) -> bool:
    return any(value for name, value in side.items() if name != "at_peak_by_category")


def _timeline(report: Report, timeline: Timeline) -> dict[str, Any]:
    """Return memory over the step: the highest instant of each of some hundred stretches, the peak among them."""
    during, count = timeline.during_bytes, len(timeline.op)
    edges = np.unique(np.linspace(0, count, min(count, _POINTS) + 1).astype(np.int64))
    highest = [int(begin + during[begin:end].argmax()) for begin, end in pairwise(edges.tolist())]
    begins_ns = build_clock(report, timeline).begins_ns
    return {
        "points": len(highest),
        "instants": count,
        "op": timeline.op[highest].tolist(),
        "ms": [_ms(each / 1e6) for each in begins_ns[highest].tolist()],
        "bytes": during[highest].tolist(),
        "by_category": {category.value: levels[highest].tolist() for category, levels in timeline.by_category.items()},
    }


def _curve(curve: Curve) -> dict[str, Any]:
    points = [
        {
            "budget_bytes": point.budget_bytes,
            "peak_bytes": point.peak_bytes,
            "step_ms": _ms(point.step_ms),
            "recompute_ms": _ms(point.recompute_ms),
            "status": point.status.value,
            "gap": _ms(point.gap),
            "price_ms_per_gib": _ms(point.price_ms_per_gib),
        }
        for point in curve.points
    ]
    return {"baseline_bytes": curve.baseline_bytes, "baseline_ms": _ms(curve.baseline_ms), "points": points}


def _ms(value: float) -> float | None:
    """Round to nanoseconds, so that sums in another order are the same text; None for what JSON cannot say."""
    return round(float(value), _DIGITS) if math.isfinite(value) else None


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot write by None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
