"""Whether the caching allocator of a rank has room for a step.

Note [What fits]: a plan fits when a process that runs it has no failed allocation, and no step after the first in which
the allocator gives its cache back to the device. Both are found by running the allocator's model on the plan's events,
four steps or more, with a limit on what it may reserve (Note [What a rank has]): `usable_bytes`, which leave the margin
free. A plan that runs so only without the margin is said to be within it. One that fails even with the least context
and the least memory of NCCL that were ever seen does not fit; what is between may run, and is slow or lucky.

Where cuDNN runs convolutions, a plan fits when it does so with the largest workspaces. With less memory it runs all the
same, with other algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from memfit.hardware import Device, RankMemory, Target
from memfit.memory.allocations import AllocationTable
from memfit.memory.convolution_workspace import convolution_workspaces, with_convolutions
from memfit.memory.steady_state import Reserved, reserved
from memfit.memory.timeline import Timeline

_PARTS = (0.4, 0.7, 1.0)
"""Of the most that convolutions may take, what is tried."""


class Room(Enum):
    """Whether the caching allocator has room for a plan; better members first (Note [What fits])."""

    ENOUGH = 0
    """It runs with room to spare for the margin."""
    MARGIN = 1
    """It runs, if it reserves no more than predicted."""
    TIGHT = 2
    """It runs, but empties its cache in every step, or needs a smaller context than is expected."""
    TOO_LITTLE = 3
    """It runs out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What the allocator reserves at most, and whether the device has room for it.

    `wanted_bytes` is what it would reserve with no limit. Where it has room for less, having given its cache back in
    the first step only, `reserved_bytes` is that. Where cuDNN runs convolutions it reserves between `low_bytes` and
    `wanted_bytes`, and `reserved_bytes` is the middle (Note [Workspaces of convolutions]).
    """

    reserved_bytes: int
    wanted_bytes: int
    room: Room
    low_bytes: int | None = None


def find_room(
    target: Target, timeline: Timeline, *, expandable: bool = False, wanted: bool = True
) -> tuple[Reservation | None, int | None]:
    """Return what `judge_room` does where a step has room with the margin to spare, else None.

    The second is what the allocator would reserve with no limit; without `wanted` it is None where there is no room.
    That is what a search for a budget asks: to say how much is missing takes longer.
    """
    device, memory = _device(target.device, expandable), target.rank_memory
    if not device.allocator.caches:
        judged = judge_room(target, timeline)
        return judged if judged.room is Room.ENOUGH else None, judged.wanted_bytes
    if not wanted and not _limited(device, timeline.allocations, memory.usable_bytes, freely=True).runs_freely:
        return None, None
    least, wanted_bytes, table = _most_reserved(device, timeline)
    enough = _enough(memory, device, table, wanted_bytes)
    if enough is None or table is timeline.allocations:
        return enough, wanted_bytes
    return _with_convolutions(enough, least), wanted_bytes


def judge_room(target: Target, timeline: Timeline, *, expandable: bool = False) -> Reservation:
    """Return what the allocator of a rank does with a step (Note [What fits])."""
    device, memory = _device(target.device, expandable), target.rank_memory
    if not device.allocator.caches:
        peak_bytes = timeline.peak_bytes
        room = Room.ENOUGH if peak_bytes <= memory.usable_bytes else Room.TOO_LITTLE
        return Reservation(reserved_bytes=peak_bytes, wanted_bytes=peak_bytes, room=room)
    least, wanted_bytes, table = _most_reserved(device, timeline)
    most = _judge(memory, device, table, wanted_bytes)
    if table is timeline.allocations:
        return most
    room = most.room
    if room in (Room.TIGHT, Room.TOO_LITTLE):  # an algorithm that gets no workspace is not taken, and nothing fails
        room = max(Room.MARGIN, _judge(memory, device, timeline.allocations, least).room, key=lambda each: each.value)
    return _with_convolutions(replace(most, room=room), least)


def reserved_range(device: Device, timeline: Timeline) -> tuple[int, int]:
    """Return the least and the most that the allocator reserves; the same where cuDNN runs no convolutions."""
    if not device.allocator.caches:
        return timeline.peak_bytes, timeline.peak_bytes
    return _most_reserved(device, timeline)[:2]


def _most_reserved(device: Device, timeline: Timeline) -> tuple[int, int, AllocationTable]:
    """Return what is reserved without workspaces of convolutions, the most with them, and the table of the latter."""
    table = timeline.allocations
    least = most = _without_limit(table, device)
    workspaces = convolution_workspaces(timeline.trace)
    # Larger workspaces may leave larger blocks, which serve others later: the largest need not reserve the most.
    if workspaces is None:
        return least, most, table
    for part in _PARTS:
        tried = with_convolutions(timeline.allocations, workspaces, part)
        found = reserved(tried, device).peak_reserved_bytes
        if found > most:
            most, table = found, tried
    return least, most, table


@lru_cache(maxsize=4)
def _without_limit(table: AllocationTable, device: Device) -> int:
    """Return what is reserved with no limit; a search for a budget and the document that follows ask for the same."""
    return reserved(table, device).peak_reserved_bytes


def _judge(memory: RankMemory, device: Device, table: AllocationTable, wanted_bytes: int) -> Reservation:
    def reservation(room: Room, reserved_bytes: int = wanted_bytes) -> Reservation:
        return Reservation(reserved_bytes=reserved_bytes, wanted_bytes=wanted_bytes, room=room)

    if wanted_bytes <= memory.usable_bytes:
        return reservation(Room.ENOUGH)
    if memory.most_bytes < int(table.levels(device.allocator.rounding_bytes)[1].sum(axis=0).max()):
        return reservation(Room.TOO_LITTLE)
    at_available = None
    if wanted_bytes > memory.available_bytes:
        at_available = _limited(device, table, memory.available_bytes)
    if at_available is None or at_available.runs_freely:
        at_usable = _limited(device, table, memory.usable_bytes)
        if at_usable.runs_freely:
            return reservation(Room.ENOUGH, at_usable.peak_reserved_bytes)
        return reservation(Room.MARGIN)
    at_most = None if at_available.out_of_memory_op is None else _limited(device, table, memory.most_bytes)
    fails = at_most is not None and at_most.out_of_memory_op is not None
    return reservation(Room.TOO_LITTLE if fails else Room.TIGHT)


def _enough(memory: RankMemory, device: Device, table: AllocationTable, wanted_bytes: int) -> Reservation | None:
    """Return what `_judge` does where that is enough, else None: at the lower limit first, which fails more often."""
    reserved_bytes = wanted_bytes
    if wanted_bytes > memory.usable_bytes:
        at_usable = _limited(device, table, memory.usable_bytes, freely=True)
        if not at_usable.runs_freely:
            return None
        if wanted_bytes > memory.available_bytes:
            at_available = _limited(device, table, memory.available_bytes, freely=True)
            if not at_available.runs_freely:
                return None
        reserved_bytes = at_usable.peak_reserved_bytes
    return Reservation(reserved_bytes=reserved_bytes, wanted_bytes=wanted_bytes, room=Room.ENOUGH)


def _limited(device: Device, table: AllocationTable, limit_bytes: int, *, freely: bool = False) -> Reserved:
    return reserved(table, device, limit_bytes=max(0, limit_bytes), freely=freely)


def _with_convolutions(most: Reservation, least_bytes: int) -> Reservation:
    """Return the reservation with the range from no workspaces of convolutions to the largest, and its middle."""
    return replace(most, reserved_bytes=(least_bytes + most.wanted_bytes) // 2, low_bytes=least_bytes)


def _device(device: Device, expandable: bool) -> Device:
    return device.with_expandable_segments() if expandable else device
