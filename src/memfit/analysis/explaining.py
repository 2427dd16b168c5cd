"""`explain`: what fills the peak of a step, what holds it, and which levers would lower it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memfit.analysis.checkpointing import explain_checkpointing, find_kept_by_plan
from memfit.analysis.explanation import (
    GatheredUnit,
    LineAtPeak,
    ModuleActivations,
    ModuleAtPeak,
    PeakPlace,
    StepExplanation,
)
from memfit.analysis.holders import Holders, round_to_block
from memfit.analysis.levers import EarlyCaptures, find_levers
from memfit.analysis.levers.case import Case, Lever, attempt
from memfit.analysis.mesh_dimensions import MeshDimension, find_dimensions
from memfit.analysis.report import Report
from memfit.capture import Category, Step, Trace, trace
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.memory import CATEGORIES, Reservation, Room, Timeline, judge_room
from memfit.paths import around
from memfit.plans import (
    Inputs,
    Model,
    PeakAt,
    Plan,
    StepInputs,
    check_nothing_beside,
    peak_at,
    resolve_cost,
    resolve_options,
)
from memfit.progress import Progress
from memfit.solve import MinBudget

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LARGEST = 10
_ACTIVATION = CATEGORIES.index(Category.ACTIVATION)
_ALONE = (
    "this is what the plan's document knows; `memfit explain STEP --plan FILE` or explain(plan, step) says the rest"
)


def explain(
    model: Model | Plan,
    batch: Any = None,
    *,
    budget: str | int | float | None = None,
    levers: bool = True,
    **inputs: Unpack[StepInputs],
) -> StepExplanation:
    """Explain what fills the peak of a training step, what holds it, and which levers would lower it, cheapest first.

    Takes what `plan` takes, all but `start`: a model and a batch, a `Step`, a `Trace`, or a function that runs the
    step. Also a plan with its step, `explain(plan, step)`, which is explained as it runs under the plan; a plan alone
    says what its document knows. `budget` is what the step should fit, all that is usable unless given. `options` say
    how the step is sharded, and what levers may checkpoint. Levers capture changed steps, which a trace cannot;
    `levers=False` leaves them out.
    """
    progress = inputs.get("progress", True)
    if isinstance(model, Plan):
        cost, options = inputs.get("cost"), inputs.get("options")
        made_with = inputs.get("optimizer", torch.optim.AdamW)
        check_nothing_beside("the plan", None, inputs.get("loss"), made_with, inputs.get("autocast"))
        if inputs.get("target") is not None or inputs.get("ranks") is not None:
            raise InputError("target and ranks are part of the plan; make another plan for another target")
        if batch is None:
            return _of_document(model)
        if not isinstance(batch, Step | Trace):
            raise InputError(f"a plan is explained with its memfit.Step or memfit.Trace, not a {type(batch).__name__}")
        step = batch if isinstance(batch, Step) else None
        with Progress("capturing one training step", show=progress):
            report = Report.of(model, batch, cost=cost, options=None if options is None else resolve_options(options))
        timed = resolve_cost(cost, report.target)
        allowed = model.budget_bytes if budget is None else report.target.budget_bytes(budget)
    else:
        given = Inputs.of(model, batch, **inputs)
        allowed = given.target.allowed_bytes(budget)
        step, timed = given.step, given.cost
        with EarlyCaptures(step if levers and given.mesh is None else None, given.target) as early:
            report = Report(problem=given.problem(), plan=None)
            early.drop_useless(report.trace)
            case = Case(report=report, step=step, cost=timed, budget_bytes=allowed, early=early)
            return _explained(case, levers, progress)
    return _explained(Case(report=report, step=step, cost=timed, budget_bytes=allowed), levers, progress)


def _explained(case: Case, levers: bool, progress: bool) -> StepExplanation:
    reservation = judge_room(case.target, case.timeline)  # while a capture that began early may still run
    if not levers:
        return _explanation(case, reservation, (), None)
    with Progress("working out levers", show=progress) as spinner:
        found = find_levers(case, spinner.add)
    return _explanation(case, reservation, found, case.min_budget)


def _explanation(
    case: Case, reservation: Reservation, levers: tuple[Lever, ...], least: MinBudget | None
) -> StepExplanation:
    report, timeline = case.report, case.timeline
    instant = timeline.peak_instant
    holders = Holders(timeline, instant, find_kept_by_plan(report, timeline))
    there = timeline.alive_at(instant)
    size = timeline.allocations.size_bytes[there]
    largest = there[np.lexsort((there, timeline.allocations.alloc_at[there], -size))][:_LARGEST]
    at = peak_at(timeline.trace, int(timeline.op[instant]), second_run_of=timeline.recomputed_unit(instant))
    plan = report.plan
    notes = [*report.trace.notes]
    if plan is not None and plan.predicted is None:
        notes.append("no plan fits: this is the step under the plan that needs least, and levers are on top of that")
    if levers and case.step is None:
        notes.append("levers that need the step captured again are left out or estimated: give the step, not its trace")
    dimensions = _dimensions(case, timeline, compared=bool(levers))
    return StepExplanation(
        reserved_bytes=reservation.reserved_bytes,
        has_room=reservation.room is Room.ENOUGH,
        device=case.target.device.name,
        device_title=case.target.device.title,
        ranks=case.target.ranks,
        budget_bytes=case.budget_bytes,
        planned=plan is not None,
        peak_bytes=timeline.peak_bytes,
        step_ms=case.step_ms,
        at=_place(at, timeline.trace),
        by_category=timeline.peak_by_category,
        by_module=_by_module(timeline, instant, there, holders),
        by_line=_by_line(timeline, there, holders),
        largest=tuple(holders.of(number) for number in largest.tolist()),
        activations=_activations(timeline),
        gathered=_gathered(report, timeline, there),
        checkpointing=explain_checkpointing(report, timeline),
        levers=levers,
        least_bytes=None if least is None else least.peak_bytes,
        left_out=tuple(case.left_out),
        notes=tuple(notes),
        mesh=dict(report.trace.mesh),
        dimensions=dimensions,
    )


def _dimensions(case: Case, timeline: Timeline, *, compared: bool) -> tuple[MeshDimension, ...]:
    """Return what each dimension of the mesh does, beside the step on the mesh without it where that can be captured.

    That is a capture for each dimension of several; it is left out with the levers, which are captures too.
    """
    found = find_dimensions(case.report, timeline)
    sizes = {name: size for name, size in case.trace.mesh.items() if size > 1}
    if not compared or case.step is None or len(sizes) < 2:
        return found
    return tuple(_beside_without(case, each) if len(each.dims) == 1 else each for each in found)


def _beside_without(case: Case, dimension: MeshDimension) -> MeshDimension:
    """Return a dimension beside the step on the mesh without it, under the same plan as nearly as it can be."""
    mesh = {**case.trace.mesh, dimension.dims[0]: 1}
    assert case.step is not None
    step, what = case.step, f"the step without {dimension.name}"
    captured = case.noted(attempt(lambda: trace(step, target=case.target, mesh=mesh)), what=what)
    if captured is None:
        return dimension
    per_node = min(case.target.ranks_per_node, math.prod(mesh.values()))
    effect = case.effect(
        captured, target=Target.parse(case.target, ranks=math.prod(mesh.values()), ranks_per_node=per_node)
    )
    return replace(dimension, without_peak_bytes=effect.peak_bytes, without_step_ms=effect.step_ms)


def _of_document(plan: Plan) -> StepExplanation:
    """Explain a step from the plan document alone."""
    estimate = plan.predicted or plan.baseline
    return StepExplanation(
        reserved_bytes=estimate.peak_reserved_bytes,
        has_room=plan.predicted is not None and plan.predicted.room in (None, "enough"),
        device=plan.target.device,
        device_title=plan.target.title,
        ranks=plan.ranks,
        budget_bytes=plan.budget_bytes,
        planned=plan.predicted is not None,
        peak_bytes=estimate.peak_bytes,
        step_ms=estimate.step_ms,
        at=_place(estimate.peak_at, None),
        by_category=dict(sorted(estimate.peak_by_category.items(), key=lambda item: -item[1])),
        by_module=(),
        by_line=(),
        largest=(),
        activations=(),
        gathered=(),
        checkpointing=None,
        levers=(),
        notes=(*plan.notes, _ALONE),
    )


def _place(at: PeakAt, captured: Trace | None) -> PeakPlace:
    source = captured.source_of(at.op) if captured is not None and at.name else ""
    return PeakPlace(
        op=at.op, name=at.name, phase=at.phase, module=at.module, source=source, second_run_of=at.second_run_of
    )


def _by_module(timeline: Timeline, instant: int, there: np.ndarray, holders: Holders) -> tuple[ModuleAtPeak, ...]:
    """Return every module that has something at the peak; sizes are rounded up as the allocator rounds them."""
    categories: dict[str, Counter[Category]] = defaultdict(Counter)
    lines: dict[str, Counter[str]] = defaultdict(Counter)
    for number in there.tolist():
        found = timeline.allocation(number)
        module = holders.place(found.storage) or found.module
        size_bytes = round_to_block(found.size_bytes, timeline.rounding_bytes)
        categories[module][found.category] += size_bytes
        lines[module][holders.source(found.storage)] += size_bytes
    workspace = int(timeline.allocations.workspace_bytes[instant]) if instant < timeline.allocations.instants else 0
    if workspace:
        size_bytes = round_to_block(workspace, timeline.rounding_bytes)
        op = int(timeline.op[instant])
        categories[holders.place_of_op(op) or timeline.module_of(instant)][Category.TEMPORARY] += size_bytes
    rows = []
    for module, parts in categories.items():
        made = [(size_bytes, source) for source, size_bytes in lines[module].items() if source]
        rows.append(
            ModuleAtPeak(
                module=module,
                size_bytes=sum(parts.values()),
                by_category=dict(parts.most_common()),
                source=max(made, default=(0, ""))[1],
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.module)))


def _by_line(timeline: Timeline, there: np.ndarray, holders: Holders) -> tuple[LineAtPeak, ...]:
    size: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for number in there.tolist():
        source = holders.source(int(timeline.allocations.storage[number]))
        if source:
            size[source] += round_to_block(int(timeline.allocations.size_bytes[number]), timeline.rounding_bytes)
            count[source] += 1
    return tuple(
        LineAtPeak(source=source, size_bytes=size_bytes, allocations=count[source])
        for source, size_bytes in size.most_common()
    )


def _activations(timeline: Timeline) -> tuple[ModuleActivations, ...]:
    """Return modules by what they hold for the backward at the instant when most is held, children included."""
    instant = int(timeline.during_by_row[_ACTIVATION].argmax())
    own: Counter[str] = Counter()
    for number in timeline.alive_at(instant).tolist():
        if int(timeline.allocations.row[number]) == _ACTIVATION:
            size_bytes = round_to_block(int(timeline.allocations.size_bytes[number]), timeline.rounding_bytes)
            own[timeline.allocation(number).module] += size_bytes
    called = {call.module for call in timeline.trace.calls}
    whole: Counter[str] = Counter(own)
    for module, size_bytes in own.items():
        for outer in around(module):
            if outer in called:
                whole[outer] += size_bytes
    return tuple(
        ModuleActivations(module=module, size_bytes=size_bytes, own_bytes=own[module])
        for module, size_bytes in sorted(whole.items(), key=lambda item: (-item[1], item[0]))
        if size_bytes
    )


def _gathered(report: Report, timeline: Timeline, there: np.ndarray) -> tuple[GatheredUnit, ...]:
    """Return the sharded units, those with most gathered first."""
    if report.problem.sharding is None:
        return ()
    now: Counter[str] = Counter()
    for number in there.tolist():
        found = timeline.allocation(number)
        if found.category is Category.GATHERED_PARAMETER:
            now[found.module] += found.size_bytes
    rows = [
        GatheredUnit(
            module=unit.module,
            gathered_bytes=unit.gathered_bytes,
            gradient_bytes=unit.gradient_bytes,
            shard_bytes=unit.shard_bytes,
            at_peak_bytes=now[unit.module],
        )
        for unit in report.problem.sharding.units
    ]
    return tuple(sorted(rows, key=lambda row: -row.gathered_bytes))
