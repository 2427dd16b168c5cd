"""The plan document: decisions for one step, what they are predicted to do, and the step that they are for."""

from memfit.plan.document import Plan, load
from memfit.plan.facts import peak_at
from memfit.plan.making import plan_of
from memfit.plan.mismatch import PlanMismatch, model_differences
from memfit.plan.planning import curve, plan
from memfit.plan.record import (
    Blocker,
    Checkpoint,
    Estimate,
    Lever,
    PeakAt,
    Prediction,
    ShardedUnit,
    ShardPlan,
    UnitOp,
)

__all__ = [
    "Blocker",
    "Checkpoint",
    "Estimate",
    "Lever",
    "PeakAt",
    "Plan",
    "PlanMismatch",
    "Prediction",
    "ShardPlan",
    "ShardedUnit",
    "UnitOp",
    "curve",
    "load",
    "model_differences",
    "peak_at",
    "plan",
    "plan_of",
]
