"""The best batch size and the longest sequence of all there are, by trying few.

Note [Few captures]: up to where values fit is found by growing eightfold, then by drawing a line through what two
values need (the smallest budget of a value grows almost evenly with it) and trying where it meets the budget, halving
every third time. It ends when neighbours on the grid differ. For the fastest batch the same is done with the peak
without a plan, where recomputing begins; powers of two are tried, which kernels like, unless the line through their
neighbours puts them well below the best, and the gaps beside the best are halved while its neighbours are slower. Few
batch sizes are all tried. What fits is taken to fit at smaller values too. Throughput need not rise and fall once, so
among many the best is the best of those tried. Where the largest fits only with care (the caching allocator would hold
more than the device has), the gap to the largest that needs none is halved, to one part of `_NEAR_CARE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from memfit.plans.search_result import SearchPoint
from memfit.plans.search_trials import Trials, merit, prove_the_fastest

Measure = Callable[[SearchPoint], float | None]

_FIRST = {"batch": 1, "seq": 1024}
_GROWTH = 8
_TRIES = 28
_ALL = 8
"""Batch sizes that are all tried when no more than these fit."""
_NEAR = 32
"""The best batch is known to one part of this many."""
_NEAR_CARE = 16
"""So is the largest that needs no care."""
_SLOWER = 0.95
"""A batch size is not tried when the line through its neighbours gives it less than this part of the best rate."""
_AS_FAST = 0.99
"""Neighbours with at least this part of the best rate leave nothing to look for between."""


def search_grid(trials: Trials, grid: int, end: int) -> None:
    trials.loose = True
    first = max(grid, min(_FIRST[trials.over], end // grid * grid))
    largest = _boundary(trials, first, grid, end // grid * grid, _min_budget)
    if largest is None:
        return
    if largest == end // grid * grid and trials.refused is None:
        trials.notes.append(f"the search ended at {trials.over} {largest}; a larger limit lets it go on (--largest)")
    _without_care(trials, grid)
    if trials.over == "batch":
        _fastest(trials, largest)
        prove_the_fastest(trials)
    else:
        trials.prove(max(value for value, point in trials.points.items() if point.fits))


def _min_budget(point: SearchPoint) -> float | None:
    return point.minimum_budget_bytes


def _baseline_peak(point: SearchPoint) -> float | None:
    return point.baseline_peak_bytes


def _without_care(trials: Trials, grid: int) -> None:
    """Narrow the gap between the largest value that the allocator has room for and the next."""
    while len(trials.points) < _TRIES:
        fit = {value: point.with_care for value, point in trials.points.items() if point.fits}
        low = max((value for value, care in fit.items() if not care), default=0)
        high = min((value for value in fit if value > low), default=low)
        if high - low <= max(grid, low // _NEAR_CARE) or trials.at(round_between(low, high, grid)) is None:
            return


def round_between(low: int, high: int, grid: int) -> int:
    """Return a value of the grid near the middle of two, as round as there is one: the search may come back to it."""
    first, last = low + -(-(high - low) // 4), high - -(-(high - low) // 4)
    step = grid
    while first <= last // (2 * step) * (2 * step):
        step *= 2
    rounded = (low + high) // 2 // step * step
    return rounded if first <= rounded <= last else max(grid, last // step * step)


def _fastest(trials: Trials, largest: int) -> None:
    """Try the batch sizes that may be the fastest of those that fit."""
    if largest > _ALL:
        _boundary(trials, 1, 1, largest, _baseline_peak)
    values = range(1, largest + 1) if largest <= _ALL else [1 << power for power in range(largest.bit_length())]
    for value in values:
        if len(trials.points) < _TRIES and (largest <= _ALL or _may_be_fast(trials, value)):
            trials.at(value)
    _narrow(trials)


def _may_be_fast(trials: Trials, value: int) -> bool:
    """Return False where the line through the step times of its neighbours makes a value much slower than the best."""
    times = {each: point.step_ms for each, point in trials.points.items() if point.step_ms and point.throughput_per_s}
    below = max((each for each in times if each < value), default=None)
    above = min((each for each in times if each > value), default=None)
    best = max((point.throughput_per_s or 0.0 for point in trials.points.values()), default=0.0)
    if value in times or below is None or above is None:
        return True
    step_ms = times[below] + (times[above] - times[below]) * (value - below) / (above - below)
    samples_ms = (trials.points[above].throughput_per_s or 0.0) * times[above] / above  # of a batch of one
    return step_ms <= 0 or value * samples_ms / step_ms >= _SLOWER * best


def _boundary(trials: Trials, first: int, grid: int, end: int, measure: Measure) -> int | None:
    """Find the largest value whose measure is within the budget, None when none is; see Note [Few captures]."""

    def within(value: int) -> bool:
        point = trials.at(value)
        if point is None or measure is _min_budget:
            return point is not None and point.fits
        needed = measure(point)
        return needed is not None and needed <= trials.budget_bytes

    low, high = 0, end + grid  # of each, nothing is known but that the answer lies between
    known = sorted(trials.points)
    for value in known:
        if within(value):
            low = max(low, value)
    above = [value for value in known if value > low and not within(value)]
    high = min([high, *above])
    limit = trials.budget_bytes
    value = first if not known else _guess(trials, low, high, grid, measure, limit, 0, bounded=high <= end)
    turn = 0
    while high - low > grid and len(trials.points) < _TRIES:
        if within(value):
            low = max(low, value)
        else:
            high = min(high, value, *([] if trials.refused is None else [trials.refused]))
        turn += 1
        value = _guess(
            trials, low, high, grid, measure, limit, turn if high <= end else 0, bounded=high <= end or low == 0
        )
    return low or None


def _guess(
    trials: Trials,
    low: int,
    high: int,
    grid: int,
    measure: Measure,
    limit: float,
    turn: int,
    *,
    bounded: bool = True,
) -> int:
    """Guess the next value between two: where the line through two points meets the limit, or half way (turn 2).

    While nothing is known to lie above the limit (`bounded` is False), at most `_GROWTH` times the last.
    """
    lowest, highest = low + grid, high - grid
    if low:
        highest = min(highest, low * _GROWTH)
    else:
        lowest = grid
    value = (low + high) // 2 if turn % 3 == 2 else None
    line = [(point.value, measure(point)) for point in trials.points.values()]
    line = sorted((at, needs) for at, needs in line if needs is not None)
    if value is None and len(line) > 1:
        near = sorted(line, key=lambda each: abs(each[1] - limit))[:2]
        (first, needs), (second, more) = sorted(near)
        if more > needs:
            value = math.floor(first + (limit - needs) * (second - first) / (more - needs))
    if value is None:
        value = (low + high) // 2 if bounded else low * _GROWTH
    return max(grid, min(max(value // grid * grid, lowest), max(highest, lowest)))


def _narrow(trials: Trials) -> None:
    """Halve the gaps beside the fastest value, until they are narrow or what is beyond them is as fast."""
    while len(trials.points) < _TRIES:
        able = sorted(value for value, point in trials.points.items() if point.fits and point.throughput_per_s)
        if not able:
            return
        place = max(range(len(able)), key=lambda index: (*merit(trials.points[able[index]]), -index))
        best = able[place]
        rate = trials.points[best].throughput_per_s or 0.0
        beside = [able[each] for each in (place - 1, place + 1) if 0 <= each < len(able)]
        slower = [each for each in beside if (trials.points[each].throughput_per_s or 0.0) < _AS_FAST * rate]
        wide = [(abs(each - best), each) for each in slower if abs(each - best) > max(1, best // _NEAR)]
        if not wide:
            return
        _, other = max(wide)
        if trials.at(round_between(min(best, other), max(best, other), 1)) is None:
            return
