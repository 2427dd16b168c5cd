"""Plans and the caching allocator, which may hold more than the device has, in pieces that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from memfit.hardware import Device
from memfit.memory import Timeline, reserved
from memfit.solve import Incumbent, Problem, Solved, minimum_budget_bytes, solve
from memfit.units import display_bytes

_LOWERINGS = 6
_HALVINGS = 3
_STEP = 100
"""A budget is lowered by at least one part of this many."""
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


class Room(Enum):
    """Whether the caching allocator has room for a plan; better members first."""

    ENOUGH = 0
    """It holds no more than the device has."""
    TIGHT = 1
    """It empties its cache in every step."""
    TOO_LITTLE = 2
    """It runs out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The allocator's highest reservation when nothing limits it, and whether the device has room for it."""

    reserved_bytes: int
    room: Room


def reservation_under(problem: Problem, solved: Solved, *, expandable: bool = False) -> Reservation | None:
    """Return what the allocator does with a plan; None without one. `expandable` segments grow and have no pieces."""
    if solved.replay is None:
        return None
    reserved_bytes = _reserved_bytes(problem, solved.replay, expandable)
    return Reservation(reserved_bytes=reserved_bytes, room=_room(problem, solved.replay, reserved_bytes, expandable))


def with_room(
    problem: Problem, solved: Solved, watch: Callable[[Incumbent], None] | None = None, *, expandable: bool = False
) -> tuple[Solved, Reservation | None]:
    """Return a plan, for this budget or a lower one, that the allocator has room for, and its reservation.

    What it holds too much is taken off the budget, some times; then the smallest budget is tried, and some between.
    Where none will do it is the plan with the most room, and of those alike the one with the most budget.
    """
    usable = problem.target.usable_bytes
    tried: list[tuple[int, Solved, Timeline]] = []

    def able(found: Solved) -> bool:
        if found.replay is None:
            return False
        tried.append((_reserved_bytes(problem, found.replay, expandable), found, found.replay))
        return tried[-1][0] <= usable

    if solved.replay is None:
        return solved, None
    if not able(solved):
        for _ in range(_LOWERINGS):
            reserved_bytes, lowest, _ = tried[-1]
            budget_bytes = lowest.budget_bytes - max(reserved_bytes - usable, usable // _STEP)
            if budget_bytes <= 0:
                break
            found = solve(problem, budget_bytes, start=lowest.choice, watch=watch)
            if found.replay is None or able(found):
                break
        if tried[-1][0] > usable:
            _between(problem, tried[-1][1].budget_bytes, able)
    fits = [each for each in tried if each[0] <= usable]  # the rest is simulated again, to see whether it runs out
    reservations = [
        (Reservation(reserved_bytes=reserved_bytes, room=_room(problem, replay, reserved_bytes, expandable)), found)
        for reserved_bytes, found, replay in fits or tried
    ]
    best, found = min(reservations, key=lambda each: (each[0].room.value, -each[1].budget_bytes))
    return found, best


def _reserved_bytes(problem: Problem, replay: Timeline, expandable: bool) -> int:
    """Return what the allocator holds at most when nothing limits it."""
    device = _device(problem, expandable)
    return reserved(replay.allocations, device).peak_reserved_bytes if device.allocator.caches else replay.peak_bytes


def _room(problem: Problem, replay: Timeline, reserved_bytes: int, expandable: bool) -> Room:
    device, usable = _device(problem, expandable), problem.target.usable_bytes
    if reserved_bytes <= usable or not device.allocator.caches:
        return Room.ENOUGH
    fails = reserved(replay.allocations, device, limit_bytes=usable).out_of_memory_op is not None
    return Room.TOO_LITTLE if fails else Room.TIGHT


def _device(problem: Problem, expandable: bool) -> Device:
    device = problem.target.device
    if not expandable:
        return device
    return replace(device, allocator=replace(device.allocator, expandable_segments=True))


def _between(problem: Problem, high: int, able: Callable[[Solved], bool]) -> None:
    """Try the smallest budget; when it will do, also some between it and the lowest that will not."""
    low = minimum_budget_bytes(problem)
    if low is None or low >= high or not able(solve(problem, low)):
        return
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        if able(solve(problem, middle)):
            low = middle
        else:
            high = middle


def note_on_room(
    problem: Problem, solved: Solved, reservation: Reservation | None, asked_bytes: int | None
) -> str | None:
    """Return a note on what the allocator reserves under a plan and what to do about it; None when it has room.

    `asked_bytes` is the budget that was asked for, None when it was left to memfit.
    """
    usable = display_bytes(problem.target.usable_bytes)
    if reservation is None:
        return None
    if reservation.room is Room.ENOUGH:
        if asked_bytes is not None or solved.budget_bytes == problem.target.usable_bytes:
            return None
        return (
            f"the budget is {display_bytes(solved.budget_bytes)} of the device's {usable}: with more, the caching "
            "allocator would hold more than the device has, in pieces that do not fit. A budget of your own is taken "
            f"as it is; {EXPANDABLE} avoids the pieces"
        )
    does = "run out" if reservation.room is Room.TOO_LITTLE else "empty its cache in every step, which takes time"
    return (
        f"the caching allocator would hold {display_bytes(reservation.reserved_bytes)}, in pieces that do not fit, and "
        f"{does}: the device has {usable}. {_remedy(problem, solved, asked_bytes)}"
    )


def _remedy(problem: Problem, solved: Solved, asked_bytes: int | None) -> str:
    """Advise a lower budget where there is one that has room; else what to do with expandable segments."""
    if asked_bytes is not None:
        lower, reservation = with_room(problem, solved)
        if _has_room(reservation):
            return f"A budget of {display_bytes(lower.budget_bytes)} has room"
    least = minimum_budget_bytes(problem)
    none = "No lower budget " + ("" if least is None else f"down to {display_bytes(least)} ") + "was found to have room"
    grown, reservation = with_room(problem, solved, expandable=True)
    if not _has_room(reservation):
        return f"{none}, nor with {EXPANDABLE}: use another lever, such as a smaller batch"
    if grown.budget_bytes == solved.budget_bytes:
        return f"{none}: the plan fits only with {EXPANDABLE}"
    return f"{none}: with {EXPANDABLE} a budget of {display_bytes(grown.budget_bytes)} has"


def _has_room(reservation: Reservation | None) -> bool:
    return reservation is not None and reservation.room is Room.ENOUGH
