"""The greedy order as a curve of discarded memory against recompute time, and its fit."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from memfit.compat.sac import SACGreedyOrderMeta, SACStats, SACTradeOffStats, group_of
from memfit.errors import InputError

_SHIFT = 1e-2
"""Added to every share of memory, as in the prototype."""


def tradeoff_curve(sac_stats: SACStats, greedy: SACGreedyOrderMeta, n_segments: int = 2) -> SACTradeOffStats:
    """Return the curve and a fit with so many segments, or fewer when there are few points.

    The fit is to an upper bound: the time at each point is the one of the next point.
    """
    if n_segments < 1:
        raise InputError(f"n_segments is {n_segments}; give 1 or more")
    sac_memory, sac_runtime = sum(sac_stats.memory), sum(sac_stats.runtimes)
    curve: OrderedDict[float, float] = OrderedDict()
    discarded, spent = 0, 0.0

    def advance(memory: int, runtime: float) -> None:
        nonlocal discarded, spent
        discarded += memory
        spent += runtime
        share = discarded / sac_memory if sac_memory else 0.0
        curve[share + _SHIFT] = spent / sac_runtime if sac_runtime else 0.0

    advance(*_sums(sac_stats, greedy.recomputed_ops))
    for candidate in greedy.msps_meta:
        advance(candidate.memory, candidate.runtime)
    advance(*_sums(sac_stats, set().union(*(group_of(greedy, op) for op in greedy.stored_ops))))
    x = np.array(list(curve)[:-1])
    y = np.array(list(curve.values())[1:])
    segments = max(min(len(x) - 2, n_segments), 1)
    line = fit_piecewise(x, y, segments)
    return SACTradeOffStats(
        n_segments=len(line.slopes),
        slopes=list(line.slopes),
        intercepts=list(line.intercepts),
        fit_breaks=list(line.breaks),
        tradeoff_curve=curve,
        sac_memory=sac_memory,
        sac_runtime=sac_runtime,
    )


def _sums(sac_stats: SACStats, ops: set[int]) -> tuple[int, float]:
    return sum(sac_stats.memory[op] for op in ops), sum(sac_stats.runtimes[op] for op in sorted(ops))


# -- Least squares with a continuous piecewise linear function whose breaks are free ----------------------------------
#
# Note [Breaks]: with one free break the best fit is found for certain. While the break moves between two
# neighbouring points the sides it divides stay the same, so the squared error is least either where the two sides'
# own lines cross, if that is between these points, or at one of them. With more breaks each in turn is moved to its
# best place, and then all together, from several beginnings, until nothing improves.


Floats = NDArray[np.float64]

_PLACES = 512
_COMBINATIONS = 600
_TRIED = 6
_ROUNDS = 40
_TINY = 1e-14


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseLine:
    """Segment i is `slopes[i] * x + intercepts[i]` between `breaks[i]` and `breaks[i + 1]`."""

    slopes: tuple[float, ...]
    intercepts: tuple[float, ...]
    breaks: tuple[float, ...]
    squared_error: float

    def __call__(self, x: float) -> float:
        """Return the value at x; outside the breaks the outer segments go on."""
        segment = int(np.searchsorted(self.breaks[1:-1], x))
        return self.slopes[segment] * x + self.intercepts[segment]


def fit_piecewise(x: Floats, y: Floats, segments: int) -> PiecewiseLine:
    """Fit points sorted by x best with so many segments."""
    if len(x) == 0 or x[0] == x[-1]:
        level = float(y.mean()) if len(y) else 0.0
        edge = float(x[0]) if len(x) else 0.0
        error = float(((y - level) ** 2).sum())
        return PiecewiseLine(slopes=(0.0,), intercepts=(level,), breaks=(edge, edge), squared_error=error)
    inner = np.unique(x)[1:-1]
    breaks: tuple[float, ...] = ()
    if segments == 2 and len(inner):
        breaks = (_best_break(x, y),)
    elif segments > 2:
        breaks = _several_breaks(x, y, inner, min(segments - 1, len(inner)))
    return _solve(x, y, breaks)


def _solve(x: Floats, y: Floats, breaks: Iterable[float]) -> PiecewiseLine:
    """Return the least squares fit for given breaks."""
    inner = tuple(sorted(breaks))
    weights, error = _weights(x, y, inner)
    slopes = np.cumsum(weights[1:])
    intercepts = weights[0] - np.cumsum(np.concatenate(([0.0], weights[2:] * np.array(inner))))
    return PiecewiseLine(
        slopes=tuple(slopes.tolist()),
        intercepts=tuple(intercepts.tolist()),
        breaks=(float(x[0]), *inner, float(x[-1])),
        squared_error=error,
    )


def _weights(x: Floats, y: Floats, breaks: tuple[float, ...]) -> tuple[Floats, float]:
    design = _design(x, breaks)
    weights: Floats = np.linalg.lstsq(design, y, rcond=None)[0].astype(np.float64)
    return weights, float(((design @ weights - y) ** 2).sum())


def _design(x: Floats, breaks: tuple[float, ...]) -> Floats:
    """Return the design matrix: a constant, a line, and one more line that begins at each break."""
    return np.column_stack((np.ones_like(x), x, *(np.maximum(x - place, 0.0) for place in breaks)))


def _error(x: Floats, y: Floats, breaks: tuple[float, ...]) -> float:
    return _weights(x, y, breaks)[1]


def _best_break(x: Floats, y: Floats, others: tuple[float, ...] = ()) -> float:
    """Return the best place of one more break while the others stay (Note [Breaks])."""
    edges = np.unique(x)
    if others and len(edges) > _PLACES:
        edges = edges[np.linspace(0, len(edges) - 1, _PLACES).astype(int)]
    fixed, _ = np.linalg.qr(_design(x, others))
    rest = y - fixed @ (fixed.T @ y)
    found = [_gains(x, rest, fixed, edges[i : i + _PLACES + 1]) for i in range(0, len(edges) - 1, _PLACES)]
    places, gains = (np.concatenate(column) for column in zip(*found, strict=True))
    places, gains = places[places > x[0]], gains[places > x[0]]
    best = places[np.argsort(-gains, kind="stable")[:4]]
    return float(min(best, key=lambda place: _error(x, y, (*others, float(place)))))


def _gains(x: Floats, rest: Floats, fixed: Floats, edges: Floats) -> tuple[Floats, Floats]:
    """Return places for a break, at the edges and between them, and how far each lowers the squared error."""
    step = (x[:, None] > edges[:-1]).astype(np.float64)
    ramp = step * (x[:, None] - edges[:-1])
    step -= fixed @ (fixed.T @ step)
    ramp -= fixed @ (fixed.T @ ramp)
    rr, rs, ss = (ramp**2).sum(0), (ramp * step).sum(0), (step**2).sum(0)
    yr, ys = rest @ ramp, rest @ step
    with np.errstate(all="ignore"):
        at_edge = np.where(rr > _TINY, yr**2 / rr, 0.0)
        determinant = rr * ss - rs**2
        slope, jump = (yr * ss - ys * rs) / determinant, (ys * rr - yr * rs) / determinant
        crossing = edges[:-1] - jump / slope
        inside = (determinant > _TINY) & (crossing > edges[:-1]) & (crossing < edges[1:])
    between = slope[inside] * yr[inside] + jump[inside] * ys[inside]
    return np.concatenate((edges[:-1], crossing[inside])), np.concatenate((at_edge, between))


def _several_breaks(x: Floats, y: Floats, inner: Floats, count: int) -> tuple[float, ...]:
    """Find more than one break, from several starting points."""
    settled = {_settled(x, y, start) for start in _starts(x, y, inner, count)}
    return min(sorted(settled), key=lambda breaks: _error(x, y, breaks))


def _starts(x: Floats, y: Floats, inner: Floats, count: int) -> list[tuple[float, ...]]:
    """Return breaks to start from: the best of all choices where they are few, greedy ones, evenly spread ones."""
    grown: tuple[float, ...] = ()
    for _ in range(count):
        grown = (*grown, _best_break(x, y, grown))
    starts = [grown]
    for shape in (0.5, 1.0, 2.0):
        shares = np.linspace(0, 1, count + 2)[1:-1]
        starts += [
            tuple(np.quantile(inner, shares**shape).tolist()),
            tuple((x[0] + (x[-1] - x[0]) * shares**shape).tolist()),
        ]
    points = inner if math.comb(len(inner), count) <= _COMBINATIONS else np.quantile(inner, np.linspace(0, 1, 12))
    tried = sorted(combinations(points.tolist(), count), key=lambda breaks: _error(x, y, breaks))
    return [*starts, *tried[:_TRIED]]


def _settled(x: Floats, y: Floats, breaks: tuple[float, ...]) -> tuple[float, ...]:
    """Move one break after the other to its best place, and all at once, while the error falls."""
    error = _error(x, y, breaks)
    for _ in range(_ROUNDS):
        before = error
        for place in range(len(breaks)):
            others = (*breaks[:place], *breaks[place + 1 :])
            for moved in ((*others, _best_break(x, y, others)), _moved_together(x, y, breaks)):
                moved_error = _error(x, y, moved)
                if moved_error < error:
                    breaks, error = moved, moved_error
        if error >= before * (1 - 1e-10):
            break
    return tuple(sorted(breaks))


def _moved_together(x: Floats, y: Floats, breaks: tuple[float, ...]) -> tuple[float, ...]:
    """Move all breaks to where the segments' own lines cross when each keeps its points."""
    jumps = [(x > place).astype(np.float64) for place in breaks]
    weights = np.linalg.lstsq(np.column_stack((_design(x, breaks), *jumps)), y, rcond=None)[0]
    slopes, shifts = weights[2 : 2 + len(breaks)], weights[2 + len(breaks) :]
    moved = [
        place - shift / slope if abs(slope) > _TINY else place
        for place, slope, shift in zip(breaks, slopes.tolist(), shifts.tolist(), strict=True)
    ]
    return tuple(min(max(place, float(x[0])), float(x[-1])) for place in moved)
