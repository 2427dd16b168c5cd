"""`search`: the best batch size, the longest sequence, what more ranks do; every value with its own fastest plan.

Note [Few captures]: every value is a capture, so few are tried. Up to where values fit is found by doubling, then by
drawing a line through what two values need (the smallest budget of a value grows almost evenly with it) and trying
where it meets the budget, halving every third time. It ends when neighbours on the grid differ. For the fastest batch
the same is done with the peak without a plan, where recomputing begins; powers of two are tried, which kernels like,
and the gaps beside the best are halved. Few batch sizes are all tried. What fits is taken to fit at smaller values too.
Throughput need not rise and fall once, so among many the best is the best of those tried. Where the largest fits only
with care (the caching allocator would hold more than the device has), the gap to the largest that needs none is halved.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from rich.console import Console
from torch.utils._pytree import tree_leaves

from memfit.cost import Cost, Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.plan.allocator import Room, held_under, with_room
from memfit.plan.given import TargetLike, cost_given, options_given, target_given
from memfit.plan.search_result import Over, PointStatus, Search, SearchPoint
from memfit.solve import Problem, SolveOptions, Status, minimum_budget_bytes, solve
from memfit.trace import Step, Trace, trace

MakeStep = Callable[[int], Step | Trace]

_GRID = {"batch": 1, "seq": 128}
_FIRST = {"batch": 1, "seq": 1024}
_LARGEST = {"batch": 1 << 16, "seq": 1 << 20, "ranks": 64}
_GROWTH = 8
_TRIES = 28
_ALL = 8
"""Batch sizes that are all tried when no more than these fit."""
_NEAR = 32
"""The best batch is known to one part of this many."""
_STATUS: dict[Status, PointStatus] = {
    Status.OPTIMAL: "optimal",
    Status.FEASIBLE: "feasible",
    Status.INFEASIBLE: "infeasible",
}


def search(
    make_step: MakeStep | Step | Trace,
    *,
    over: Over = "batch",
    target: TargetLike,
    ranks: int | None = None,
    budget: str | int | float | None = None,
    values: Iterable[int] | None = None,
    largest: int | None = None,
    cost: Cost | str | None = None,
    options: SolveOptions | None = None,
    progress: bool = True,
) -> Search:
    """The batch size with the highest throughput, the longest sequence, or what more ranks do, under a budget.

    `make_step(value)` gives the step of a value; over ranks a step alone will do. Without `values`, every batch size or
    every sequence length that 128 divides may be the answer, up to `largest`, and as few as needed are tried; ranks
    double. `values` are tried in order until one does not fit. Nothing that fits is an answer too: `best` is None.
    """
    given = _values(values)
    end = _largest(over, largest, given)
    aim = _aim(make_step, over, target, ranks)
    solver = options_given(options)
    if solver.optimizer:
        raise InputError("search keeps the optimizer's step as it is; leave optimizer=True out of its options")
    budget_bytes = min(aim.budget_bytes(budget), aim.usable_bytes)
    tries = _Tries(
        make_step=make_step,
        over=over,
        target=aim,
        budget_bytes=budget_bytes,
        lowers=budget is None,
        cost=cost,
        options=solver,
        show=progress,
    )
    grid = 0
    if given is not None:
        _in_order(tries, given)
    elif over == "ranks":
        _in_order(tries, [1 << power for power in range(end.bit_length())], all_of_them=True)
    else:
        grid = _GRID[over]
        _search_grid(tries, grid, end)
    if tries.refused is not None:
        tries.notes.append(f"there is no step for {over} {tries.refused}: {tries.refusal}")
    return Search(
        over=over,
        target=aim.device.title,
        ranks=None if over == "ranks" else aim.ranks,
        budget_bytes=budget_bytes,
        counts="tokens" if over == "seq" else "samples",
        grid=grid,
        refused=tries.refused,
        points=tuple(tries.points[value] for value in sorted(tries.points)),
        notes=tuple(tries.notes),
    )


@dataclass(kw_only=True)
class _Tries:
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
    points: dict[int, SearchPoint] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: int | None = None
    refusal: str = ""
    _captured: Trace | None = None

    def at(self, value: int) -> SearchPoint | None:
        """The point of a value, None when there is no step for it."""
        if value in self.points:
            return self.points[value]
        if self.refused is not None and value >= self.refused:
            return None
        try:
            with self._working(value):
                self.points[value] = self._point(value)
        except InputError as error:
            if not self.points:
                raise
            self.refused, self.refusal = value, str(error).splitlines()[0]
            return None
        return self.points[value]

    def fits(self, value: int) -> bool:
        """Whether a plan fits, for a value that has a step."""
        point = self.at(value)
        return point is not None and point.fits

    def _point(self, value: int) -> SearchPoint:
        captured, amount = self._capture(value)
        target = Target.parse(self.target, ranks=value) if self.over == "ranks" else self.target
        problem = Problem.of(Runtime.of(captured, cost_given(self.cost, target)), target, self.options)
        solved = solve(problem, self.budget_bytes)
        if self.lowers:
            solved = with_room(problem, solved)
        held = held_under(problem, solved)
        base_ms = problem.runtime.total_ms + problem.exposed_ms
        step_ms = None if solved.replay is None else base_ms + solved.recompute_ms
        rate = None
        if step_ms and amount is not None:
            rate = amount * target.ranks * 1e3 / step_ms
        return SearchPoint(
            value=value,
            status=_STATUS.get(solved.status, "unknown"),
            budget_bytes=solved.budget_bytes,
            gap=None if solved.replay is None else solved.gap,
            peak_bytes=None if solved.replay is None else solved.replay.peak_bytes,
            peak_reserved_bytes=None if held is None else held.reserved_bytes,
            with_care=held is not None and held.room is not Room.ENOUGH,
            step_ms=step_ms,
            recompute_ms=None if solved.replay is None else solved.recompute_ms,
            throughput_per_s=rate,
            baseline_peak_bytes=problem.baseline_bytes,
            minimum_budget_bytes=minimum_budget_bytes(problem),
            ranks=target.ranks,
        )

    def _capture(self, value: int) -> tuple[Trace, int | None]:
        """The trace of a value, and the samples or tokens of one rank's step; None when they are not known."""
        made = self.make_step if isinstance(self.make_step, Step | Trace) else self.make_step(value)
        if not isinstance(made, Step | Trace):
            raise InputError(
                f"make_step({value}) returned a {type(made).__name__}, not a memfit.Step; write for example "
                f"lambda {self.over}: memfit.Step(model, memfit.spec(({self.over}, 512)), loss=...)"
            )
        amount = None
        if isinstance(made, Step):
            samples = value if self.over == "batch" else _samples(made)
            if samples is not None:
                amount = samples * made.accumulation_steps * (value if self.over == "seq" else 1)
        elif self.over == "batch":
            amount = value
        if isinstance(made, Trace):
            return made, amount
        if isinstance(self.make_step, Step):
            self._captured = self._captured or trace(made, target=self.target)
            return self._captured, amount
        return trace(made, target=self.target), amount

    @contextmanager
    def _working(self, value: int) -> Iterator[None]:
        """Show on the terminal which value is being tried."""
        console = Console(stderr=True)
        if not (self.show and console.is_terminal):
            yield
            return
        fit = [each for each, point in self.points.items() if point.fits]
        so_far = f", {len(self.points)} tried, up to {max(fit)} fits" if fit else ""
        with console.status(f"{self.over} {value}: capturing and planning{so_far} …"):
            yield


