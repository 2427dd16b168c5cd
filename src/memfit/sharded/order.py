"""The order in which units run: recorded, checked across ranks, and used to gather ahead."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from memfit.sharded.comm import CollectiveError, OrderError, ShardComm
from memfit.sharded.unit import ShardedUnit

_END = -1


class Order:
    """The units of a forward in the order they begin, for each unit that a pass can begin with, in training and not.

    The first pass is compared between ranks at every unit, before its gather; so is a later one from where it leaves
    the recorded order. Prefetching stops there until the next pass, since what comes next is not known.
    """

    def __init__(self, units: Sequence[ShardedUnit], links: Sequence[ShardComm]) -> None:
        self._units = units
        self._links = links
        self._recorded: dict[tuple[ShardedUnit, bool], list[ShardedUnit]] = {}
        self._given: list[ShardedUnit] | None = None
        self._expected: list[ShardedUnit] = []
        self._key: tuple[ShardedUnit, bool] | None = None
        self._now: list[ShardedUnit] = []
        self._ended: list[ShardedUnit] = []
        self._known = False

    def expect(self, units: Sequence[ShardedUnit]) -> None:
        """Use an order that was given instead of a recorded one, where the whole model runs."""
        self._given = list(units)

    @property
    def recorded(self) -> dict[tuple[ShardedUnit, bool], list[ShardedUnit]]:
        """The orders that are known so far, which ranks compared."""
        return dict(self._recorded)

    def rewind(self, recorded: dict[tuple[ShardedUnit, bool], list[ShardedUnit]]) -> None:
        """Forget the pass that was begun, and orders that were recorded since."""
        self._recorded = dict(recorded)
        self._now, self._ended, self._known = [], [], False

    def begin(self, outermost: ShardedUnit) -> None:
        """Begin a pass."""
        self._key = (outermost, outermost.module.training)
        given = None if outermost.name else self._given
        self._expected = self._recorded.get(self._key, []) if given is None else given
        self._now, self._ended = [], []
        self._known = bool(self._expected)

    def enter(self, unit: ShardedUnit) -> None:
        """Note that a unit's forward begins."""
        position = len(self._now)
        self._known = self._known and position < len(self._expected) and self._expected[position] is unit
        self._now.append(unit)
        if not self._known:
            self._compare(position, unit)

    def leave(self, unit: ShardedUnit, count: int) -> tuple[ShardedUnit, ...]:
        """Note that a unit's forward has ended; return the units whose backward comes after its own, nearest first."""
        before = self._ended
        if self._given is not None and unit in self._given:
            inside = [each for each in self._given if each.name and each in self._ended]
            before = inside[: inside.index(unit)] if unit in inside else inside
        following = tuple(before[-1 : -1 - count : -1])
        self._ended.append(unit)
        return following

    def end(self) -> None:
        """Note that the forward of the pass has ended."""
        if not self._known or len(self._now) != len(self._expected):
            self._compare(len(self._now), None)
        if self._key is not None:
            self._recorded[self._key] = self._now

    def following(self, count: int) -> list[ShardedUnit]:
        """Return the units whose forward comes next."""
        return self._expected[len(self._now) : len(self._now) + count] if self._known else []

    def _compare(self, position: int, unit: ShardedUnit | None) -> None:
        """Ask every rank which unit it runs here, also replicas: they sum gradients in the order of units."""
        left = self._left(position, unit)
        content = struct.pack("<qq", position, _END if unit is None else unit.number)
        for link in self._links:
            if left is not None:
                link.notices.say(left)
            try:
                told = link.tell(content, "comparison of the order of units", _where(unit, position))
            except CollectiveError as error:
                if left is None:
                    raise
                raise OrderError(f"{left}. Every rank must run the same units in the same order. {error}") from error
            answers = [struct.unpack("<qq", each) for each in told]
            if len(set(answers)) > 1:
                said = "; ".join(
                    f"rank {link.global_rank(rank)} {_doing(None if number == _END else self._units[number], where)}"
                    for rank, (where, number) in enumerate(answers)
                )
                raise OrderError(f"ranks run units in different orders: {said}. Every rank must run the same units")

    def _left(self, position: int, unit: ShardedUnit | None) -> str | None:
        """Say how this pass leaves the recorded order, if there is one."""
        if not self._expected:
            return None
        before = f"ran {self._expected[position].title}" if position < len(self._expected) else "ended"
        own = self._links[0].global_rank(self._links[0].rank)
        return f"rank {own} {_doing(unit, position)} of its forward, where it {before} before"


def _doing(unit: ShardedUnit | None, position: int) -> str:
    return f"{'ends' if unit is None else f'runs {unit.title}'} at position {position}"


def _where(unit: ShardedUnit | None, position: int) -> str:
    return f" at {'its end' if unit is None else unit.title}, position {position},"
