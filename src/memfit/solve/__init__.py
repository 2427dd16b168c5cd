"""The fastest plan under a memory budget, proven: which units to checkpoint, and how."""

from memfit.solve.blocker import BlockingPeak, find_blocker
from memfit.solve.curve import Curve, CurvePoint, build_curve
from memfit.solve.milp import Incumbent, Limits, SolverError, Status
from memfit.solve.options import SolveOptions
from memfit.solve.program import Candidate, Choice, Program
from memfit.solve.solution import Problem, Solved, choose_nothing, minimum_budget_bytes, replay, solve

__all__ = [
    "BlockingPeak",
    "Candidate",
    "Choice",
    "Curve",
    "CurvePoint",
    "Incumbent",
    "Limits",
    "Problem",
    "Program",
    "SolveOptions",
    "Solved",
    "SolverError",
    "Status",
    "build_curve",
    "choose_nothing",
    "find_blocker",
    "minimum_budget_bytes",
    "replay",
    "solve",
]