def _in_order(tries: _Tries, values: list[int], *, all_of_them: bool = False) -> None:
    for place, value in enumerate(values):
        if not tries.fits(value) and not all_of_them and tries.refused is None:
            left = values[place + 1 :]
            if left:
                tries.notes.append(f"{_listed(left)} not tried: {tries.over} {value} does not fit")
            return


def _search_grid(tries: _Tries, grid: int, end: int) -> None:
    first = max(grid, min(_FIRST[tries.over], end // grid * grid))
    largest = _boundary(tries, first, grid, end // grid * grid, "minimum_budget_bytes")
    if largest is None:
        return
    if largest == end // grid * grid and tries.refused is None:
        tries.notes.append(f"the search ended at {tries.over} {largest}; largest= lets it go on")
    _without_care(tries, grid)
    if tries.over == "batch":
        _fastest(tries, largest)


def _without_care(tries: _Tries, grid: int) -> None:
    """Halve the gap between the largest value that needs no care and the next that does."""
    while len(tries.points) < _TRIES:
        fit = {value: point.with_care for value, point in tries.points.items() if point.fits}
        low = max((value for value, care in fit.items() if not care), default=0)
        high = min((value for value in fit if value > low), default=low)
        if high - low <= grid or tries.at((low + high) // 2 // grid * grid) is None:
            return


def _fastest(tries: _Tries, largest: int) -> None:
    """Try the batch sizes that may be the fastest of those that fit."""
    if largest > _ALL:
        _boundary(tries, 1, 1, largest, "baseline_peak_bytes")
    values = range(1, largest + 1) if largest <= _ALL else [1 << power for power in range(largest.bit_length())]
    for value in values:
        if len(tries.points) < _TRIES:
            tries.at(value)
    _narrow(tries)


def _boundary(
    tries: _Tries,
    first: int,
    grid: int,
    end: int,
    measure: Literal["minimum_budget_bytes", "baseline_peak_bytes"],
) -> int | None:
    """The largest value whose measure is within the budget, None when none is; see Note [Few captures]."""

    def within(value: int) -> bool:
        point = tries.at(value)
        if point is None or measure == "minimum_budget_bytes":
            return point is not None and point.fits
        return getattr(point, measure) <= tries.budget_bytes

    low, high = 0, end + grid  # of each, nothing is known but that the answer lies between
    known = sorted(tries.points)
    for value in known:
        if within(value):
            low = max(low, value)
    above = [value for value in known if value > low and not within(value)]
    high = min([high, *above])
    value = first if not known else _guess(tries, low, high, grid, measure, 0)
    turn = 0
    while high - low > grid and len(tries.points) < _TRIES:
        if within(value):
            low = max(low, value)
        else:
            high = min(high, value, *([] if tries.refused is None else [tries.refused]))
        turn += 1
        value = _guess(tries, low, high, grid, measure, turn if high <= end else 0)
    return low or None


def _guess(tries: _Tries, low: int, high: int, grid: int, measure: str, turn: int) -> int:
    """The next value to try, between two: where the line through two points meets the budget, or half way (turn 2)."""
    lowest, highest = low + grid, high - grid
    if low:
        highest = min(highest, low * _GROWTH)
    else:
        lowest = grid
    value = (low + high) // 2 if turn % 3 == 2 else None
    line = [(point.value, getattr(point, measure)) for point in tries.points.values()]
    line = sorted((at, needs) for at, needs in line if needs is not None)
    if value is None and len(line) > 1:
        near = sorted(line, key=lambda each: abs(each[1] - tries.budget_bytes))[:2]
        (first, needs), (second, more) = sorted(near)
        if more > needs:
            value = math.floor(first + (tries.budget_bytes - needs) * (second - first) / (more - needs))
    if value is None:
        value = 2 * low if low else high // 2
    return max(grid, min(max(value // grid * grid, lowest), max(highest, lowest)))


def _narrow(tries: _Tries) -> None:
    """Halve the gaps beside the fastest value, until they are narrow."""
    while len(tries.points) < _TRIES:
        able = sorted(value for value, point in tries.points.items() if point.fits and point.throughput_per_s)
        if not able:
            return
        place = max(range(len(able)), key=lambda index: (*_merit(tries.points[able[index]]), -index))
        best = able[place]
        beside = [each for each in (place - 1, place + 1) if 0 <= each < len(able)]
        gaps = [(abs(able[each] - best), able[each]) for each in beside]
        wide = [(gap, other) for gap, other in gaps if gap > max(1, best // _NEAR)]
        if not wide:
            return
        _, other = max(wide)
        if tries.at((best + other) // 2) is None:
            return


def _merit(point: SearchPoint) -> tuple[bool, float]:
    """What a better value has more of."""
    return not point.with_care, point.throughput_per_s or 0.0


def _aim(make_step: Any, over: Any, target: TargetLike, ranks: int | None) -> Target:
    if over not in get_args(Over):
        raise InputError(f"over is {over!r}; write 'batch', 'seq' or 'ranks'")
    if not callable(make_step) and not isinstance(make_step, Step | Trace):
        raise InputError(
            f"make_step is a {type(make_step).__name__}; give a function of a value that returns a memfit.Step, such "
            "as lambda batch: memfit.Step(model, memfit.spec((batch, 512)), loss=...)"
        )
    if isinstance(make_step, Step | Trace) and over != "ranks":
        raise InputError(
            f"a {type(make_step).__name__} has one {over}; give a function, lambda {over}: memfit.Step(...), that "
            f"makes the step of any"
        )
    if isinstance(make_step, torch.nn.Module):
        raise InputError("make_step is a model; give a function of a value that returns a memfit.Step")
    if over == "ranks" and ranks is not None:
        raise InputError(f"ranks={ranks} is what the search over ranks finds; leave it out, or give largest={ranks}")
    return target_given(make_step, target, ranks)


def _values(values: Iterable[int] | None) -> list[int] | None:
    if values is None:
        return None
    try:
        found = sorted(set(values))
    except TypeError as error:
        raise InputError(f"values is {values!r}; write whole numbers of at least 1, such as [1, 2, 4, 8]") from error
    if not found:
        raise InputError("values has nothing in it; write whole numbers of at least 1, such as [1, 2, 4, 8]")
    for value in found:
        _check_count("values has", value)
    return found


def _largest(over: Any, largest: int | None, values: list[int] | None) -> int:
    if largest is None:
        return _LARGEST.get(over, 1)
    if values is not None:
        raise InputError("values and largest were both given; the last of values is the largest, leave one out")
    _check_count("largest is", largest)
    grid = _GRID.get(over, 1)
    if largest < grid:
        raise InputError(f"largest is {largest}; sequences are searched in steps of {grid}: give more, or values")
    return largest


def _check_count(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InputError(f"{what} {value!r}; write whole numbers of at least 1")


def _samples(step: Step) -> int | None:
    """How many samples a batch has: the first size of its first tensor."""
    for leaf in tree_leaves(step.batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    return None


def _listed(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:4]))
    return shown if len(values) <= 4 else f"{shown} and {len(values) - 4} more"
