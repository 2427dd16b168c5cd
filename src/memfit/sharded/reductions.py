"""The reductions of one backward: begun unit by unit, and finished while other units' backwards run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.sharded.comm import ShardComm, Transfer
from memfit.sharded.unit import ShardedUnit

_ASKED = "all-reduce of which parameters were used in backward"


class Reductions:
    """Which units still owe a reduction in this backward, and whose is under way."""

    def __init__(self, units: Sequence[ShardedUnit], links: Sequence[ShardComm], device: torch.device) -> None:
        self._units = units
        self._links = links
        self._owing: set[ShardedUnit] = set()
        self._under_way: list[ShardedUnit] = []
        self._all_came = torch.ones(sum(len(flat.parameters) for unit in units for flat in unit.flats), device=device)

    def expect(self, unit: ShardedUnit) -> None:
        """Note that a unit's backward has begun: it owes a reduction, also where this rank gets no gradient."""
        self._owing.add(unit)

    def begin(self, unit: ShardedUnit) -> None:
        """Begin to reduce the gradients of a unit whose backward has ended."""
        self._owing.discard(unit)
        if unit.begin_reductions(everything=True):
            self._advance()
            self._under_way.append(unit)

    def finish(self, units: Sequence[ShardedUnit]) -> None:
        """Reduce what is left of these units, wait for all, and agree on which parameters got a gradient."""
        for unit in units:
            if unit.begin_reductions(everything=unit in self._owing) and unit not in self._under_way:
                self._under_way.append(unit)
        came, asked = self._ask_which_came()
        while self._under_way:
            self._advance()
        self._resolve_unused(came, asked)

    def forget(self) -> None:
        """Forget this backward."""
        self._owing.clear()
        self._under_way.clear()

    def _advance(self) -> None:
        """Advance the reductions of earlier units by one stage, which overlaps another unit's backward."""
        self._under_way = [unit for unit in self._under_way if not unit.advance_reductions()]

    def _ask_which_came(self) -> tuple[torch.Tensor, Transfer]:
        """Begin to count on how many ranks each parameter had a gradient, while gradients are still being reduced."""
        flags = [each for unit in self._units for gradients in unit.gradients for each in gradients.came()]
        came = self._all_came.clone()
        if not all(flags):
            came.copy_(torch.tensor(flags))
        return came, self._links[0].all_reduce(came, _ASKED)

    def _resolve_unused(self, came: torch.Tensor, asked: Transfer) -> None:
        """Give parameters that got no gradient on this rank those of other ranks; what no rank used gets none."""
        asked.wait()
        for link in self._links[1:]:
            link.all_reduce(came, _ASKED).wait()
        every = [gradients for unit in self._units for gradients in unit.gradients]
        used = iter((came > 0).tolist() if any(gradients.misses for gradients in every) else [])
        for gradients in every:
            gradients.resolve([next(used, True) for _ in gradients.flat.parameters])
