"""The plan document: decisions for one step, what they are predicted to do, and the step that they are for."""

from memfit.plan.document import Plan, load
from memfit.plan.facts import peak_at
from memfit.plan.making import plan_of
from memfit.plan.mismatch import PlanMismatch, model_differences
from memfit.plan.planning import curve, plan
from memfit.plan.record import (
    Blocker,
    Checkpoint,
    DdpPlan,
    Estimate,
    PeakAt,
    Prediction,
    ShardedUnit,
    ShardPlan,
    UnitOp,
)
from memfit.plan.search_result import Search, SearchInterrupted, SearchPoint
from memfit.plan.searching import search

__all__ = [
    "Blocker",
    "Checkpoint",
    "DdpPlan",
    "Estimate",
    "PeakAt",
    "Plan",
    "PlanMismatch",
    "Prediction",
    "Search",
    "SearchInterrupted",
    "SearchPoint",
    "ShardPlan",
    "ShardedUnit",
    "UnitOp",
    "curve",
    "load",
    "model_differences",
    "peak_at",
    "plan",
    "plan_of",
    "search",
]
