"""What a search over meshes found: every shape of so many ranks, those that fit by throughput, then the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import RenderableType

from memfit.plans.search_result import PointStatus
from memfit.text import PrintedDocument

ShapeStatus = PointStatus | Literal["impossible"]
Fixed = Literal["global batch", "batch of a data-parallel rank"]
"""What all shapes have in common; figures are compared at the same."""
SHARE_A_BATCH = ("tp", "sp", "cp", "pp")
"""Dimensions whose ranks work on one batch together. Along all others every rank has a batch of its own."""


def display_mesh(mesh: Mapping[str, int]) -> str:
    """Return a shape in words: `dp 8 x tp 4`."""
    return " x ".join(f"{name} {size}" for name, size in mesh.items())


def batches_in(mesh: Mapping[str, int]) -> int:
    """Return how many batches the ranks of a mesh work on at once: one for each data-parallel rank."""
    return math.prod(size for name, size in mesh.items() if name not in SHARE_A_BATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPoint:
    """The fastest plan for one shape. What a plan has is None where none fits.

    A shape that cannot be is `impossible`, and `reason` says why. `batch` is what a data-parallel rank has, in samples.
    `communication_ms` is the time of all collectives, `exposed_ms` what they add to the step. `throughput_per_s` is
    of all ranks together. `nodes` are the nodes that a group along each dimension lies on. The rest is as in
    `SearchPoint`.
    """

    mesh: dict[str, int]
    status: ShapeStatus
    reason: str = ""
    batch: int | None = None
    nodes: dict[str, int] = dataclasses.field(default_factory=dict)
    budget_bytes: int | None = None
    gap: float | None = None
    peak_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    with_care: bool = False
    step_ms: float | None = None
    recompute_ms: float | None = None
    recomputed_units: int | None = None
    communication_ms: float | None = None
    exposed_ms: float | None = None
    throughput_per_s: float | None = None
    baseline_peak_bytes: int | None = None
    minimum_budget_bytes: int | None = None

    @property
    def ranks(self) -> int:
        """How many ranks the shape has."""
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool:
        """Whether a plan stays within the budget."""
        return self.peak_bytes is not None

    @property
    def exposed_share(self) -> float | None:
        """The part of the step in which communication is waited for or slows others."""
        return None if not self.step_ms or self.exposed_ms is None else self.exposed_ms / self.step_ms

    @property
    def throughput_per_rank_per_s(self) -> float | None:
        """The throughput of all ranks, divided by them."""
        return None if self.throughput_per_s is None else self.throughput_per_s / self.ranks

    @property
    def order(self) -> tuple[float, ...]:
        """A sort key: shapes that fit, the fastest first; then those that need least; then those that cannot be."""
        if self.fits:
            return float(self.with_care), -(self.throughput_per_s or 0.0)
        return (3.0, 0.0) if self.status == "impossible" else (2.0, float(self.minimum_budget_bytes or math.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSearch(PrintedDocument):
    """Shapes, the best first. `dims` are the dimensions that were varied, outermost first.

    `fixed` is what all shapes have in common, and `samples` how many samples that is. `counts` is what throughput
    counts. `complete` is False when the search was interrupted.
    """

    target: str
    ranks: int
    ranks_per_node: int
    dims: tuple[str, ...]
    budget_bytes: int
    fixed: Fixed
    samples: int | None
    counts: Literal["samples", "tokens"]
    points: tuple[MeshPoint, ...]
    complete: bool = True
    notes: tuple[str, ...] = ()

    @property
    def over(self) -> Literal["mesh"]:
        """What was searched."""
        return "mesh"

    @property
    def fits(self) -> bool:
        """Whether any shape fits."""
        return self.best is not None

    @property
    def best(self) -> MeshPoint | None:
        """The shape with the highest throughput; one that fits only with care if there are no others."""
        return next((point for point in self.points if point.fits), None)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        found = dataclasses.asdict(self)
        for point, values in zip(self.points, found["points"], strict=True):
            values["fits"] = point.fits
            values["exposed_share"] = point.exposed_share
            values["throughput_per_rank_per_s"] = point.throughput_per_rank_per_s
        best = self.best
        return {"over": self.over, "fits": self.fits, "best": None if best is None else best.mesh, **found}

    def __rich__(self) -> RenderableType:
        from memfit.report import mesh_search_report

        return mesh_search_report(self)

    def __repr__(self) -> str:
        best = self.best
        shown = "nothing fits" if best is None else f"best {display_mesh(best.mesh)}"
        return f"MeshSearch({self.ranks} ranks: {shown}; shapes: {len(self.points)})"
