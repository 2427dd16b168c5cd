"""The convex hull of a unit's frontier, found however many choices there are.

Note [Hull]: for a price of time per byte every choice decides for itself, so the best state of every stage is a
sum, whatever the number of choices. Asking at the slopes between the points found so far finds every corner of
the frontier's convex hull.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.tradeoff.choices import Choices, Stage
from memfit.tradeoff.facts import Flags, Ints, Times


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy by its stage and the groups it saves there; time is in picoseconds."""

    discarded_bytes: int
    time: int
    ops: int
    stage: Stage
    saved: frozenset[int]


def lower_hull(x: Ints | Times, y: Ints | Times) -> Ints:
    """The corners of the convex hull below points that are sorted by x."""
    corners: list[int] = []
    xs, ys = x.tolist(), y.tolist()
    for i in range(len(xs)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (ys[b] - ys[a]) * (xs[i] - xs[a]) < (ys[i] - ys[a]) * (xs[b] - xs[a]):
                break
            corners.pop()
        corners.append(i)
    return np.array(corners, np.int64)


class _Prices:
    """The best policy for a price (Note [Hull])."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        stages = choices.stages
        self.potential = np.array([stage.potential_bytes for stage in stages], np.int64)
        self.time = np.array([stage.time for stage in stages], np.float64)
        self.settled = np.array([stage.settled for stage in stages], np.int64)
        own = [(number, choice) for number, stage in enumerate(stages) for choice in stage.own]
        self.own_stage = np.array([number for number, _ in own], np.int64)
        every = [*choices.settled, *(choice for _, choice in own)]
        self.groups = np.array([choice.group for choice in every], np.int64)
        self.lost = np.array([choice.lost_bytes for choice in every], np.int64)
        self.spent = np.array([choice.time for choice in every], np.int64)
        self.ops = np.array([choice.ops for choice in every], np.int64)

    def most(self) -> Candidate:
        """The policy that discards the most; all choices run again."""
        totals = self._totals(self.spent)
        highest = self.potential == self.potential.max()
        number = int(np.where(highest, totals, np.inf).argmin())
        return self._candidate(number, np.zeros(len(self.lost), bool))

    def best(self, price: float) -> Candidate:
        """The policy with the least time less price times bytes."""
        saved = price * self.lost < self.spent
        totals = self._totals(np.where(saved, price * self.lost, self.spent))
        return self._candidate(int((totals - price * self.potential).argmin()), saved)

    def _totals(self, costs: NDArray[Any]) -> Times:
        """The time of each stage with what its choices cost."""
        count = len(self.choices.settled)
        settled = np.concatenate(([0.0], np.cumsum(costs[:count], dtype=np.float64)))
        totals: Times = self.time + settled[self.settled]
        np.add.at(totals, self.own_stage, costs[count:])
        return totals

    def _candidate(self, number: int, saved: Flags) -> Candidate:
        stage = self.choices.stages[number]
        of_stage = np.zeros(len(saved), bool)
        of_stage[: stage.settled] = True
        of_stage[len(self.choices.settled) :] = self.own_stage == number
        saved = saved & of_stage
        return Candidate(
            stage.potential_bytes - int(self.lost[saved].sum()),
            stage.time + int(self.spent[of_stage & ~saved].sum()),
            stage.ops + int(self.ops[saved].sum()),
            stage,
            frozenset(self.groups[saved].tolist()),
        )


def hull_corners(choices: Choices) -> list[Candidate]:
    """The corners of the frontier's lower convex hull, without the policy that does nothing."""
    if not choices.stages:
        return []
    prices = _Prices(choices)
    most = prices.most()
    if most.discarded_bytes <= 0:
        return []
    found: dict[tuple[int, int], Candidate] = {(most.discarded_bytes, most.time): most}
    spans = [((0, 0), (most.discarded_bytes, most.time))]
    while spans:
        low, high = spans.pop()
        if high[1] <= low[1]:
            continue
        corner = prices.best((high[1] - low[1]) / (high[0] - low[0]))
        point = (corner.discarded_bytes, corner.time)
        below = (point[1] - low[1]) * (high[0] - low[0]) < (high[1] - low[1]) * (point[0] - low[0])
        if below and low[0] < point[0] < high[0]:
            found[point] = corner
            spans += [(low, point), (point, high)]
    return sorted(found.values(), key=lambda corner: corner.discarded_bytes)
