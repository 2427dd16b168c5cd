"""The fastest plan under a memory budget, proven: which units to checkpoint, and how."""

from memfit.solve.blocker import BlockingPeak, find_blocker
from memfit.solve.curve import Curve, CurvePoint, build_curve, check_points
from memfit.solve.decisions import DECISIONS, DEFAULT_DECISIONS, EXACT, Decided
from memfit.solve.micro_batches import count_micro_batches
from memfit.solve.milp import Incumbent, Limits, Milp, Solution, SolverError, Status, relative_gap
from memfit.solve.min_budget import MinBudget
from memfit.solve.options import SolveOptions
from memfit.solve.program import Candidate, Choice, Program
from memfit.solve.solution import Problem, Solved, choose_nothing, minimum_budget_bytes, replay, solve

__all__ = [
    "DECISIONS",
    "DEFAULT_DECISIONS",
    "EXACT",
    "BlockingPeak",
    "Candidate",
    "Choice",
    "Curve",
    "CurvePoint",
    "Decided",
    "Incumbent",
    "Limits",
    "Milp",
    "MinBudget",
    "Problem",
    "Program",
    "Solution",
    "SolveOptions",
    "Solved",
    "SolverError",
    "Status",
    "build_curve",
    "check_points",
    "choose_nothing",
    "count_micro_batches",
    "find_blocker",
    "minimum_budget_bytes",
    "relative_gap",
    "replay",
    "solve",
]
