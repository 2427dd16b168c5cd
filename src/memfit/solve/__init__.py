"""The fastest plan under a memory budget, proven: which units to checkpoint, and how."""

from memfit.solve.blocker import Blocker, find_blocker
from memfit.solve.curve import Curve, CurvePoint, build_curve
from memfit.solve.milp import Incumbent, Limits, SolverError, Status
from memfit.solve.options import SolveOptions
from memfit.solve.planned import PlannedTimeline, planned_events, planned_reserved, planned_timeline
from memfit.solve.program import Candidate, Choice, Program
from memfit.solve.solution import Problem, Solved, minimum_budget_bytes, nothing, solve

__all__ = [
    "Blocker",
    "Candidate",
    "Choice",
    "Curve",
    "CurvePoint",
    "Incumbent",
    "Limits",
    "PlannedTimeline",
    "Problem",
    "Program",
    "SolveOptions",
    "Solved",
    "SolverError",
    "Status",
    "build_curve",
    "find_blocker",
    "minimum_budget_bytes",
    "nothing",
    "planned_events",
    "planned_reserved",
    "planned_timeline",
    "solve",
]
