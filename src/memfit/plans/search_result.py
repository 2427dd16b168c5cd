"""What a search found: every value that was tried, the best of them and the largest that fits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.console import RenderableType

from memfit.text import PrintedDocument

if TYPE_CHECKING:
    from memfit.plans.device_result import DeviceSearch
    from memfit.plans.mesh_result import MeshSearch

Over = Literal["batch", "seq", "ranks"]
PointStatus = Literal["optimal", "feasible", "infeasible", "unknown", "slower"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPoint:
    """The fastest plan for one value. What a plan has is None where no plan fits; `unknown` ran out of time.

    Of many given values those that cannot be the best have no plan: they are `slower`, take `least_step_ms` or more and
    reach `most_per_s` or less. One that fits as it is has its times, and no `peak_reserved_bytes`.

    `throughput_per_s` counts samples or tokens of all ranks together. `baseline_peak_bytes` is the peak without a plan,
    `minimum_budget_bytes` the smallest budget that works, None when it was not found in time, or among many given
    values where a plan fits. `allowed_bytes` is what a rank may use, less on several where NCCL takes its part;
    `budget_bytes` is lower where the caching allocator needs the room; a plan is `with_care` when it would hold more
    than the device has all the same.
    """

    value: int
    status: PointStatus
    allowed_bytes: int
    budget_bytes: int
    gap: float | None = None
    peak_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    with_care: bool = False
    step_ms: float | None = None
    recompute_ms: float | None = None
    throughput_per_s: float | None = None
    baseline_peak_bytes: int
    minimum_budget_bytes: int | None = None
    least_step_ms: float | None = None
    most_per_s: float | None = None
    ranks: int

    @property
    def fits(self) -> bool:
        """Whether a plan stays within the budget."""
        return self.peak_bytes is not None or self.status == "slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search(PrintedDocument):
    """Points by growing value. `grid` is how far apart values are, 0 when the values were given.

    `counts` is what throughput counts: samples or tokens. `refused` is the smallest value that no step could be made
    of. `complete` is False when the search was interrupted: there may be better values. `captured` is how many values
    were captured; the traces of the others follow from theirs. `notes` say what ended it.
    """

    over: Over
    target: str
    ranks: int | None
    budget_bytes: int
    counts: Literal["samples", "tokens"]
    grid: int
    complete: bool = True
    refused: int | None = None
    captured: int = 0
    points: tuple[SearchPoint, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether any value fits."""
        return self.largest is not None

    @property
    def best(self) -> SearchPoint | None:
        """The value with the highest throughput; over ranks, the highest of each rank. None when nothing fits.

        Values that fit only with care count where there are no others.
        """
        able = [point for point in self.points if point.fits and point.throughput_per_s is not None]
        return max(able, key=lambda point: (not point.with_care, self.rate(point), -point.value), default=None)

    @property
    def largest(self) -> SearchPoint | None:
        """The largest value that fits: the longest sequence, the biggest batch. None when nothing fits."""
        return next((point for point in reversed(self.points) if point.fits), None)

    @property
    def largest_without_care(self) -> SearchPoint | None:
        """The largest value for whose plan the caching allocator has room, of those that were tried."""
        return next((point for point in reversed(self.points) if point.peak_bytes and not point.with_care), None)

    @property
    def smallest(self) -> SearchPoint | None:
        """The smallest value that fits: over ranks, the fewest. None when nothing fits."""
        return next((point for point in self.points if point.fits), None)

    @property
    def first_above(self) -> SearchPoint | None:
        """The smallest value above the largest that does not fit, of those that were tried."""
        largest = self.largest
        above = (point for point in self.points if not point.fits and (largest is None or point.value > largest.value))
        return next(above, None)

    @property
    def exact(self) -> bool:
        """Whether the next value of the grid after the largest that fits was tried: it does not, or has no step."""
        largest, above = self.largest, self.first_above
        ends = (self.refused, None if above is None else above.value)
        return largest is not None and self.grid > 0 and largest.value + self.grid in ends

    @property
    def tried_all(self) -> bool:
        """Whether every value up to the largest that fits was tried, so that none of them is faster than the best."""
        largest = self.largest
        able = sum(point.fits for point in self.points)
        return largest is not None and self.grid > 0 and able == largest.value // self.grid

    def rate(self, point: SearchPoint) -> float:
        """Return what `best` compares: throughput; over ranks, that of each rank."""
        assert point.throughput_per_s is not None
        return point.throughput_per_s / (point.ranks if self.over == "ranks" else 1)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        found = dataclasses.asdict(self)
        for name in ("best", "largest", "largest_without_care", "smallest"):
            point = getattr(self, name)
            found[name] = None if point is None else point.value
        return {"fits": self.fits, "exact": self.exact, "tried_all": self.tried_all, **found}

    def __rich__(self) -> RenderableType:
        from memfit.report import search_report

        return search_report(self)

    def __repr__(self) -> str:
        best, largest = (None if point is None else point.value for point in (self.best, self.largest))
        return f"Search(over {self.over}: best {best}, largest {largest}; points: {len(self.points)})"


class SearchInterrupted(KeyboardInterrupt):
    """A search that Ctrl-C ended; `found` is what it had found by then."""

    def __init__(self, found: Search | MeshSearch | DeviceSearch) -> None:
        super().__init__(f"the search over {found.over} was interrupted; the values that were tried are in `found`")
        self.found = found
