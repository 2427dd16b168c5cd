"""What a verification found: predicted beside measured, and whether the step is the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from memfit.paths import module_label
from memfit.text import PrintedDocument
from memfit.units import display_bytes, display_ms
from memfit.verify.exactness import Exactness

MEMORY_TOLERANCE = 0.01
TIME_TOLERANCE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesCheck:
    """Predicted and measured bytes of one thing."""

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def difference_bytes(self) -> int:
        """How many bytes more were measured than predicted."""
        return self.measured_bytes - self.predicted_bytes

    @property
    def error(self) -> float:
        """The difference as a part of what was predicted."""
        return _part(self.difference_bytes, self.predicted_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MsCheck:
    """Predicted and measured milliseconds of one thing."""

    name: str
    predicted_ms: float
    measured_ms: float

    @property
    def difference_ms(self) -> float:
        """How much longer it took than predicted."""
        return self.measured_ms - self.predicted_ms

    @property
    def error(self) -> float:
        """The difference as a part of what was predicted."""
        return _part(self.difference_ms, self.predicted_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCheck:
    """What one of several ranks predicted and measured; the baseline is sharded alike and checkpoints nothing."""

    rank: int
    peak: BytesCheck
    step: MsCheck
    baseline_peak: BytesCheck | None
    baseline_step: MsCheck | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(PrintedDocument):
    """A plan beside what really happened.

    Peaks count what is there when the step begins, as the trace does. `by_category` and `by_module` take the peak apart
    and are empty where the device does not say what its events were; what belongs to no module has the empty path.
    `replayed_peak_bytes` is what the plan's decisions give on a trace captured now: the prediction, unless the document
    was changed. `forward_by_module` has each module's own forward, without the modules inside it. `baseline_peak`,
    `baseline_step` and `exactness` need the step without the plan; where it was not run, `skipped` says why. With
    `random_path` the step was planned for the largest of its random paths: one that was measured may need less.

    On several ranks `ranks` has a check of each, `peak` is that of the largest and `step` that of the slowest rank, and
    `engine` is what sharded them. What is predicted is the plan's decisions on that engine; `planned_peak_bytes` is
    what the plan itself says, which is for FSDP2. Ranks whose shards have no padding hold a little less than the first.
    """

    device: str
    steps: int
    budget_bytes: int
    peak: BytesCheck
    replayed_peak_bytes: int
    peak_module: str
    by_category: tuple[BytesCheck, ...]
    by_module: tuple[BytesCheck, ...]
    step: MsCheck
    forward_by_module: tuple[MsCheck, ...]
    baseline_peak: BytesCheck | None
    baseline_step: MsCheck | None
    exactness: Exactness | None
    skipped: str | None
    memory_tolerance: float = MEMORY_TOLERANCE
    time_tolerance: float | None = TIME_TOLERANCE
    random_path: bool = False
    engine: str | None = None
    planned_peak_bytes: int | None = None
    ranks: tuple[RankCheck, ...] = ()

    @property
    def largest_rank(self) -> RankCheck | None:
        """The rank with the highest measured peak; None on one device."""
        return max(self.ranks, key=lambda each: each.peak.measured_bytes, default=None)

    @property
    def slowest_rank(self) -> RankCheck | None:
        """The rank whose step takes longest; None on one device."""
        return max(self.ranks, key=lambda each: each.step.measured_ms, default=None)

    @property
    def ok(self) -> bool:
        """Whether everything is as the plan says, within the tolerances."""
        return not self.findings

    @property
    def peak_agrees(self) -> bool:
        """Whether the peak is as predicted, or below the prediction for the largest of several random paths."""
        return abs(self.peak.error) <= self.memory_tolerance or self.on_smaller_path

    @property
    def on_smaller_path(self) -> bool:
        """Whether the measured step took a random path that needs less than the one that was planned."""
        return self.random_path and self.peak.error < -self.memory_tolerance

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is at most the budget."""
        return self.peak.measured_bytes <= self.budget_bytes

    @property
    def time_agrees(self) -> bool:
        """Whether the step takes as long as predicted; always when no tolerance was given."""
        return self.time_tolerance is None or abs(self.step.error) <= self.time_tolerance

    @property
    def only_time_differs(self) -> bool:
        """Whether nothing but the time is not as predicted."""
        return not self.time_agrees and len(self.findings) == 1

    @property
    def memory_differs_most(self) -> BytesCheck | None:
        """The module whose bytes at the peak differ most; the one at the peak when none does. None within tolerance."""
        if self.peak_agrees or not self.by_module:
            return None
        most = max(self.by_module, key=lambda each: abs(each.difference_bytes))
        if most.difference_bytes:
            return most
        return next((each for each in self.by_module if each.name == self.peak_module), most)

    @property
    def time_differs_most(self) -> MsCheck | None:
        """The module whose own forward differs most; None within tolerance."""
        if self.time_agrees or not self.forward_by_module:
            return None
        return max(self.forward_by_module, key=lambda each: abs(each.difference_ms))

    @property
    def findings(self) -> tuple[str, ...]:
        """Everything that is not as it should be, in words."""
        return tuple(_findings(self))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        found = dataclasses.asdict(self)
        most, slowest = self.memory_differs_most, self.time_differs_most
        largest_rank, slowest_rank = self.largest_rank, self.slowest_rank
        return {
            "ok": self.ok,
            "findings": list(self.findings),
            **found,
            "memory_differs_most": None if most is None else most.name,
            "time_differs_most": None if slowest is None else slowest.name,
            "largest_rank": None if largest_rank is None else largest_rank.rank,
            "slowest_rank": None if slowest_rank is None else slowest_rank.rank,
        }

    def __rich__(self) -> RenderableType:
        from memfit.report import verification_report

        return verification_report(self)


