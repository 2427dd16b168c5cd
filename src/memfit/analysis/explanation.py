"""What an explanation of a step says: what fills its peak, what holds that, and what would lower it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import RenderableType

from memfit.analysis.levers.case import Lever
from memfit.analysis.mesh_dimensions import MeshDimension
from memfit.capture import Category
from memfit.memory import OpLocation
from memfit.text import PrintedDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPlace(OpLocation):
    """Where the peak is; `second_run_of` is the unit that is recomputed there, None when none is."""

    second_run_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleAtPeak:
    """What a module itself has at the peak, its children not counted; `source` is its line that made most of it.

    What no module makes is under `<loss>` and `<optimizer>`.
    """

    module: str
    size_bytes: int
    by_category: dict[Category, int]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAtPeak:
    """What a line of the user's code made that is there at the peak, in how many allocations."""

    source: str
    size_bytes: int
    allocations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStorage:
    """An allocation that is there at the peak. `holder` is the kind of thing that holds it, `held_by` the thing.

    `alloc_at` and `free_after` are ops of the step, None when it is there before or stays after. `shape` and `dtype`
    are those of the first tensor seen on it, None when none was.
    """

    size_bytes: int
    category: Category
    name: str
    module: str
    source: str
    shape: tuple[int, ...] | None
    dtype: str | None
    holder: str
    held_by: str
    alloc_at: int | None
    born_by: str
    free_after: int | None
    dies_after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleActivations:
    """What a module and its children hold for the backward when most is held, and what of it is its own."""

    module: str
    size_bytes: int
    own_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredUnit:
    """Bytes of a sharded unit: its parameters and gradient unsharded, one rank's shard, and what the peak has of it."""

    module: str
    gathered_bytes: int
    gradient_bytes: int
    shard_bytes: int
    at_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StillHeld:
    """A storage made in or passed to a checkpointed unit that is still alive at the peak, and why."""

    unit: str
    size_bytes: int
    name: str
    module: str
    source: str
    reason: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """What checkpointing gave at the peak, and what it did not release.

    `units` are those of the plan, or those that the model checkpoints itself; then the step without is not known.
    `dropped_bytes` is what they do not hold from forward to backward. `findings` says in words why that is not all gone
    from the peak.
    """

    units: tuple[str, ...]
    by_the_model: bool
    dropped_bytes: int | None
    peak_without_bytes: int | None
    peak_bytes: int
    still_held_bytes: int
    still_held: tuple[StillHeld, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation(PrintedDocument):
    """What fills the peak of a step on one rank, what holds it, and the levers that would lower it.

    Everything is predicted, nothing measured. `planned` says whether the step runs under a plan. Tables are empty where
    only a plan's document is known. `least_bytes` is the lowest peak that checkpointing alone can reach. `left_out`
    names levers that could not be worked out, and why. `reserved_bytes` is what the caching allocator reserves, and
    `has_room` whether the device has room for that (Note [What fits]). A step that was captured on its `mesh` has what
    each of its `dimensions` does.
    """

    device: str
    device_title: str
    ranks: int
    budget_bytes: int
    planned: bool
    peak_bytes: int
    step_ms: float
    at: PeakPlace
    by_category: dict[Category, int]
    by_module: tuple[ModuleAtPeak, ...]
    by_line: tuple[LineAtPeak, ...]
    largest: tuple[HeldStorage, ...]
    activations: tuple[ModuleActivations, ...]
    gathered: tuple[GatheredUnit, ...]
    checkpointing: Checkpointing | None
    levers: tuple[Lever, ...]
    least_bytes: int | None = None
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reserved_bytes: int | None = None
    has_room: bool = True
    mesh: dict[str, int] = field(default_factory=dict)
    dimensions: tuple[MeshDimension, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget, and the allocator has room for it."""
        return self.peak_bytes <= self.budget_bytes and self.has_room

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {"measured": False, "fits": self.fits, **msgspec.to_builtins(dataclasses.asdict(self))}

    def __rich__(self) -> RenderableType:
        from memfit.report import explanation_report

        return explanation_report(self)
