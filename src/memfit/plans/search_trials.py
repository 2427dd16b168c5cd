"""The values that a search has tried: each with its trace, its problem, and the fastest plan that fits.

Note [Proofs last]: most of the time of a solve goes into the proof that no plan is faster by a thousandth. While values
are compared, a plan that is proven to add at most `_LOOSE_GAP` more than the least is enough. The best of them is then
solved to the end, and so is every other that might be faster yet. Few values that are given are all solved to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from memfit.capture import Step, Trace, no_garbage_collection, trace
from memfit.cost import Cost, Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.plans.joint import waits_for_gathers
from memfit.plans.reservation import Reservation, Room, reservation_under, with_room
from memfit.plans.resolve import find_cast, find_gathered_cast, resolve_cost
from memfit.plans.search_arguments import count_samples
from memfit.plans.search_captures import SearchCaptures
from memfit.plans.search_result import Over, PointStatus, SearchPoint
from memfit.progress import Progress
from memfit.solve import Limits, Problem, Solved, SolveOptions, Status, minimum_budget_bytes, solve

MakeStep = Callable[[int], Step | Trace]
Watch = Callable[[SearchPoint], None]

_LOOSE_GAP = 0.01
"""Of the time that a plan adds, while values are compared (Note [Proofs last])."""
_DEGREE = {"batch": 1, "seq": 2}
_PROVEN = 4
"""How many values are solved to the end at most, of those that may be the best."""
_AS_GIVEN = (
    "units are gathered as given; compute waits for that, and memfit.plan may find a faster way (reshard, prefetch)"
)
_STATUS: dict[Status, PointStatus] = {
    Status.OPTIMAL: "optimal",
    Status.FEASIBLE: "feasible",
    Status.INFEASIBLE: "infeasible",
}


@dataclass(kw_only=True)
class Trials:
    """The values that were tried. A value that cannot be made into a step ends the values, unless it is the first."""

    make_step: MakeStep | Step | Trace
    over: Over
    target: Target
    budget_bytes: int
    lowers: bool
    """Whether the budget is memfit's own, which leaves the caching allocator its room."""
    cost: Cost | str | None
    options: SolveOptions
    show: bool
    watch: Watch | None = None
    loose: bool = False
    """Whether plans need not be proven yet (Note [Proofs last])."""
    points: dict[int, SearchPoint] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: int | None = None
    refusal: str = ""
    captures: SearchCaptures = field(init=False)
    _captured: dict[bool, Trace] = field(default_factory=dict)
    """The last trace of a step, on one rank and on several."""
    _amounts: dict[int, int | None] = field(default_factory=dict)
    """The samples or tokens of the steps that were made, by value."""
    _fastest: tuple[int, Problem, int | None] | None = None
    """The value with the highest throughput so far, its problem and the samples or tokens of its step."""

    def __post_init__(self) -> None:
        self.captures = SearchCaptures(capture=self._capture, degree=_DEGREE.get(self.over, 1))
        self.captures.off = self.over not in _DEGREE

    def confirm(self) -> bool:
        """Check the traces that were not captured with a capture of the largest value, or of the best.

        Returns False where it differs: what was found with such traces is forgotten, and to be tried again.
        """
        able = [point for point in self.points.values() if point.fits]
        best = max(able, key=lambda point: (*merit(point), -point.value), default=None)
        largest = max((point.value for point in able), default=None)
        wanted = [] if best is None or largest is None else list(dict.fromkeys((largest, best.value)))
        with self.working(f"{self.over} {' and '.join(map(str, wanted))}: checking the traces"):
            if self.captures.confirm(wanted):
                return True
        for value in self.captures.give_up():
            self.points.pop(value, None)
        self._fastest = None
        return False

    def at(self, value: int) -> SearchPoint | None:
        """Return the point of a value, None when there is no step for it."""
        if value in self.points:
            return self.points[value]
        if self.refused is not None and value >= self.refused:
            return None
        try:
            with self.working(f"{self.over} {value}: capturing and planning") as say, no_garbage_collection():
                self._try(value, say)
        except InputError as error:
            if not self.points:
                raise
            self.refused, self.refusal = value, str(error).splitlines()[0]
            return None
        return self._hear(value)

    def prove(self, value: int) -> SearchPoint:
        """Solve a value that was tried to the end."""
        with self.working(f"{self.over} {value}: proving that no plan is faster") as say:
            if self._fastest is None or self._fastest[0] != value:
                self._fastest = (value, *self.problem(value))
            point = self._point(value, *self._fastest[1:], self.options.limits, say)
        assert point is not None
        self.points[value] = point
        return self._hear(value)

    def settle(
        self, value: int, problem: Problem, amount: int | None, *, solved: Solved | None, most_ms: float
    ) -> SearchPoint | None:
        """Try a value whose problem is there, and perhaps its plan with the whole budget, to the end.

        Returns None where the caching allocator has room only for plans that add `most_ms` or more.
        """
        with self.working(f"{self.over} {value}: planning") as say:
            point = self._point(value, problem, amount, self.options.limits, say, solved=solved, most_ms=most_ms)
        if point is None:
            return None
        self.points[value] = point
        return self._hear(value)

    def add(self, point: SearchPoint) -> None:
        """Take a point that needs no plan."""
        self.points[point.value] = point
        self._hear(point.value)

    @property
    def loose_limits(self) -> Limits:
        """The limits of a solve while values are compared (Note [Proofs last])."""
        given = self.options.limits
        return replace(given, gap=max(given.gap, _LOOSE_GAP))

    def allowed_bytes(self, target: Target) -> int:
        """Return what a rank of a value may use."""
        return min(self.budget_bytes, target.usable_bytes) if self.lowers else self.budget_bytes

    def _hear(self, value: int) -> SearchPoint:
        if self.watch is not None:
            self.watch(self.points[value])
        return self.points[value]

    def fits(self, value: int) -> bool:
        """Return whether a plan fits, for a value that has a step."""
        point = self.at(value)
        return point is not None and point.fits

    def _try(self, value: int, say: Callable[[str], None]) -> None:
        problem, amount = self.problem(value)
        limits = self.loose_limits if self.loose else self.options.limits
        say(f"{self.over} {value}: planning")
        point = self._point(value, problem, amount, limits, say)
        assert point is not None
        self.points[value] = point
        fastest = None if self._fastest is None else self.points[self._fastest[0]]
        if point.fits and (fastest is None or merit(point) > merit(fastest)):
            self._fastest = value, problem, amount

    def problem(self, value: int) -> tuple[Problem, int | None]:
        """Return the problem of a value, and the samples or tokens of one rank's step where they are known."""
        captured = self.captures.at(value)
        target, amount = self._target(value), self._amount(value)
        return Problem.of(Runtime.of(captured, resolve_cost(self.cost, target)), target, self.options), amount

    def _point(
        self,
        value: int,
        problem: Problem,
        amount: int | None,
        limits: Limits,
        say: Callable[[str], None],
        *,
        solved: Solved | None = None,
        most_ms: float = math.inf,
    ) -> SearchPoint | None:
        target = problem.target
        allowed_bytes = self.allowed_bytes(target)
        problem = problem.with_limits(limits)
        least_bytes = minimum_budget_bytes(problem)  # first: nothing below it is tried in vain
        solved = solve(problem, allowed_bytes) if solved is None else solved
        say(f"{self.over} {value}: simulating the caching allocator")
        if self.lowers:
            solved, reservation = with_room(problem, solved, most_ms=most_ms)
        else:
            reservation = reservation_under(problem, solved)
        point = SearchPoint(
            value=value,
            status=_STATUS.get(solved.status, "unknown"),
            allowed_bytes=allowed_bytes,
            budget_bytes=solved.budget_bytes,
            baseline_peak_bytes=problem.replay(()).peak_bytes,
            minimum_budget_bytes=least_bytes if least_bytes is not None else solved.minimum_budget_bytes,
            ranks=target.ranks,
        )
        if solved.replay is None:
            return point
        if reservation is None:
            return None
        decides = self.options.decide is None and {"reshard", "prefetch"} & {*self.options.decided}
        if decides and waits_for_gathers(problem) and _AS_GIVEN not in self.notes:
            self.notes.append(_AS_GIVEN)
        base_ms = problem.runtime.total_ms + problem.exposed_ms
        point = replace(point, gap=solved.gap)
        return _planned(point, solved.replay, reservation, base_ms, solved.recompute_ms, amount)

    def _amount(self, value: int) -> int | None:
        """Return the samples or tokens of one rank's step; None when they are not known."""
        if value in self._amounts:
            return self._amounts[value]
        made, amount = next(iter(self._amounts.items()))
        return None if amount is None else amount * value // made

    def _capture(self, value: int) -> Trace:
        made = self.make_step if isinstance(self.make_step, Step | Trace) else self.make_step(value)
        if not isinstance(made, Step | Trace):
            raise InputError(
                f"make_step({value}) returned a {type(made).__name__}, not a memfit.Step; write for example "
                f"lambda {self.over}: memfit.Step(model, memfit.spec(({self.over}, 512)), loss=...)"
            )
        amount = None
        if isinstance(made, Step):
            samples = value if self.over == "batch" else count_samples(made)
            if samples is not None:
                amount = samples * made.accumulation_steps * (value if self.over == "seq" else 1)
        elif self.over == "batch":
            amount = value
        self._amounts[value] = amount
        if isinstance(made, Trace):
            return made
        target = self._target(value)
        if isinstance(self.make_step, Step) and (known := self._captured.get(target.ranks > 1)) is not None:
            return known
        # cast as `plan` casts it, so that both find the same; on one rank nothing is cast
        options = self.options.shard
        captured = trace(made, target=self.target, cast=find_cast(made, target, options))
        cast = find_gathered_cast(captured, target, options)
        if cast is not None:
            captured = trace(made, target=self.target, cast=cast)
        self._captured[target.ranks > 1] = captured
        return captured

    def prepare(self, values: list[int]) -> None:
        """Capture what the traces of these values follow from, as far as there are steps."""
        with self.working(f"{self.over} {values[0]} to {values[-1]}: capturing what is between"), suppress(InputError):
            self.captures.prepare(values)

    def _target(self, value: int) -> Target:
        return Target.parse(self.target, ranks=value) if self.over == "ranks" else self.target

    @contextmanager
    def working(self, doing: str) -> Iterator[Callable[[str], None]]:
        """Show on the terminal what is being done; gives what changes the words."""
        fit = [each for each, point in self.points.items() if point.fits]
        so_far = f" ({len(self.points)} tried, up to {max(fit)} fits)" if fit else ""
        with Progress(f"{doing}{so_far}", show=self.show) as progress:
            yield lambda words: progress.update(f"{words}{so_far}")


