"""The greedy order as a curve of discarded memory against recompute time, and its fit."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from memfit.compat.fit import fit_piecewise
from memfit.compat.greedy import group_of
from memfit.compat.sac import SACGreedyOrderMeta, SACStats, SACTradeOffStats
from memfit.errors import InputError

_SHIFT = 1e-2
"""Added to every share of memory, as in the prototype."""


def tradeoff_curve(sac_stats: SACStats, greedy: SACGreedyOrderMeta, n_segments: int = 2) -> SACTradeOffStats:
    """The curve and a fit with so many segments, or fewer when there are few points.

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
