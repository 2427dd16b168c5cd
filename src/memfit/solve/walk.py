"""The best plan of a walk: what was dropped and spent so far, place by place, with a proof.

Note [Walk]: a label is the bytes dropped and the time spent up to a place (Note [Prefixes]). Of two labels at one place
the one with no more bytes and no less time goes; so does one whose time, with the least that the rest costs (Note
[Completion]), is above the best plan known. Where more than `width` labels are left, those with the least sums stay,
and the least sum that went is remembered: no plan that was lost is below it. A walk whose best plan is not above that
has proven it. Otherwise it is walked again, wider, and what it found lets more labels go.

Equal subtrees share the list of ways through them. It is used where enough is lacking for every way to be open; other
labels go through the subtree place by place.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memfit.solve.completion import Falling, completions
from memfit.solve.prefixes import Place
from memfit.solve.ways import Ways, WaysOf, undominated
from memfit.tradeoff.facts import Ints

WIDTHS = (64, 1024, 16384, 131072)
_MOST_LABELS = 1 << 24
"""As many labels a walk may keep for the way back, a few hundred MB."""
_SLACK = 1000.0
"""Picoseconds that rounding may make in the sums of a walk."""

Places = npt.NDArray[np.intp]
Picks = tuple[tuple[int, int], ...]
"""Candidates that are checkpointed, each with its policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """The best plan found and its time, None and infinite when there is none; no plan takes less than `bound`."""

    picks: Picks | None
    time: float
    bound: float


class _StoppedError(Exception):
    """The deadline passed, or there are more labels than a walk may keep."""


