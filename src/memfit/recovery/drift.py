"""Steps that are not those of their plan, in words."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import PlanDrift as PlanDrift
from memfit.units import display_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A step that was not the plan's. `kind` is higher or lower, of a peak on a GPU; growth, of the process on a CPU,
    which `measured_bytes` and `planned_bytes` then are; or inputs, where no more is known.

    `inputs` are those that are not the plan's.
    """

    kind: str
    step: int
    measured_bytes: int | None
    planned_bytes: int
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        planned = display_bytes(self.planned_bytes)
        if self.measured_bytes is None:
            text = f"the inputs of step {self.step} are not those of the plan, whose peak is {planned}"
        elif self.kind == "growth":
            grown = display_bytes(self.measured_bytes)
            text = f"the process grew by {grown} in step {self.step}, and the plan has {planned} for what a step adds"
        else:
            measured = display_bytes(self.measured_bytes)
            text = f"the peak of step {self.step} is {measured}, {self.kind} than the {planned} of the plan"
        if self.inputs:
            text += f": {'; '.join(self.inputs)}"
        return text + "; plan the step again as it is now"
