"""The fastest plan under a memory budget, proven: which units to checkpoint, and how."""

from memfit.solve.blocker import Blocker, blocker_of
from memfit.solve.curve import Curve, CurvePoint, curve_of
from memfit.solve.milp import Incumbent, Limits, SolverError, Status
from memfit.solve.op_policy import SACDecision, get_optimal_checkpointing_policy_per_module
from memfit.solve.options import SolveOptions
from memfit.solve.planned import PlannedTimeline, planned_events, planned_reserved, planned_timeline
from memfit.solve.program import Candidate, Choice, Program
from memfit.solve.sac_milp import SACSolution, sac_milp
from memfit.solve.sharding import Sharding, ShardOptions, ShardUnit, repeated_blocks, shard
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
    "SACDecision",
    "SACSolution",
    "ShardOptions",
    "ShardUnit",
    "Sharding",
    "SolveOptions",
    "Solved",
    "SolverError",
    "Status",
    "blocker_of",
    "curve_of",
    "get_optimal_checkpointing_policy_per_module",
    "minimum_budget_bytes",
    "nothing",
    "planned_events",
    "planned_reserved",
    "planned_timeline",
    "repeated_blocks",
    "sac_milp",
    "shard",
    "solve",
]
