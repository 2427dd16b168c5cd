"""`plan` and `curve`: from what a user has to the plan document, and to the whole trade-off."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import msgspec

from memfit.capture import batch_rows
from memfit.errors import InputError
from memfit.memory import Timeline, reserved_range
from memfit.plans.build import build_plan
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
    problem = inputs.problem()
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
    faster_ms = math.inf
    if kinds or problem.options.loss_chunks not in (None, 1):
        first = best if solved is whole else Answer(problem=problem, solved=whole)
        joint = _decide(first, best, inputs, kinds, early, worth, lowers=budget is None)
        faster_ms = _faster_without_room(joint)
        if math.isfinite(faster_ms):
            notes.append(
                f"a step of {display_ms(faster_ms)} would meet this budget and was not taken: the caching allocator "
                "has less room for it, in pieces that do not fit; --decide exact lets its segments grow as well"
            )
        notes += joint.left_out
    if joint is None and problem.options.decide:
        joint = JointSearch(best, inputs.step, inputs.cost, ())
    if joint is not None and worth > WORTH:
        before = joint.best
        drop_small_gains(joint, worth)
        if joint.best is not before:
            faster_ms = min(faster_ms, before.base_ms + before.solved.bound_ms)
            notes.append(
                f"decisions that gain less than {worth:.0%} of the step together are not taken: predictions for a CPU "
                "are off by more"
            )
    best = best if joint is None else joint.best
    reservation = best.reservation or reservation_under(best.problem, best.solved)
    if joint is not None and "segments" in problem.options.decided:
        reservation = _with_segments(joint, allowed, reservation, is_given=budget is not None)
    best = best if joint is None else joint.best
    if best.solved.choice is None and problem.options.decide is None and can_shard_otherwise(problem):
        notes.append("--decide exact also tries other ways to gather, which may need less")
    asked_bytes = None if budget is None else allowed
    return _document(best, reservation, problem, notes, asked_bytes, joint, faster_ms), best.problem


def _with_segments(
    joint: JointSearch, allowed: int, before: Reservation | None, *, is_given: bool
) -> Reservation | None:
    """Let the allocator's segments grow where that gives a plan room that it does not have, or more budget."""
    best = joint.best
    target = best.problem.target
    if not target.device.allocator.caches or target.device.allocator.expandable_segments:
        return before
    short = before is not None and (before.room is not Room.ENOUGH or best.solved.budget_bytes < allowed)
    if before is None or not short:
        return before
    device = target.device.with_expandable_segments()
    grown = replace(best, problem=best.problem.with_target(replace(target, device=device)))
    if is_given:
        found, roomy = grown, reservation_under(grown.problem, grown.solved)
    else:
        found, roomy = _with_room(grown, allowed)
    if roomy is None or roomy.room.value > before.room.value:
        return before
    if roomy.room is before.room and not found.better_than(best):
        return before
    joint.best, joint.segments_saved_bytes = found, before.reserved_bytes - roomy.reserved_bytes
    return roomy


def _with_room(answer: Answer, allowed: int) -> tuple[Answer, Reservation | None]:
    """Return the answer under a budget that the allocator has room for, and its reservation."""
    solved, reservation = with_room(answer.problem, solve(answer.problem, allowed))
    return replace(answer, solved=solved, reservation=reservation), reservation


def _decide(
    first: Answer,
    best: Answer,
    inputs: Inputs,
    kinds: Iterable[str],
    early: EarlyChunks | None,
    worth: float,
    *,
    lowers: bool,
) -> JointSearch:
    """Look for a better setting of the step than the given one.

    `lowers` says that the budget is memfit's own: what the allocator has no room for is planned with less.
    """
    options = first.problem.options
    named = options.optimizer or {"loss", "optimizer", "micro_batch"} & {*(options.decide or ())}
    if inputs.step is None and (named or options.loss_chunks not in (None, 1)):
        what = "optimizer=True" if options.optimizer else f"decide={options.decide!r}"
        raise InputError(f"SolveOptions({what}) captures the step in other ways; give the step, not its trace")
    joint = JointSearch(
        first,
        inputs.step,
        inputs.cost,
        kinds,
        best=best,
        settle=partial(_give_room, lowers=lowers, grows="segments" in options.decided),
        loss_chunks=options.loss_chunks,
        early=early,
        worth=worth,
    )
    with Progress("trying other settings of the step", show=inputs.progress):
        joint.run()
    return joint


def _give_room(found: Answer, other: Answer | None, *, lowers: bool, grows: bool) -> Answer | None:
    """Return an answer with its reservation; None where it is no better than another one, or has less room.

    Where the allocator's segments may grow later (`grows`), room does not count yet.
    """
    room = None if other is None or other.reservation is None or grows else other.reservation.room
    if lowers:
        most_ms = other.step_ms - found.base_ms if other is not None and room is Room.ENOUGH else math.inf
        solved, reservation = with_room(found.problem, found.solved, most_ms=most_ms)
    else:
        solved, reservation = found.solved, reservation_under(found.problem, found.solved)
    if reservation is None or (room is not None and reservation.room.value > room.value):
        return None
    settled = replace(found, solved=solved, reservation=reservation)
    return settled if other is None or settled.better_than(other) else None


def _faster_without_room(joint: JointSearch) -> float:
    """Return the least time under the answer's budget of what the allocator had no room for; infinite if none."""
    best, least_ms = joint.best, math.inf
    if best.solved.choice is None:
        return least_ms
    for each in joint.without_room:
        solved = each.solved
        if solved.budget_bytes != best.solved.budget_bytes:
            solved = solve(each.problem, best.solved.budget_bytes, minimum=False)
        if solved.choice is not None and each.base_ms + solved.recompute_ms < best.step_ms * (1.0 - WORTH):
            least_ms = min(least_ms, each.base_ms + solved.bound_ms)
    return least_ms


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
        given = problem if divided is None else divided
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
