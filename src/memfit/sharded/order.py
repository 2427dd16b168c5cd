"""The order in which units run: recorded, checked across ranks, and used to gather ahead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from memfit.sharded.errors import OrderError
from memfit.sharded.unit import Unit

_END = -1


class Order:
    """The units of a forward in the order they begin, and of this pass in the order they end.

    The first pass is compared between ranks at every unit, before its gather; so is a later one from where it leaves
    the recorded order. Prefetching stops there until the next pass, since what comes next is not known.
    """

    def __init__(self, units: Sequence[Unit], group: dist.ProcessGroup, device: torch.device) -> None:
        self.ended: list[Unit] = []
        self._units = units
        self._group = group
        self._device = device
        self._recorded: list[Unit] = []
        self._now: list[Unit] = []
        self._known = False

    def expect(self, units: Sequence[Unit]) -> None:
        """Use an order that was given instead of a recorded one."""
        self._recorded = list(units)
        self._known = True

    def begin(self) -> None:
        """A pass begins."""
        self._now = []
        self._known = bool(self._recorded)

    def enter(self, unit: Unit) -> None:
        """A unit's forward begins."""
        position = len(self._now)
        self._known = self._known and position < len(self._recorded) and self._recorded[position] is unit
        self._now.append(unit)
        if not self._known:
            self._compare(position, unit.number)

    def end(self) -> None:
        """The forward of the pass has ended."""
        if not self._known or len(self._now) != len(self._recorded):
            self._compare(len(self._now), _END)
        self._recorded = list(self._now)

    def following(self, count: int) -> list[Unit]:
        """The units whose forward comes next."""
        return self._recorded[len(self._now) : len(self._now) + count] if self._known else []

    def preceding(self, unit: Unit, count: int) -> list[Unit]:
        """The units whose backward comes next:

        those that ended their forward before this one, the last of them first.
        """
        for position in range(len(self.ended) - 1, -1, -1):
            if self.ended[position] is unit:
                return self.ended[max(position - count, 0) : position][::-1]
        return []

    def left(self, unit: Unit) -> None:
        """A unit's backward has ended: it and what ended after it is not waited for any more."""
        for position in range(len(self.ended) - 1, -1, -1):
            if self.ended[position] is unit:
                del self.ended[position]
                return

    def _compare(self, position: int, number: int) -> None:
        """Ask every rank which unit it runs here."""
        ranks = dist.get_world_size(self._group)
        if ranks == 1:
            return
        own = torch.tensor([position, number], dtype=torch.int64, device=self._device)
        found = [torch.empty_like(own) for _ in range(ranks)]
        try:
            dist.all_gather(found, own, group=self._group)
        except RuntimeError as error:
            raise OrderError(
                f"rank {dist.get_rank()} runs {self._title(number)} at position {position} of its forward, which "
                "differs from the order it ran before, and the other ranks do not: every rank must run the same units in the "
                "same order"
            ) from error
        answers = [tuple(each.tolist()) for each in found]
        if len(set(answers)) > 1:
            said = "; ".join(
                f"rank {dist.get_global_rank(self._group, rank)} runs {self._title(unit)} at position {where}"
                for rank, (where, unit) in enumerate(answers)
            )
            raise OrderError(f"ranks run units in different orders: {said}. Every rank must run the same units")

    def _title(self, number: int) -> str:
        return "nothing more" if number == _END else self._units[number].title
