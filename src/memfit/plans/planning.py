"""`plan` and `curve`: from what a user has to the plan document, and to the whole trade-off."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import msgspec

from memfit.capture import batch_rows
from memfit.errors import InputError
from memfit.memory import Timeline, reserved_range
from memfit.plans.build import build_plan
from memfit.plans.deciding import decide, faster_with_less_room, take_segments_back, with_growing_segments
from memfit.plans.decisions import drop_small_gains, find_decisions, price_ms_per_gib
from memfit.plans.document import Plan
from memfit.plans.joint import WORTH, JointSearch, searched_kinds, worth_on
from memfit.plans.record import (
    Blocker,
    DdpPlan,
    Dtype,
    Estimate,
    MicroBatchRecord,
    Prediction,
    ShardedUnit,
    ShardPlan,
)
from memfit.plans.reservation import EXPANDABLE, Reservation, Room, note_on_room, reservation_under, with_room
from memfit.plans.resolve import Inputs, Model, StepInputs, check_start
from memfit.plans.setting_problems import EarlyChunks
from memfit.plans.settings import LEAST_GAIN_MS, Answer, Setting, StepVariant, can_shard_otherwise
from memfit.plans.trace_record import peak_at
from memfit.progress import Progress
from memfit.sharding import ShardEngine
from memfit.solve import (
    Choice,
    Curve,
    Incumbent,
    Problem,
    Solved,
    Status,
    build_curve,
    check_points,
    choose_nothing,
    find_blocker,
    relative_gap,
    solve,
)
from memfit.text import counted
from memfit.units import display_bytes, display_ms

if TYPE_CHECKING:
    from typing_extensions import Unpack


def plan(
    model: Model,
    batch: Any = None,
    *,
    budget: str | int | float | None = None,
    start: Plan | None = None,
    **inputs: Unpack[StepInputs],
) -> Plan:
    """Find the fastest plan for a training step that fits the budget, proven; also when nothing fits (`infeasible`).

    The budget is what tensors of one rank may take (`"72GiB"`, bytes, or a part of the device); unless given, all that
    is usable, less what the caching allocator loses in pieces. A `Step`, a `Trace` or a function that runs the step may
    stand for model, batch and the rest; a trace knows its target. `start` is a plan of the same step for another
    budget; the search begins with it. The keywords `loss`, `optimizer`, `autocast`, `target`,
    `ranks`, `engine`, `cost`, `options` and `progress` are those of `StepInputs`.
    """
    return plan_problem(Inputs.of(model, batch, **inputs), budget=budget, start=start)[0]


def plan_problem(
    inputs: Inputs,
    *,
    budget: str | int | float | None = None,
    start: Plan | None = None,
    early: EarlyChunks | None = None,
    worth: float | None = None,
) -> tuple[Plan, Problem]:
    """Return the plan of `plan`, and the problem that it solves: of the step as the plan runs it, for reports.

    `early` has traces with a chunked loss that were captured before. `worth` is the part of a step that a decision must
    gain to be taken, the device's unless given.
    """
    asked = inputs.target.budget_bytes(budget)
    check_start(start)
    given = inputs.problem()
    problem = with_growing_segments(given)
    worth = worth_on(problem.target.device) if worth is None else worth
    allowed = problem.target.allowed_bytes(budget)
    notes = list(problem.trace.notes)
    if allowed < asked:
        memory = problem.target.rank_memory
        nccl = f" and {display_bytes(memory.nccl.expected_bytes)} NCCL's" if memory.nccl.expected_bytes else ""
        notes.append(
            f"the budget of {display_bytes(asked)} was lowered to {display_bytes(allowed)}: about "
            f"{display_bytes(memory.context.expected_bytes)} of the device are its context{nccl}"
        )
    with Progress("solving", show=inputs.progress) as progress:

        def watch(incumbent: Incumbent) -> None:
            best, bound = display_ms(incumbent.objective), display_ms(incumbent.bound)
            progress.add(f"adds {best}, at least {bound}, gap {incumbent.gap:.1%}")

        whole = solve(problem, allowed, start=None if start is None else _choice(problem, start), watch=watch)
        if budget is None:
            solved, reservation = with_room(problem, whole, watch)
        else:
            solved, reservation = whole, reservation_under(problem, whole)
    best, joint = Answer(problem=problem, solved=solved, reservation=reservation), None
    kinds = searched_kinds(best)
    if problem.options.loss_chunks is not None:
        kinds.discard("loss")
    if kinds or problem.options.loss_chunks not in (None, 1):
        first = best if solved is whole else Answer(problem=problem, solved=whole)
        joint = decide(first, best, inputs, kinds, early, worth, lowers=budget is None)
        notes += joint.left_out
    if joint is None and problem.options.decide:
        joint = JointSearch(best, inputs.step, inputs.cost, ())
    faster_ms = math.inf
    if joint is not None:
        faster_ms = faster_with_less_room(joint)
        if math.isfinite(faster_ms):
            notes.append(_note_on_faster(faster_ms, joint.best))
        before = joint.best
        if worth > WORTH:
            drop_small_gains(joint, worth)
        if joint.best is not before:
            faster_ms = min(faster_ms, before.base_ms + before.solved.bound_ms)
            notes.append(
                f"decisions that gain less than {worth:.0%} of the step together are not taken: predictions for a CPU "
                "are off by more"
            )
        best = joint.best
    if best.reservation is None:
        best = replace(best, reservation=reservation_under(best.problem, best.solved))
    if joint is not None:
        best = joint.best = take_segments_back(joint, best, given)
    unasked = problem.options.decide is None and can_shard_otherwise(problem)
    if best.solved.choice is None and unasked and {"reshard", "prefetch"} & {*problem.options.decided}:
        notes.append("--decide exact also tries other ways to gather, which may need less")
    asked_bytes = None if budget is None else allowed
    return _document(best, best.reservation, given, notes, asked_bytes, joint, faster_ms), best.problem


def _note_on_faster(faster_ms: float, best: Answer) -> str:
    """Say that there is a faster step for which the allocator has less room."""
    grows = best.problem.target.device.allocator.expandable_segments
    kind = "exact" if best.problem.options.decide is None else "segments"
    advice = "" if grows else f"; --decide {kind} lets its segments grow too"
    return (
        f"a step of {display_ms(faster_ms)} would meet this budget and was not taken: the caching allocator has less "
        f"room for it, in pieces that do not fit{advice}"
    )


def curve(model: Model, batch: Any = None, *, points: int = 16, **inputs: Unpack[StepInputs]) -> Curve:
    """Trace budget against step time, from the smallest budget that can be met to the one that needs nothing.

    The keywords are those of `plan`.
    """
    given = Inputs.of(model, batch, **inputs)
    check_points(points)
    problem = given.problem()
    with Progress("solving", show=given.progress) as spinner:

        def watch(done: int, all_points: int) -> None:
            spinner.add(f"{done} of {all_points} budgets")

        return build_curve(problem, points=points, watch=watch)


def _choice(problem: Problem, start: Plan) -> Choice:
    """Return the choice that a plan made, with the nearest policies where its own are not among the candidates'."""
    dropped = {entry.unit: entry.discarded_bytes + (entry.offloaded_bytes or 0) for entry in start.checkpoint}
    choice = choose_nothing(problem)
    for index, candidate in enumerate(problem.candidates):
        if candidate.unit.name in dropped:
            distances = [abs(policy.freed_bytes - dropped[candidate.unit.name]) for policy in candidate.policies]
            choice[index] = distances.index(min(distances))
    return choice


