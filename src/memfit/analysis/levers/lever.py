"""A lever: something that lowers the peak of a step, with its effect worked out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.units import display_bytes

SMALL_PART = 0.01
"""A lever that saves less of the peak than this comes after all others."""
Basis = Literal["captured", "estimated"]
"""`captured`: the changed step was captured or solved, and replayed op by op. `estimated`: arithmetic on the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What to change, in a line of code, and what that would do to the peak and the time of a step.

    `costs_ms` is how much longer a step takes, negative when it is faster and None when that is not known. `units` are
    the modules it is about. With `same_numbers` the step computes what it did, but for rounding. `option` is what to
    add to `memfit plan` to plan with it, empty where the command has no option for it.
    """

    name: str
    how: str
    peak_bytes: int
    saves_bytes: int
    costs_ms: float | None
    basis: Basis
    assumes: str = ""
    units: tuple[str, ...] = ()
    same_numbers: bool = True
    option: str = ""

    @property
    def free(self) -> bool:
        """Whether a step takes no longer."""
        return self.costs_ms is not None and self.costs_ms <= 0

    @property
    def bytes_per_ms(self) -> float | None:
        """Bytes saved for each millisecond lost; None when nothing is lost, or it is not known how much."""
        return None if self.costs_ms is None or self.costs_ms <= 0 else self.saves_bytes / self.costs_ms


def enough(lever: Lever, budget_bytes: int) -> str:
    """Whether a step that does not fit a budget does with this lever alone, or what is still missing."""
    missing = lever.peak_bytes - budget_bytes
    return "enough by itself" if missing <= 0 else f"{display_bytes(missing)} missing"


def in_order(levers: list[Lever]) -> tuple[Lever, ...]:
    """Free ones first, by what they save; then by bytes saved for each millisecond; then those of unknown time. What
    saves next to nothing comes after all others."""
    return tuple(sorted(levers, key=_place))


def _place(lever: Lever) -> tuple[bool, int, float]:
    small = lever.saves_bytes < SMALL_PART * (lever.peak_bytes + lever.saves_bytes)
    if lever.free:
        return small, 0, -float(lever.saves_bytes)
    if lever.bytes_per_ms is not None:
        return small, 1, -lever.bytes_per_ms
    return small, 2, -float(lever.saves_bytes)
