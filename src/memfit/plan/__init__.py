"""The plan document: decisions for one step, what they are predicted to do, and the step that they are for."""

from memfit.plan.document import Plan, load
from memfit.plan.facts import peak_at
from memfit.plan.making import plan_of
from memfit.plan.mismatch import PlanMismatch
from memfit.plan.planning import curve, plan
from memfit.plan.record import (
    Checkpoint,
    Estimate,
    PeakAt,
    Prediction,
    ShardedUnit,
    ShardPlan,
    UnitOp,
)

__all__ = [
    "Checkpoint",
    "Estimate",
    "PeakAt",
    "Plan",
    "PlanMismatch",
    "Prediction",
    "ShardPlan",
    "ShardedUnit",
    "UnitOp",
    "curve",
    "load",
    "peak_at",
    "plan",
    "plan_of",
]
