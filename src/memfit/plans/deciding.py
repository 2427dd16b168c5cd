"""What a plan decides beside the solver, each setting with its room in the caching allocator.

Note [Room of settings]: a budget of memfit's own leaves the allocator what it loses in pieces, which is another amount
in every setting. The search has the bounds of the whole budget, and gives what would be the best its room before it
takes it: a lower budget, as far as one is found (`with_room`). Of answers with different room the one with more is
better; a budget of the user's is taken as it is, so there room counts only for what is decided unasked. One that was
passed over may be faster under the budget of the answer in the end, for which it has less room: then the answer is not
called the fastest, and a note says so.

Where segments may grow (`segments`), all are compared with segments that do. If the answer has room without that, they
stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from memfit.errors import InputError
from memfit.plans.joint import WORTH, JointSearch
from memfit.plans.reservation import Room, reservation_under, with_room
from memfit.plans.resolve import Inputs
from memfit.plans.setting_problems import EarlyChunks
from memfit.plans.settings import LEAST_GAIN_MS, Answer
from memfit.progress import Progress
from memfit.solve import Problem, solve


def decide(
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
        settle=partial(_give_room, lowers=lowers, heeds=lowers or options.decide is None),
        loss_chunks=options.loss_chunks,
        early=early,
        worth=worth,
    )
    with Progress("trying other settings of the step", show=inputs.progress):
        joint.run()
    return joint


def _give_room(found: Answer, other: Answer | None, *, lowers: bool, heeds: bool) -> Answer | None:
    """Return an answer with its reservation; None where it is no faster than another or has less room.

    Unless it `heeds` room, that is not asked for.
    """
    if not heeds:
        return found if other is None or found.better_than(other) else None
    room = None if other is None or other.reservation is None else other.reservation.room
    if lowers:
        most_ms = other.step_ms - found.base_ms if other is not None and room is Room.ENOUGH else math.inf
        solved, reservation = with_room(found.problem, found.solved, most_ms=most_ms)
    else:
        solved, reservation = found.solved, reservation_under(found.problem, found.solved)
    if reservation is None:
        return None
    settled = replace(found, solved=solved, reservation=reservation)
    if room is None or reservation.room is room:
        return settled if other is None or settled.better_than(other) else None
    return settled if reservation.room.value < room.value else None


def faster_with_less_room(joint: JointSearch) -> float:
    """Return the least time, under the answer's budget, of answers that were passed over; infinite if none is faster.

    See Note [Room of settings].
    """
    best, least_ms = joint.best, math.inf
    if best.solved.choice is None:
        return least_ms
    budget_bytes, most_ms = best.solved.budget_bytes, best.step_ms * (1.0 - WORTH) - LEAST_GAIN_MS
    for each in joint.passed_over:
        solved = each.solved
        if solved.budget_bytes >= budget_bytes and each.base_ms + solved.bound_ms >= most_ms:
            continue  # nor is it faster with less
        if solved.budget_bytes != budget_bytes:
            solved = solve(each.problem, budget_bytes, minimum=False)
        if solved.choice is not None and each.base_ms + solved.recompute_ms < most_ms:
            least_ms = min(least_ms, each.base_ms + solved.bound_ms)
    return least_ms


def with_growing_segments(problem: Problem) -> Problem:
    """Return the problem on an allocator whose segments grow, where that may be decided; else as it is."""
    target = problem.target
    allocator = target.device.allocator
    if "segments" not in problem.options.decided or not allocator.caches or allocator.expandable_segments:
        return problem
    return problem.with_target(replace(target, device=target.device.with_expandable_segments()))


def take_segments_back(joint: JointSearch, best: Answer, given: Problem) -> Answer:
    """Return the answer on the allocator as it was given, where it has as much room there; else note what grows."""
    if best.problem.target is given.target:
        return best
    same = best.problem is joint.first.problem
    as_given = given if same else best.problem.with_target(given.target)
    reservation = reservation_under(as_given, best.solved)
    grown = best.reservation
    if reservation is None or grown is None or reservation.room.value <= grown.room.value:
        return replace(best, problem=as_given, reservation=reservation)
    joint.segments_saved_bytes = reservation.reserved_bytes - grown.reserved_bytes
    return best