def _planned(
    point: SearchPoint,
    replay: Timeline,
    reservation: Reservation,
    base_ms: float,
    recompute_ms: float,
    amount: int | None,
) -> SearchPoint:
    """Return the point of a plan that fits; `amount` are the samples or tokens of one rank's step."""
    step_ms = base_ms + recompute_ms
    return replace(
        point,
        peak_bytes=replay.peak_bytes,
        peak_reserved_bytes=reservation.reserved_bytes,
        with_care=reservation.room is not Room.ENOUGH,
        step_ms=step_ms,
        recompute_ms=recompute_ms,
        throughput_per_s=amount * point.ranks * 1e3 / step_ms if step_ms and amount is not None else None,
    )


def merit(point: SearchPoint) -> tuple[bool, float]:
    """Return the sort key of a point: whether it fits with room to spare, then its throughput."""
    return not point.with_care, point.throughput_per_s or 0.0


def prove_the_fastest(trials: Trials) -> None:
    """Solve the best to the end, and others while they may be faster (Note [Proofs last])."""
    proven: set[int] = set()
    for _ in range(_PROVEN):
        able = [point for point in trials.points.values() if point.fits and point.throughput_per_s]
        if not able:
            return
        best = max(able, key=lambda point: (*merit(point), -point.value))
        may = [point for point in able if _merit_at_most(point) > merit(best) or point is best]
        may = [point for point in may if point.value not in proven and point.gap]
        if not may:
            return
        value = best.value if best in may else max(may, key=_merit_at_most).value
        trials.prove(value)
        proven.add(value)


def _merit_at_most(point: SearchPoint) -> tuple[bool, float]:
    """Return the merit of a value as if its plan took as little time as is proven possible."""
    care, rate = merit(point)
    step_ms = point.step_ms or 0.0
    least_ms = step_ms - (point.recompute_ms or 0.0) * (point.gap or 0.0)
    return care, rate * step_ms / least_ms if least_ms > 0 else rate