def _document(
    answer: Answer,
    reservation: Reservation | None,
    given: Problem,
    notes: list[str],
    asked_bytes: int | None,
    joint: JointSearch | None,
    faster_ms: float,
) -> Plan:
    """Build the plan; its baseline is the step as given, also where the plan changes the optimizer's step.

    Where the plan divides the batch, the step is another, and the baseline is that one's. `faster_ms` is the bound of a
    plan that was found and not taken, infinite where there is none.
    """
    problem, solved = answer.problem, answer.solved
    if joint is not None and answer.setting.variant.parts > 1:
        divided = joint.problems.of(Setting(variant=StepVariant(parts=answer.setting.variant.parts)))
        given = (problem if divided is None else divided).with_target(given.target)
    captured, target = problem.trace, problem.target
    base_ms = problem.runtime.total_ms + problem.exposed_ms
    given_ms = given.runtime.total_ms + given.exposed_ms
    if problem is given and solved.replay is not None and not solved.chosen:
        without, without_reservation = solved.replay, reservation
    else:
        without, without_reservation = given.replay(()), None
    baseline = Estimate(step_ms=given_ms, **_peak(given, without, without_reservation))
    predicted = _prediction(problem, solved, reservation, base_ms)
    room = note_on_room(problem, solved, reservation, asked_bytes)
    notes += [] if room is None else [room]
    if problem.min_budget_is_unproven:
        notes.append("the smallest budget is the lowest found in the time limit, not proven to be the lowest there is")
    notes += note_on_offload(problem, solved)
    if solved.tightened:
        notes.append(f"the replay sent the solver back {solved.tightened} times")
    fits = solved.status not in (Status.INFEASIBLE, Status.UNKNOWN)
    if not fits and solved.minimum_budget_bytes is None:
        raise InputError(
            "no plan was found within the time limit; give more: SolveOptions(limits=...), or --time-limit"
        )
    decisions, price = None, None
    chosen = answer.setting
    changes = chosen.variant.chunked is not None or chosen.shard is not None
    if joint is not None and (problem.options.decide or changes):
        decisions, price = (find_decisions(joint), price_ms_per_gib(joint)) if fits else ([], None)
        notes += _what_to_write(answer, given)
    bound_ms = base_ms + solved.bound_ms
    gap, status = solved.gap, solved.status
    if joint is not None and joint.bound_ms < bound_ms - LEAST_GAIN_MS and fits:
        bound_ms, status = joint.bound_ms, Status.FEASIBLE
        gap = relative_gap(solved.recompute_ms, max(0.0, joint.bound_ms - base_ms))
        notes.append(
            "the time limit ended the search over settings of the step: those that were not tried take at least "
            f"{display_ms(bound_ms)}"
        )
    if faster_ms < bound_ms - LEAST_GAIN_MS and fits:
        bound_ms, status = faster_ms, Status.FEASIBLE
        gap = relative_gap(solved.recompute_ms, max(0.0, faster_ms - base_ms))
    return build_plan(
        captured,
        target=target,
        budget_bytes=solved.budget_bytes,
        status="infeasible" if not fits else "optimal" if status is Status.OPTIMAL else "feasible",
        gap=gap if fits else None,
        bound_ms=bound_ms if fits else None,
        minimum_budget_bytes=solved.minimum_budget_bytes,
        checkpoint=[(candidate.unit, policy) for candidate, policy in solved.chosen] if fits else (),
        baseline=baseline,
        predicted=predicted if fits else None,
        blocker=None if fits else _why(problem),
        shard=_shard_plan(problem, solved) if fits else None,
        ddp=_ddp_plan(problem),
        engine=problem.options.shard.engine if problem.sharding is not None else None,
        optimizer=answer.setting.variant.implementation,
        notes=notes,
        chunked=answer.setting.variant.chunked,
        decisions=decisions,
        price_ms_per_gib=price,
        micro_batch=_micro_batch(answer, joint),
    )