@dataclass(frozen=True, eq=False, slots=True)
class _Labels:
    """Labels at one place. `step` and `row` say where each is among the steps."""

    freed: Ints
    time: Ints
    step: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]

    def part(self, kept: Places | npt.NDArray[np.bool_]) -> _Labels:
        return _Labels(self.freed[kept], self.time[kept], self.step[kept], self.row[kept])


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """Labels that took a place: from which label of which step each came, and by which policy or which of the ways."""

    place: Place
    ways: Ways | None
    step: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    taken: npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class _Walker:
    places: tuple[Place, ...]
    deadline: float
    first: Falling = field(init=False)
    after: dict[int, Falling] = field(init=False)
    ways_of: WaysOf = field(default_factory=WaysOf)
    steps: list[_Step] = field(default_factory=list)
    kept: int = 0
    best: float = math.inf
    lost: float = math.inf
    width: int = 0

    def __post_init__(self) -> None:
        self.first, self.after = completions(self.places)

    def run(self, width: int) -> tuple[Picks, int] | None:
        """One walk with at most this many labels at each place."""
        self.width, self.lost, self.kept, self.steps = width, math.inf, 0, []
        zero, start = np.zeros(1, np.int64), np.zeros(1, np.int32)
        labels = _Labels(zero, zero, start - 1, start)
        for place in self.places:
            labels = self.through(place, labels)
            if not len(labels.time):
                return None
        last = int(labels.time.argmin())
        return self.picks(int(labels.step[last]), int(labels.row[last])), int(labels.time[last])

    def through(self, place: Place, labels: _Labels) -> _Labels:
        """The labels after a place."""
        if clock.perf_counter() > self.deadline or self.kept > _MOST_LABELS:
            raise _StoppedError
        ways = self.ways_of(place)
        if ways is None:
            return self.by_parts(place, labels)
        safe = labels.freed >= place.safe_bytes
        if not safe.any():
            return self.by_parts(place, labels)
        taken = self.taken(place, labels.part(safe), ways)
        return self.hopeful(place, [taken] if safe.all() else [taken, self.by_parts(place, labels.part(~safe))])

    def by_parts(self, place: Place, labels: _Labels) -> _Labels:
        """The place as a whole, or what is inside it."""
        found: list[_Labels] = [labels.part(np.zeros(0, np.intp))] if place.forced and place.opened else []
        if not place.forced:
            inner = labels.part(labels.freed >= place.open_bytes)
            for each in place.inside:
                inner = self.through(each, inner)
            found.append(inner.part(inner.freed >= place.need_bytes))
        if not place.opened:
            from_label, policy = np.nonzero(labels.freed[:, None] >= place.required_bytes)
            found.append(self.made(place, None, labels, from_label, policy, place.freed, place.time))
        return self.hopeful(place, found)

    def taken(self, place: Place, labels: _Labels, ways: Ways) -> _Labels:
        """Every way through a subtree in which no row stands."""
        from_label = np.repeat(np.arange(len(labels.time)), len(ways.time))
        way = np.tile(np.arange(len(ways.time)), len(labels.time))
        return self.made(place, ways, labels, from_label, way, ways.freed, ways.time)

    def made(
        self, place: Place, ways: Ways | None, labels: _Labels, from_label: Places, way: Places, freed: Ints, time: Ints
    ) -> _Labels:
        """New labels, and the step that remembers where they came from."""
        freed, time = labels.freed[from_label] + freed[way], labels.time[from_label] + time[way]
        kept = np.flatnonzero(time + self.after[place.index](freed) <= self.best + _SLACK)
        kept = kept[undominated(freed[kept], time[kept])]
        from_label = from_label[kept]
        self.steps.append(
            _Step(place, ways, labels.step[from_label], labels.row[from_label], way[kept].astype(np.int32))
        )
        self.kept += len(kept)
        step = np.full(len(kept), len(self.steps) - 1, np.int32)
        return _Labels(freed[kept], time[kept], step, np.arange(len(kept), dtype=np.int32))

    def hopeful(self, place: Place, found: list[_Labels]) -> _Labels:
        """Labels that no other one beats and that may still become the best plan, at most `width` of them."""
        labels = found[0]
        if len(found) > 1:
            labels = _Labels(
                np.concatenate([each.freed for each in found]),
                np.concatenate([each.time for each in found]),
                np.concatenate([each.step for each in found]),
                np.concatenate([each.row for each in found]),
            )
            labels = labels.part(undominated(labels.freed, labels.time))
        least = labels.time + self.after[place.index](labels.freed)
        open_still = least <= self.best + _SLACK
        if np.count_nonzero(open_still) > self.width:
            order = np.argsort(least, kind="stable")
            self.lost = min(self.lost, float(least[order[self.width]]) - _SLACK)
            return labels.part(np.sort(order[: self.width]))
        return labels.part(open_still)

    def picks(self, step: int, row: int) -> Picks:
        """The plan that a label stands for."""
        found: list[tuple[int, int]] = []
        while step >= 0:
            origin = self.steps[step]
            taken = int(origin.taken[row])
            if origin.ways is None:
                found.append((origin.place.index, taken))
            else:
                found += origin.ways.picks(taken, origin.place)
            step, row = int(origin.step[row]), int(origin.row[row])
        return tuple(sorted(found))


def _time_of(places: Sequence[Place], picks: dict[int, int]) -> int:
    """The time of a plan."""
    return sum(
        int(place.time[picks[place.index]]) if place.index in picks else _time_of(place.inside, picks)
        for place in places
    )


def best_of(
    places: tuple[Place, ...],
    *,
    gap: float = 0.0,
    deadline: float = math.inf,
    widths: Sequence[int] = WIDTHS,
    start: Picks | None = None,
    watch: Callable[[float, float], None] | None = None,
) -> Walked:
    """The best plan of a walk, proven unless that needs more labels than the widest walk has, or more time.

    Times are in picoseconds. `start` is a plan that holds the rows: what cannot beat it is not looked at. `watch` hears
    of the best time and the bound after each walk.
    """
    walker = _Walker(places, deadline)
    bound = float(walker.first(np.zeros(1, np.int64))[0])
    picks = start
    if start is not None:
        walker.best = float(_time_of(places, dict(start)))
    for width in widths:
        try:
            found = walker.run(width)
        except _StoppedError:
            break
        if found is not None and found[1] < walker.best:
            picks, walker.best = found[0], float(found[1])
        bound = max(bound, min(walker.lost, walker.best))
        if watch is not None:
            watch(walker.best, bound)
        if walker.lost >= walker.best - gap * bound:
            break
    return Walked(picks=picks, time=walker.best, bound=min(bound, walker.best))
