"""Takes one model through memfit: captured, planned, applied and compared with the plain model."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import torch

import memfit
from memfit import Step
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.solve import Problem, minimum_budget_bytes

PART = 1 / 3
"""The budget, as a part of the way from the smallest that can be met to what the plain step takes."""
LARGEST_PARAMETERS = 60_000_000
"""A step of a larger model takes more time and memory than a table of hundreds has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What came of one model; what was not reached is None, and `error` says why.

    Differences are measured less predicted bytes, of the plain step and of the planned one. `speed` is the time of the
    planned step over that of the plain one. `refused` is an error of memfit's own: what it says it cannot do.
    """

    library: str
    name: str
    model: str = ""
    parameters: int | None = None
    ops: int | None = None
    plain_bytes: int | None = None
    plain_difference_bytes: int | None = None
    budget_bytes: int | None = None
    planned_bytes: int | None = None
    planned_difference_bytes: int | None = None
    units: int | None = None
    same_bits: bool | None = None
    speed: float | None = None
    plan_s: float | None = None
    note: str = ""
    refused: bool = False
    error: str = ""

    @property
    def holds(self) -> bool:
        """Whether everything is as it should be."""
        return (
            not self.error
            and not self.plain_difference_bytes
            and self.planned_bytes is not None
            and self.budget_bytes is not None
            and self.planned_bytes <= self.budget_bytes
            and self.same_bits is True
        )


class Untrainable(Exception):
    """The step fails in plain PyTorch: nothing of memfit's was run."""


def train_plainly(step: Step) -> None:
    """Run two plain steps; raise `Untrainable` where PyTorch itself fails."""
    model = step.build_model()
    parameters = sum(each.numel() for each in model.parameters())
    if parameters > LARGEST_PARAMETERS:
        raise Untrainable(f"{parameters:,} parameters, more than this table's {LARGEST_PARAMETERS:,}")
    try:
        optimizer = step.build_optimizer(model)
        for _ in range(2):
            step.execute(model, optimizer, "cpu")
    except Exception as error:
        raise Untrainable(f"{type(error).__name__}: {error}") from error


def examine(library: str, name: str, step: Step) -> Examined:
    """Plan the step at a budget between the smallest and its own peak, and verify the plan on the real model."""
    model = step.build_model()
    known = {
        "library": library,
        "name": name,
        "model": type(model).__name__,
        "parameters": sum(each.numel() for each in model.parameters()),
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _examine(known, step)
    except memfit.MemfitError as error:
        return Examined(**known, refused=True, error=f"{type(error).__name__}: {error}")
    except Exception as error:
        return Examined(**known, error=f"{type(error).__name__}: {error}")


def _examine(known: dict[str, object], step: Step) -> Examined:
    begun = time.perf_counter()
    trace = memfit.trace(step, target="cpu")
    problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("cpu"))
    low, high = minimum_budget_bytes(problem), problem.baseline_bytes
    budget = high if low is None else low + int((high - low) * PART)
    plan = memfit.plan(trace, budget=budget, progress=False)
    plan_s = time.perf_counter() - begun
    found = plan.verify(step, steps=3, time_tolerance=None)
    baseline, baseline_step, exactness = found.baseline_peak, found.baseline_step, found.exactness
    wrong = [each for each in found.findings if "bits" not in each]
    return Examined(
        **known,  # type: ignore[arg-type]
        ops=len(trace.ops),
        plain_bytes=None if baseline is None else baseline.measured_bytes,
        plain_difference_bytes=None if baseline is None else baseline.measured_bytes - Timeline.of(trace).peak_bytes,
        budget_bytes=budget,
        planned_bytes=found.peak.measured_bytes,
        planned_difference_bytes=found.peak.difference_bytes,
        units=len(plan.checkpoint),
        same_bits=None if exactness is None else exactness.equal,
        speed=None if baseline_step is None else found.step.measured_ms / baseline_step.measured_ms,
        plan_s=plan_s,
        note=" ".join(trace.notes),
        error="; ".join(wrong) if not found.ok else found.skipped or "",
    )


def seed() -> None:
    """Make the model, its batch and the run the same in every process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
