"""The whole trade-off of a step: budget against time, every point proven, and what one more GiB would buy."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from memfit.errors import InputError
from memfit.solve.milp import Status
from memfit.solve.solution import Problem, Solved, minimum_budget_bytes, solve
from memfit.text import PrintedResult
from memfit.units import display_budget, parse_bytes

_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The best plan for one budget. `price_ms_per_gib` is what one more GiB would gain, up to the next point."""

    budget_bytes: int
    peak_bytes: int
    step_ms: float
    recompute_ms: float
    status: Status
    gap: float
    price_ms_per_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(PrintedResult):
    """Points by growing budget, from the smallest that can be met to the one that needs nothing."""

    points: tuple[CurvePoint, ...]
    baseline_bytes: int
    baseline_ms: float

    @property
    def minimum_budget_bytes(self) -> int:
        """The smallest budget that can be met."""
        return self.points[0].budget_bytes

    def price_ms_per_gib(self, budget: str | int) -> float:
        """Return what one more GiB would buy at this budget, in bytes or as `"10GiB"`."""
        budget_bytes = parse_bytes(budget)
        if budget_bytes < self.minimum_budget_bytes:
            raise InputError(
                f"no plan meets {budget_bytes} bytes; the curve begins at {self.minimum_budget_bytes} "
                f"({display_budget(self.minimum_budget_bytes)})"
            )
        return next(point for point in reversed(self.points) if point.budget_bytes <= budget_bytes).price_ms_per_gib

    def __rich__(self) -> RenderableType:
        from memfit.report import curve_report

        return curve_report(self)

    def __repr__(self) -> str:
        from memfit.report import describe_curve

        return f"Curve({describe_curve(self)}; points: {len(self.points)})"


def check_points(points: object) -> None:
    """Refuse a curve of fewer than two points."""
    if isinstance(points, bool) or not isinstance(points, numbers.Integral):
        raise InputError(f"points is {points!r}; write how many budgets to solve, a whole number of at least 2")
    if points < 2:
        raise InputError(f"{points} points make no curve; give 2 or more")


def build_curve(
    problem: Problem,
    *,
    points: int = 16,
    budgets: Sequence[int] | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Curve:
    """Return the curve of a step, evenly spread over the budgets that matter unless budgets are given.

    Solved from the tightest budget upwards: a plan for one budget is a first answer for the next. `watch` hears how
    many points are done, of how many.
    """
    if budgets is None:
        check_points(points)
    least, most = minimum_budget_bytes(problem), problem.baseline_bytes
    if least is None:
        raise InputError("no plan was found within the time limit; give more time")
    if budgets is None:
        budgets = [least + (most - least) * place // (points - 1) for place in range(points)]
    budgets = sorted({max(least, min(budget, most)) for budget in budgets})
    base_ms = problem.runtime.total_ms + problem.exposed_ms
    found: list[Solved] = []
    start = None
    for number, budget in enumerate(budgets):
        solved = solve(problem, budget, start=start)
        start = solved.choice
        found.append(solved)
        if watch is not None:
            watch(number + 1, len(budgets))
    made = []
    for solved, later in zip(found, [*found[1:], None], strict=True):
        price = 0.0
        if later is not None and later.budget_bytes > solved.budget_bytes:
            gained = solved.recompute_ms - later.recompute_ms
            price = gained / ((later.budget_bytes - solved.budget_bytes) / _GIB)
        made.append(
            CurvePoint(
                budget_bytes=solved.budget_bytes,
                peak_bytes=solved.replay.peak_bytes if solved.replay else 0,
                step_ms=base_ms + solved.recompute_ms,
                recompute_ms=solved.recompute_ms,
                status=solved.status,
                gap=solved.gap,
                price_ms_per_gib=price,
            )
        )
    return Curve(points=tuple(made), baseline_bytes=most, baseline_ms=base_ms)