def _findings(found: Verification) -> Iterator[str]:
    yield from _inexact(found.exactness)
    peak, planned_bytes = found.peak, found.planned_peak_bytes or found.peak.predicted_bytes
    largest = "" if found.largest_rank is None else f" of rank {found.largest_rank.rank}, the largest,"
    if not found.within_budget:
        over = display_bytes(peak.measured_bytes - found.budget_bytes)
        yield f"the peak{largest} is {over} above the budget of {display_bytes(found.budget_bytes)}"
    if not found.peak_agrees:
        yield (
            f"the peak{largest} is {peak.error:+.1%} from its prediction: {display_bytes(peak.measured_bytes)} "
            f"measured, {display_bytes(peak.predicted_bytes)} predicted{_where(found)}"
        )
    if found.replayed_peak_bytes != planned_bytes:
        yield (
            f"the plan's decisions give a peak of {display_bytes(found.replayed_peak_bytes)} and not the "
            f"{display_bytes(planned_bytes)} that it predicts: its document was changed; plan the step again"
        )
    if not found.time_agrees:
        step, most = found.step, found.time_differs_most
        where = ""
        slowest = "" if found.slowest_rank is None else f" of rank {found.slowest_rank.rank}, the slowest,"
        if most is not None:
            where = (
                f"; {module_label(most.name)} differs most, {display_ms(most.measured_ms)} of forward against "
                f"{display_ms(most.predicted_ms)}"
            )
        yield (
            f"the step{slowest} is {step.error:+.0%} from its prediction: {display_ms(step.measured_ms)} measured, "
            f"{display_ms(step.predicted_ms)} predicted{where}. `memfit calibrate` measures this machine: plan with "
            "the device that it writes"
        )


def _inexact(exactness: Exactness | None) -> Iterator[str]:
    if exactness is None or exactness.equal:
        return
    for kind in dict.fromkeys(each.kind for each in exactness.differences):
        these = [each for each in exactness.differences if each.kind == kind]
        first = max(these, key=lambda each: each.largest)
        what = f"{len({each.name for each in these})} {kind}s differ, most that of {first.name}"
        if kind in ("loss", "random state"):
            what = f"the {kind} differs"
        where = "" if first.rank is None else f" on rank {first.rank}"
        yield f"{what}, by {first.largest:.3g} in step {first.step + 1}{where}"
    if exactness.reproducible is False:
        yield "the step gives other values from run to run also without the plan, so no plan can be compared with it"
    elif exactness.reproducible:
        yield (
            "the step gives the same each time without the plan: something in a checkpointed module does something "
            "else when it runs again, such as counting its calls"
        )


def _where(found: Verification) -> str:
    most = found.memory_differs_most
    if most is None:
        return ""
    if not most.difference_bytes:
        return f"; the peak is in {module_label(most.name)}, and no module holds other than its decisions give"
    return (
        f"; {module_label(most.name)} differs most, {display_bytes(most.measured_bytes)} against "
        f"{display_bytes(most.predicted_bytes)}"
    )


def _part(difference: float, whole: float) -> float:
    if whole:
        return difference / whole
    return math.copysign(math.inf, difference) if difference else 0.0
