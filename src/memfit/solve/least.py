"""The smallest budget that any plan fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memfit.solve.checkpoint import CheckpointModel
from memfit.solve.milp import Limits, Status
from memfit.solve.program import Choice, Program

_TOLERANCE_BYTES = 1024
"""A thousandth of a MiB, the unit of the program's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBudget:
    """The lowest peak found, the plan that has it, and the proven bound below which nothing can be."""

    choice: Choice
    peak_bytes: int
    bound_bytes: int

    @property
    def proven(self) -> bool:
        """Whether no plan has a lower peak, to what the solver's tolerances make of a budget."""
        return self.peak_bytes <= self.bound_bytes + _TOLERANCE_BYTES


def least_budget(program: Program, limits: Limits | None = None) -> LeastBudget | None:
    """The plan with the lowest peak; None when the solver found none in its time.

    Of the plans with that peak the solver gives any: solve again at this budget for the fastest of them.
    """
    model = CheckpointModel(program, least_budget=True)
    solved = model.milp.solve(replace(limits or Limits(), gap=0.0))
    if solved.status not in (Status.OPTIMAL, Status.FEASIBLE):
        return None
    choice = model.choice_of(solved.values)
    scale = 1 << 20
    return LeastBudget(
        choice=choice,
        peak_bytes=program.peak_bytes(choice),
        bound_bytes=math.floor(solved.bound * scale),
    )