def _micro_batch(answer: Answer, joint: JointSearch | None) -> MicroBatchRecord | None:
    parts = answer.setting.variant.parts
    if parts == 1 or joint is None or joint.step is None:
        return None
    rows = batch_rows(joint.step.batch)
    assert rows is not None
    return MicroBatchRecord(rows=rows // parts, accumulation_steps=parts * joint.step.accumulation_steps)


def _what_to_write(answer: Answer, given: Problem) -> list[str]:
    """Return what the user is to do for a plan that its engine does not do, and what changes numbers."""
    variant, shard = answer.setting.variant, answer.problem.options.shard
    found = []
    if variant.chunked is not None:
        found.append("the loss is summed in chunks: losses and gradients are equal up to the order of sums")
    if variant.parts > 1:
        found.append(
            f"each batch is to run as {variant.parts} micro-batches, which memfit does not do by itself: "
            f"(loss / {variant.parts}).backward() on each, then optimizer.step(). That is equal up to the order of "
            "sums where the loss is a mean over rows that all count the same"
        )
    if shard.cpu_offload and not given.options.shard.cpu_offload:
        found.append(
            "shards, their gradients and the optimizer's state are in pinned host memory, where the optimizer steps: "
            'init_process_group("cpu:gloo,cuda:nccl"), and clip norms on the host'
        )
    if shard.replicas != given.options.shard.replicas or shard.units != given.options.shard.units:
        found.append("gradients are summed over ranks in other groups: equal up to the order of sums")
    allocator, before = answer.problem.target.device.allocator, given.target.device.allocator
    if allocator.expandable_segments and not before.expandable_segments:
        found.append(
            f"set {EXPANDABLE} in the environment before the process starts, which memfit does not do by itself"
        )
    return found


def note_on_offload(problem: Problem, solved: Solved) -> list[str]:
    """Say what offload frees, what it costs and over which link; nothing where no unit offloads."""
    offloading = [policy for _, policy in solved.chosen if policy.offload]
    link = problem.offload_link
    if not offloading or link is None:
        return []
    rates = sorted({f"{each / 1e9:.3g} GB/s" for each in (link.to_host_bytes_per_s, link.to_device_bytes_per_s)})
    needed = problem.host_bytes((candidate.unit, policy) for candidate, policy in solved.chosen)
    where = "of disk" if problem.target.device.type == "cpu" else "of pinned host memory, in powers of two,"
    return [
        f"{counted(len(offloading), 'unit')} offload {display_bytes(sum(each.offloaded_bytes for each in offloading))} "
        f"over {link.name} ({' and '.join(rates)}), for {display_ms(solved.exposed_offload_ms)} that compute waits",
        f"every rank needs {display_bytes(needed)} {where} for what its units offload",
    ]


_ROOMS: dict[Room, Literal["enough", "margin", "tight", "too little"]] = {
    Room.ENOUGH: "enough",
    Room.MARGIN: "margin",
    Room.TIGHT: "tight",
    Room.TOO_LITTLE: "too little",
}


def _prediction(problem: Problem, solved: Solved, reservation: Reservation | None, base_ms: float) -> Prediction | None:
    if solved.replay is None:
        return None
    offloads = any(policy.offload for _, policy in solved.chosen)
    return Prediction(
        step_ms=base_ms + solved.recompute_ms,
        recompute_ms=max(0.0, solved.recompute_ms - solved.exposed_offload_ms),
        exposed_communication_ms=problem.exposed_ms,
        exposed_offload_ms=solved.exposed_offload_ms if offloads else msgspec.UNSET,
        room=None if reservation is None else _ROOMS[reservation.room],
        **_peak(problem, solved.replay, reservation),
    )


def _peak(problem: Problem, judged: Timeline, reservation: Reservation | None) -> dict[str, Any]:
    """Return the memory fields of an estimate; `reservation` is None where it is not known yet."""
    instant = judged.peak_instant
    low = high = None
    if reservation is None:
        low, high = reserved_range(problem.target.device, judged)
        reserved_bytes = (low + high) // 2
    else:
        reserved_bytes, low, high = reservation.reserved_bytes, reservation.low_bytes, reservation.wanted_bytes
    ranges = low is not None and low < high
    return {
        "peak_bytes": judged.peak_bytes,
        "peak_reserved_bytes": max(judged.peak_bytes, reserved_bytes),
        "peak_reserved_low_bytes": low if ranges else None,
        "peak_reserved_high_bytes": high if ranges else None,
        "peak_by_category": judged.peak_by_category,
        "peak_at": peak_at(judged.trace, int(judged.op[instant]), second_run_of=judged.recomputed_unit(instant)),
    }


def _shard_plan(problem: Problem, solved: Solved) -> ShardPlan | None:
    if problem.sharding is None or problem.options.shard.parallel == "ddp" or problem.trace.mesh:
        return None  # a step that was captured on its mesh is sharded by the user's own code
    sharding = problem.sharding
    units = tuple(
        ShardedUnit(module=module, reshard_after_forward=unit.reshard_after_forward)
        for unit in sharding.units
        for module in unit.modules
    )
    chosen = [(candidate.unit, policy) for candidate, policy in solved.chosen]
    assert solved.replay is not None
    peaks: dict[Literal["fsdp2", "sharded"], int] = {}
    options = problem.options.shard
    for engine in get_args(ShardEngine):
        here = engine == (options.engine or "fsdp2")
        peaks[engine] = (solved.replay if here else problem.replay_on(engine, chosen)).peak_bytes
    return ShardPlan(
        ranks=options.shard_ranks(problem.target.ranks),
        replicas=options.replicas,
        units=units,
        prefetch=options.prefetch,
        shard_dtype=cast(Dtype | None, sharding.shard_dtype),
        param_dtype=cast(Dtype | None, sharding.param_dtype),
        reduce_dtype=cast(Dtype | None, sharding.reduce_dtype),
        peak_by_engine=peaks,
        cpu_offload=True if options.cpu_offload else msgspec.UNSET,
    )


def _ddp_plan(problem: Problem) -> DdpPlan | None:
    options = problem.options.shard
    if problem.sharding is None or options.parallel != "ddp" or problem.trace.mesh:
        return None
    return DdpPlan(
        ranks=problem.target.ranks,
        buckets=problem.sharding.buckets,
        bucket_cap_bytes=options.bucket_cap_bytes,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
    )


def _why(problem: Problem) -> Blocker | None:
    """Return what stands in the way; what would help is for `memfit.explain`, which takes the step itself."""
    least = problem.min_budget
    if least is None:
        return None
    found = find_blocker(problem, least.choice)
    return Blocker(
        peak_bytes=found.peak_bytes,
        peak_by_category=found.by_category,
        peak_at=peak_at(problem.trace, found.op, second_run_of=found.second_run_of),
    )
