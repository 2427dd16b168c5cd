"""Fewer points of a frontier that still say the same: its ends, its hull, and what matters most between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memfit.tradeoff.facts import Ints
from memfit.tradeoff.hull import lower_hull


def thinned(discarded_bytes: Ints, time: Ints, points: int) -> Ints:
    """Places of at most `points` points of a frontier, which is sorted by bytes, its first and last among them.

    All corners of the hull stay; when there are too many, those go first whose going loses the least area
    between the hull and the chord that replaces them. Room that is left goes, one by one, to the point that
    takes most from the area under the staircase.
    """
    count = len(time)
    if count <= points:
        return np.arange(count)
    corners = lower_hull(discarded_bytes, time)
    if len(corners) >= points:
        return _fewer_corners(discarded_bytes, time, corners, points)
    chosen = corners
    while len(chosen) < points:
        after = np.searchsorted(chosen, np.arange(count))
        low, high = chosen[np.maximum(after - 1, 0)], chosen[after]
        gain = (discarded_bytes - discarded_bytes[low]).astype(np.float64) * (time[high] - time)
        chosen = np.union1d(chosen, gain.argmax())
    return chosen


def _fewer_corners(x: Ints, y: Ints, corners: Ints, points: int) -> Ints:
    left = corners.tolist()
    while len(left) > points:
        px, py = x[left].astype(np.float64), y[left].astype(np.float64)
        lost: NDArray[np.float64] = np.abs(
            (px[1:-1] - px[:-2]) * (py[2:] - py[:-2]) - (px[2:] - px[:-2]) * (py[1:-1] - py[:-2])
        )
        del left[1 + int(lost.argmin())]
    return np.array(left, np.int64)
