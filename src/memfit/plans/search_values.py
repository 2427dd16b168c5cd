"""Values that were given: few are tried one after the other, many are compared by bounds.

Note [Bounds]: of many values only those that may be an answer get a plan. The traces of all of them follow from a few
captures (`search_captures.py`), and with each its time and peak without a plan. From a value to a larger one all
storages and times grow, and what the larger one must recompute is recomputed at the smaller one for less. So

- the largest that fits lies between neighbours of which one has a smallest budget within the budget and the other one
  above it; two smallest budgets make a line, which says where to look next;
- a step takes at least its time without a plan and what a smaller value is proven to add. Where that makes a value
  slower than the best so far, it needs no plan. Of those that are left the middle one is solved next, which tells of
  all above it. Frontiers are thinned out, by other policies at other values, so the part `_SURE` of a bound is taken.

A value that fits as it is takes as long as it is known to without a plan. The caching allocator is asked about the best
of them; where it has room for one, it has for smaller ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

from memfit.memory import find_room
from memfit.plans.search_result import SearchPoint
from memfit.plans.search_trials import Trials, merit, prove_the_fastest
from memfit.solve import Problem, Solved, minimum_budget_bytes, solve

_MANY = 5
"""From so many given values on, they are compared by bounds."""
_SURE = 0.9
"""The part of what a smaller value adds that a larger one is taken to add at least."""


def try_values(trials: Trials, values: list[int]) -> None:
    """Try the values in growing order, until one does not fit; many of them by bounds, where their traces scale."""
    if len(values) >= _MANY and trials.over != "ranks":
        trials.loose = True
        trials.prepare(values)
        if not trials.options.force and all(map(trials.captures.knows, values)):
            bounds = _Bounds(trials=trials, values=values)
            if bounds.counted:
                bounds.run()
                return
    try_in_order(trials, values)


def try_in_order(trials: Trials, values: list[int], *, all_of_them: bool = False) -> None:
    """Try one value after the other, until one does not fit unless all are asked for."""
    for place, value in enumerate(values):
        if not trials.fits(value) and not all_of_them and trials.refused is None:
            _note_left(trials, values[place + 1 :], value)
            break
    if trials.loose:
        prove_the_fastest(trials)


def _note_left(trials: Trials, left: list[int], value: int) -> None:
    if left:
        shown = ", ".join(map(str, left[:4])) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        trials.notes.append(f"{shown} not tried: {trials.over} {value} does not fit")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """A value without a plan."""

    base_ms: float
    peak_bytes: int
    amount: int


@dataclass(kw_only=True)
class _Bounds:
    """Compares values by bounds (Note [Bounds])."""

    trials: Trials
    values: list[int]
    wholes: dict[int, _Whole] = field(default_factory=dict)
    added_ms: dict[int, float] = field(default_factory=dict)
    """What the plan of a value is proven to add at least, where that is known."""
    least_bytes: dict[int, int] = field(default_factory=dict)
    """The smallest budgets that are known."""
    slower: set[int] = field(default_factory=set)
    """Values that were solved and cannot be the best."""
    roomy: int = 0
    """The largest value that fits as it is, and for which the caching allocator has room."""
    problems: dict[int, Problem] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allowed_bytes = self.trials.allowed_bytes(self.trials.target)
        self.counted = True
        with self.trials.working(f"{self.trials.over} {self.values[0]} to {self.values[-1]}: without a plan"):
            for value in self.values:
                problem, amount = self.trials.problem(value)
                self.problems[value] = problem
                if amount is None:
                    self.counted = False
                    return
                base_ms = problem.runtime.total_ms + problem.exposed_ms
                whole = _Whole(base_ms=base_ms, peak_bytes=problem.replay(()).peak_bytes, amount=amount)
                self.wholes[value] = whole

    def run(self) -> None:
        """Find the largest value that fits and the fastest, and make a point of every value up to the next one."""
        place = self._largest_place()
        able = self.values[: place + 1]
        for value in self.values[place + 1 :]:
            if value in self.least_bytes:
                self.trials.add(self._infeasible(value))
        if able:
            self._find_best(able)
            if able[-1] not in self.trials.points:
                self._settle(able[-1], (False, 0.0))
            for value in able:
                if value not in self.trials.points:
                    self.trials.add(self._without_plan(value))
        untried = [value for value in self.values if value not in self.trials.points]
        if untried:
            _note_left(self.trials, untried, self.values[place + 1])

    # -- the largest that fits --------------------------------------------------------------------------------------

    def _largest_place(self) -> int:
        """Return the place of the largest value that fits, -1 where none does."""
        low, high, turn = -1, len(self.values), 0
        while low + 1 < high and self.wholes[self.values[low + 1]].peak_bytes <= self.allowed_bytes:
            low += 1
        place = high - 1
        while high - low > 1:
            if self._fits(self.values[place]):
                low = place
            else:
                high = place
            turn += 1
            place = min(max(self._guess(low, high, turn), low + 1), high - 1)
        return low

    def _guess(self, low: int, high: int, turn: int) -> int:
        """Return the place of the value at which a line through two smallest budgets meets the budget; or half way."""
        needs = sorted(self.least_bytes.items(), key=lambda each: abs(each[1] - self.allowed_bytes))[:2]
        (first, less), (second, more) = sorted(needs) if len(needs) > 1 else ((0, 0), needs[0])
        if turn % 3 == 0 or more <= less:
            return (low + high) // 2
        wanted = first + (self.allowed_bytes - less) * (second - first) / (more - less)
        return sum(value <= wanted for value in self.values) - 1

    def _fits(self, value: int) -> bool:
        if self.wholes[value].peak_bytes <= self.allowed_bytes:
            return True
        with self.trials.working(f"{self.trials.over} {value}: the smallest budget"):
            problem = self.problems[value]
            least = minimum_budget_bytes(problem)
            if least is None or least <= self.allowed_bytes:
                found = solve(problem, self.allowed_bytes)
                self.added_ms[value] = found.bound_ms
                if found.replay is None:
                    least = max(self.allowed_bytes + 1, found.minimum_budget_bytes or 0)
                elif least is None:
                    least = self.allowed_bytes
        self.least_bytes[value] = least
        return least <= self.allowed_bytes

    # -- the fastest ------------------------------------------------------------------------------------------------

    def _find_best(self, able: list[int]) -> None:
        """Settle the values that may be the fastest."""
        while True:
            settled = [point for point in self.trials.points.values() if point.fits]
            best = max(map(merit, settled), default=(False, -1.0))
            may = [value for value in able if value not in self.trials.points and value not in self.slower]
            may = [value for value in may if (True, self._most_per_s(value)) > best]
            if not may:
                return
            plain = [value for value in may if self.wholes[value].peak_bytes <= self.allowed_bytes]
            if plain:
                self._settle(max(plain, key=self._most_per_s), best)
                continue
            value = may[len(may) // 2]
            problem = self.problems[value]
            for limits in (self.trials.loose_limits, self.trials.options.limits):
                with self.trials.working(f"{self.trials.over} {value}: planning"):
                    solved = solve(problem.with_limits(limits), self.allowed_bytes)
                self.added_ms[value] = solved.bound_ms
                if (True, self._most_per_s(value)) <= best:
                    self.slower.add(value)
                    break
            else:
                self._settle(value, best, solved)

    def _most_per_s(self, value: int) -> float:
        """Return the highest throughput that a value may have."""
        return self.wholes[value].amount * self.trials.target.ranks * 1e3 / self._least_ms(value)

    def _least_ms(self, value: int) -> float:
        """Return the least that the step of a value takes."""
        whole = self.wholes[value]
        if whole.peak_bytes <= self.allowed_bytes:
            return whole.base_ms + self.added_ms.get(value, 0.0)
        below = [added_ms for each, added_ms in self.added_ms.items() if each < value]
        return whole.base_ms + max(self.added_ms.get(value, 0.0), _SURE * max(below, default=0.0))

    def _settle(self, value: int, best: tuple[bool, float], solved: Solved | None = None) -> None:
        """Plan a value to the end, as long as it may be better than the best.

        One that fits as it is, with room for the caching allocator, needs no plan.
        """
        problem, whole = self.problems[value], self.wholes[value]
        if whole.peak_bytes <= self.allowed_bytes:
            replay = problem.replay(())
            with self.trials.working(f"{self.trials.over} {value}: simulating the caching allocator"):
                enough, _ = find_room(self.trials.target, replay)
            if enough is not None:
                self.roomy = max(self.roomy, value)
                self.trials.add(self._plain(value, enough.reserved_bytes))
                return
        most_ms = math.inf
        if best[0]:
            most_ms = whole.amount * self.trials.target.ranks * 1e3 / best[1] - whole.base_ms
        if self.trials.settle(value, problem, whole.amount, solved=solved, most_ms=most_ms) is None:
            self.added_ms[value] = most_ms
            self.slower.add(value)

    # -- points -----------------------------------------------------------------------------------------------------

    def _without_plan(self, value: int) -> SearchPoint:
        """Return the point of a value that fits and is not settled: it cannot be the best."""
        if value < self.roomy:
            return self._plain(value, None)
        make = partial(self._point, value, status="slower")
        return make(least_step_ms=self._least_ms(value), most_per_s=self._most_per_s(value))

    def _plain(self, value: int, reserved_bytes: int | None) -> SearchPoint:
        whole = self.wholes[value]
        return self._point(
            value,
            status="optimal",
            gap=0.0,
            peak_bytes=whole.peak_bytes,
            peak_reserved_bytes=reserved_bytes,
            step_ms=whole.base_ms,
            recompute_ms=0.0,
            throughput_per_s=self._most_per_s(value),
        )

    def _infeasible(self, value: int) -> SearchPoint:
        return self._point(value, status="infeasible")

    def _point(self, value: int, **fields: object) -> SearchPoint:
        return SearchPoint(
            value=value,
            allowed_bytes=self.allowed_bytes,
            budget_bytes=self.allowed_bytes,
            baseline_peak_bytes=self.wholes[value].peak_bytes,
            minimum_budget_bytes=self.least_bytes.get(value),
            ranks=self.trials.target.ranks,
            **fields,  # type: ignore[arg-type]
        )
