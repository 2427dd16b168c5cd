"""Everything that the page's script draws, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from memfit.analysis import Lever, Report, reserves_more
from memfit.capture import Category, Phase
from memfit.memory import CATEGORIES
from memfit.paths import alike, folded, module_label
from memfit.plans import Estimate, Plan, ShardPlan, describe_peak
from memfit.report.assumed import list_assumptions
from memfit.report.decided import DECIDED_COLUMNS, decision_cells, decisions_of, describe_price
from memfit.report.decisions import list_decisions
from memfit.report.lanes import LANES
from memfit.report.mesh_display import dimension_values
from memfit.report.page.drawn import draw_timeline
from memfit.report.tree import Strings, module_tree
from memfit.sharding import Sharding
from memfit.solve import Curve

if TYPE_CHECKING:
    from memfit.verify import BytesCheck, MsCheck, Verification


def page_data(report: Report, levers: Sequence[Lever] = ()) -> dict[str, Any]:
    """Return the data of the page; the same report gives the same values in the same order."""
    strings = Strings()
    timelines = {"baseline": draw_timeline(report, report.baseline, strings)}
    if report.planned is not None:
        timelines["planned"] = draw_timeline(report, report.planned, strings)
    plan = report.plan
    return {
        "categories": [category.value for category in CATEGORIES],
        "phases": [phase.value for phase in Phase],
        "budget_bytes": report.target.usable_bytes if plan is None else plan.budget_bytes,
        "budget_is": "usable memory" if plan is None else "budget",
        "ranks": report.target.ranks,
        "timelines": timelines,
        "tree": module_tree(report, strings),
        "estimates": _estimates(report),
        "lanes": LANES,
        "decided": {
            "columns": DECIDED_COLUMNS,
            "rows": [decision_cells(each) for each in decisions_of(plan)],
            "price": "" if plan is None else describe_price(plan),
        },
        "decisions": list_decisions(report),
        "curve": None if report.curve is None else _curve(report.curve, plan),
        "shard": _shard(plan.shard, report.problem.sharding) if plan is not None and plan.shard is not None else None,
        "mesh": dimension_values(report),
        "blocker": _blocker(plan),
        "levers": [msgspec.to_builtins(dataclasses.asdict(lever)) for lever in levers],
        "verification": None if report.verification is None else _verification(report.verification),
        "assumed": list_assumptions(report),
        "strings": strings.texts,
    }


def _estimates(report: Report) -> list[dict[str, Any]]:
    """Return memory and time without the plan and with it; when nothing fits, beside the lowest peak that there is."""
    plan = report.plan
    without = "without a plan" if report.target.ranks == 1 else "only sharded"
    if plan is None:
        step_ms = report.runtime.total_ms + report.problem.exposed_ms
        return [_column("as it is", report.baseline.peak_bytes, report.baseline.peak_by_category, step_ms=step_ms)]
    predicted, reserves = plan.predicted, reserves_more(plan)
    found = [_estimate(without, plan.baseline, reserves)]
    if predicted is not None:
        found.append(_estimate("with the plan", predicted, reserves))
        found[-1]["recompute_ms"] = predicted.recompute_ms
        found[-1]["exposed_ms"] = predicted.exposed_communication_ms if plan.ranks > 1 else None
        found[-1]["offload_ms"] = predicted.exposed_offload_ms if plan.offload_link else None
    elif plan.blocker is not None:
        blocker = plan.blocker
        found.append(_column("the lowest there is", blocker.peak_bytes, blocker.peak_by_category))
        found[-1]["place"] = describe_peak(blocker.peak_at)
    return found


def _estimate(name: str, estimate: Estimate, reserves: bool) -> dict[str, Any]:
    column = _column(name, estimate.peak_bytes, estimate.peak_by_category, step_ms=estimate.step_ms)
    reserved_bytes = estimate.peak_reserved_bytes if reserves else None
    return {**column, "reserved_bytes": reserved_bytes, "place": describe_peak(estimate.peak_at)}


def _column(
    name: str, peak_bytes: int, by_category: Mapping[Category, int], *, step_ms: float | None = None
) -> dict[str, Any]:
    rows = {str(CATEGORIES.index(category)): n_bytes for category, n_bytes in by_category.items()}
    return {"name": name, "peak_bytes": peak_bytes, "by_category": rows, "step_ms": step_ms}


def _curve(curve: Curve, plan: Plan | None) -> dict[str, Any]:
    chosen = None
    if plan is not None and plan.predicted is not None:
        chosen = {"budget_bytes": plan.budget_bytes, "step_ms": plan.predicted.step_ms}
    points = [
        {
            "budget_bytes": point.budget_bytes,
            "peak_bytes": point.peak_bytes,
            "step_ms": point.step_ms,
            "recompute_ms": point.recompute_ms,
            "status": point.status.value,
            "price_ms_per_gib": point.price_ms_per_gib,
        }
        for point in curve.points
    ]
    return {"points": points, "baseline_ms": curve.baseline_ms, "chosen": chosen}


def _shard(shard: ShardPlan, sharding: Sharding | None) -> dict[str, Any]:
    """Return the sharded units; those that are alike and whose paths differ in numbers only are one row."""
    kept = {unit.module: not unit.reshard_after_forward for unit in shard.units}
    groups: dict[tuple[object, ...], list[str]] = {}
    for unit in sharding.units if sharding is not None else ():
        sizes = (unit.parameters, unit.shard_bytes, unit.gathered_bytes, unit.gradient_bytes, unit.reduced_bytes)
        groups.setdefault((alike(unit.module), kept.get(unit.module, False), *sizes), []).append(unit.module)
    return {
        "ranks": shard.ranks,
        "prefetch": shard.prefetch,
        "dtypes": [
            [name, getattr(shard, name)]
            for name in ("shard_dtype", "param_dtype", "reduce_dtype")
            if getattr(shard, name) is not None
        ],
        "communication_ms": sharding.communication_ms if sharding is not None else 0.0,
        "exposed_ms": sharding.exposed_ms if sharding is not None else 0.0,
        "units": [
            {
                "unit": module_label(folded(modules)),
                "units": len(modules),
                "kept": key[1],
                "parameters": key[2],
                "shard_bytes": key[3],
                "gathered_bytes": key[4],
                "gradient_bytes": key[5],
                "reduced_bytes": key[6],
            }
            for key, modules in groups.items()
        ],
    }


def _blocker(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None or plan.blocker is None:
        return None
    return {
        "place": describe_peak(plan.blocker.peak_at),
        "peak_bytes": plan.blocker.peak_bytes,
        "minimum_budget_bytes": plan.minimum_budget_bytes,
    }


def _verification(found: Verification) -> dict[str, Any]:
    return {
        "ok": found.ok,
        "only_time_differs": found.only_time_differs,
        "device": found.device,
        "steps": found.steps,
        "findings": list(found.findings),
        "skipped": found.skipped,
        "exact": None if found.exactness is None else found.exactness.equal,
        "gradients": None if found.exactness is None else found.exactness.gradients,
        "bytes": [
            *_named_rows("peak without the plan", (found.baseline_peak,)),
            *_named_rows("peak with the plan", (found.peak,)),
            *(dataclasses.asdict(each) for each in found.by_category),
        ],
        "ms": [
            *_named_rows("step without the plan", (found.baseline_step,)),
            *_named_rows("step with the plan", (found.step,)),
        ],
    }


def _named_rows(name: str, rows: Iterable[BytesCheck | MsCheck | None]) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(each), "name": name} for each in rows if each is not None]
