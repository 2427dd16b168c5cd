"""How much longer one of two ways takes than the other, and how far off that may be by the models it was measured on.

Note [Once more]: the fastest of several others is so by chance too: with six that are equally fast and models that are
3 % apart, its measurement is 2 % too short. So what was measured first says only which other is the fastest, and the
two are measured once more against each other, on models made anew.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Duel:
    """The other's time over ours, and how far off it may be (95 %); 1 and nothing where both do the same."""

    ratio: float = 1.0
    off: float = 0.0

    @property
    def is_slower(self) -> bool:
        """Whether ours is slower by more than the measurement may be off."""
        return self.ratio + self.off < 1

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ± {self.off:.3f}" if self.off else f"{self.ratio:.3f}"


_T = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228}
"""Student's t at 95 %, two sides, by degrees of freedom."""


def duel_of(ours_ms: Sequence[float], others_ms: Sequence[float]) -> Duel:
    """Compare two ways by the median times of at least two models of each."""
    ours, others = ([math.log(ms) for ms in measured] for measured in (ours_ms, others_ms))
    ratio = math.exp(statistics.fmean(others) - statistics.fmean(ours))
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in (ours, others)))
    freedom = 2 * (min(len(ours), len(others)) - 1)
    return Duel(ratio, _T[min(freedom, max(_T))] * error * ratio)


def show_duels(duels: Sequence[Duel]) -> None:
    """Print the ratios, how many are below 1 by more than they may be off, and last the least."""
    print(f"the fastest other's time over the joint plan's: {', '.join(map(str, duels))}")
    slower = sum(each.is_slower for each in duels)
    chance = 0.025 * sum(each.off > 0 for each in duels)
    print(f"points where the joint plan is slower by more than that: {slower} of {len(duels)}, {chance:.1f} by chance")
    print(f"least: {min(each.ratio for each in duels):.3f} (must be at least 1, but for what it may be off)")
