"""What the rest of a walk costs at least, as a convex function of what is lacking already.

Note [Completion]: let V(F) be the least time from some place on when F bytes are lacking. With every frontier replaced
by its convex hull, V is convex, falls, and comes from the one after it: the choice of a unit is the infimal convolution
with its hull, a merge of segments by slope; a row cuts the domain; a container or what is inside it is the hull of the
two. So it is found for all places by one pass from the last to the first. It is at most the true time: it may choose
between any two policies as if they were shares, and it leaves out what second runs need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.solve.prefixes import NO_NEED, Place
from memfit.tradeoff.facts import Ints

Floats = npt.NDArray[np.float64]
_SAME_SLOPE = 1e-12


@dataclass(frozen=True, eq=False, slots=True)
class Falling:
    """A convex function by its corners, with falling times; infinite before the first, level after the last."""

    at: Floats
    time: Floats

    def __call__(self, lacking_bytes: Ints) -> Floats:
        """The values at these places."""
        found = np.interp(lacking_bytes, self.at, self.time)
        found[lacking_bytes < self.at[0]] = np.inf
        return found

    def cut(self, least_bytes: float) -> Falling:
        """The function from a place on."""
        if least_bytes <= self.at[0]:
            return self
        if least_bytes >= self.at[-1]:
            return Falling(np.array([float(least_bytes)]), self.time[-1:])
        first = int(np.searchsorted(self.at, least_bytes, "right"))
        value = np.interp(least_bytes, self.at, self.time)
        return Falling(
            np.concatenate(([float(least_bytes)], self.at[first:])), np.concatenate(([value], self.time[first:]))
        )

    def after(self, hull: Falling) -> Falling:
        """The infimal convolution with a hull, whose places are the bytes that a unit frees, negated."""
        run = np.concatenate((np.diff(self.at), np.diff(hull.at)))
        fall = np.concatenate((np.diff(self.time), np.diff(hull.time)))
        slope = fall / run
        order = np.argsort(slope, kind="stable")
        run, fall, slope = run[order], fall[order], slope[order]
        if len(slope) > 1:
            starts = np.concatenate(([True], np.diff(slope) > -_SAME_SLOPE * slope[1:]))
            places = np.flatnonzero(starts)
            run, fall = np.add.reduceat(run, places), np.add.reduceat(fall, places)
        return Falling(
            np.cumsum(np.concatenate((self.at[:1] + hull.at[0], run))),
            np.cumsum(np.concatenate((self.time[:1] + hull.time[0], fall))),
        )


NOTHING_LEFT = Falling(np.array([float(NO_NEED)]), np.array([0.0]))


def hull_of(at: Floats, time: Floats) -> Falling:
    """The lower convex hull of points, as far as it falls."""
    order = np.lexsort((time, at))
    xs, ys = at[order].tolist(), time[order].tolist()
    corners: list[tuple[float, float]] = []
    for x, y in zip(xs, ys, strict=True):
        if corners and (x <= corners[-1][0] or y >= corners[-1][1]):
            continue
        while len(corners) > 1:
            (ax, ay), (bx, by) = corners[-2:]
            if (by - ay) * (x - ax) < (y - ay) * (bx - ax):
                break
            corners.pop()
        corners.append((x, y))
    return Falling(np.array([x for x, _ in corners]), np.array([y for _, y in corners]))


def completions(places: tuple[Place, ...]) -> tuple[Falling, dict[int, Falling]]:
    """The function before the first place, and the one after each place by the index of its candidate."""
    after: dict[int, Falling] = {}
    hulls: dict[int, Falling] = {}

    def before(place: Place, rest: Falling) -> Falling:
        after[place.index] = rest
        rest = rest.cut(place.need_bytes)
        own = hulls.get(place.kind)
        if own is None:
            free = np.concatenate((-place.freed, [] if place.inside or place.forced else [0])).astype(np.float64)
            cost = np.concatenate((place.time, [] if place.inside or place.forced else [0])).astype(np.float64)
            own = hulls[place.kind] = hull_of(free, cost)
        if not place.inside:
            return rest.after(own)
        through = rest
        for each in reversed(place.inside):
            through = before(each, through)
        through = through.cut(place.open_bytes)
        if place.opened:
            return through
        whole = rest.after(own).cut(place.inner_bytes)
        if place.forced:
            return whole
        return hull_of(np.concatenate((through.at, whole.at)), np.concatenate((through.time, whole.time)))

    rest = NOTHING_LEFT
    for place in reversed(places):
        rest = before(place, rest)
    return rest, after
