"""The plan document: decisions for one step, what they are predicted to do, and the step that they are for."""

from memfit.plans.build import build_plan
from memfit.plans.document import Plan, load
from memfit.plans.mismatch import PlanMismatch, find_model_differences
from memfit.plans.planning import curve, plan
from memfit.plans.record import (
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
from memfit.plans.search_result import Search, SearchInterrupted, SearchPoint
from memfit.plans.searching import search
from memfit.plans.trace_record import peak_at

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
    "build_plan",
    "curve",
    "find_model_differences",
    "load",
    "peak_at",
    "plan",
    "search",
]
