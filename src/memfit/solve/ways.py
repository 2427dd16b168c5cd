"""The ways through a unit and what is inside it when no row stands between, once for all equal ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memfit.solve.prefixes import Place
from memfit.tradeoff.facts import Ints

_MOST = 256
"""A subtree with more undominated ways than this is walked part by part."""


def undominated(freed: Ints, time: Ints) -> npt.NDArray[np.intp]:
    """Places of what nothing beats in bytes and time, by falling bytes; the first of equal ones."""
    order = np.argsort(-freed, kind="stable")  # one key: half the time of sorting by both
    by_bytes = time[order]
    kept = np.ones(len(order), bool)
    kept[1:] = by_bytes[1:] < np.minimum.accumulate(by_bytes)[:-1]
    order = order[kept]
    last = np.ones(len(order), bool)  # of equal bytes, the last that is kept has the least time
    last[:-1] = np.diff(freed[order]) != 0
    return order[last]


@dataclass(frozen=True, eq=False, slots=True)
class Ways:
    """Undominated ways by falling bytes. Each is the units that are checkpointed, as numbers in the order of ends."""

    freed: Ints
    time: Ints
    chosen: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, freed: Ints, time: Ints, chosen: list[tuple[tuple[int, int], ...]]) -> Ways:
        kept = undominated(freed, time)
        return cls(freed[kept], time[kept], tuple(chosen[place] for place in kept.tolist()))

    def picks(self, way: int, place: Place) -> list[tuple[int, int]]:
        """A way through this place: the candidates that are checkpointed, each with its policy."""
        indices = [each.index for each in _by_end(place)]
        return [(indices[number], policy) for number, policy in self.chosen[way]]


@dataclass(eq=False, slots=True)
class WaysOf:
    """The ways through places, None where there are too many to list."""

    known: dict[int, Ways | None] = field(default_factory=dict)

    def __call__(self, place: Place) -> Ways | None:
        if place.kind not in self.known:
            self.known[place.kind] = self._ways(place)
        return self.known[place.kind]

    def _ways(self, place: Place) -> Ways | None:
        inner = None if place.forced else self._inside(place)
        if inner is None and not place.forced:
            return None
        freed, time = np.zeros(0, np.int64), np.zeros(0, np.int64)
        chosen: list[tuple[tuple[int, int], ...]] = []
        if inner is not None:
            freed, time, chosen = inner.freed, inner.time, list(inner.chosen)
        if not place.opened:
            own = sum(1 for _ in _by_end(place)) - 1
            freed, time = np.concatenate((freed, place.freed)), np.concatenate((time, place.time))
            chosen += [((own, policy),) for policy in range(len(place.time))]
        return Ways.of(freed, time, chosen)

    def _inside(self, place: Place) -> Ways | None:
        zero = np.zeros(1, np.int64)
        ways, units = Ways(zero, zero, ((),)), 0
        for each in place.inside:
            more = self(each)
            if more is None:
                return None
            freed = (ways.freed[:, None] + more.freed).ravel()
            time = (ways.time[:, None] + more.time).ravel()
            kept = undominated(freed, time)
            if len(kept) > _MOST:
                return None
            one, other = np.divmod(kept, len(more.time))
            chosen = tuple(
                (*ways.chosen[i], *((units + number, policy) for number, policy in more.chosen[j]))
                for i, j in zip(one.tolist(), other.tolist(), strict=True)
            )
            ways = Ways(freed[kept], time[kept], chosen)
            units += sum(1 for _ in _by_end(each))
        return ways


def _by_end(place: Place) -> Iterator[Place]:
    """A place and those inside it, by their ends."""
    for each in place.inside:
        yield from _by_end(each)
    yield place
