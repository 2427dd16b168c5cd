"""What each unit can give up for how much time: exact frontiers."""

from memfit.memory import Unit
from memfit.tradeoff.columns import PICOSECONDS, UPDATES, Times, TraceColumns
from memfit.tradeoff.frontier import Frontier, Frontiers, build_frontier, build_frontiers
from memfit.tradeoff.offload import (
    OffloadWindow,
    add_offload,
    build_offloads,
    choose_level,
    find_windows,
    host_bytes,
    limit_offload,
)
from memfit.tradeoff.pareto import lower_hull
from memfit.tradeoff.policy import Policy, Role, UnitColumns, build_recompute, lost_inputs
from memfit.tradeoff.units import LOSS, call_name, find_units, forward_calls

__all__ = [
    "LOSS",
    "PICOSECONDS",
    "UPDATES",
    "Frontier",
    "Frontiers",
    "OffloadWindow",
    "Policy",
    "Role",
    "Times",
    "TraceColumns",
    "Unit",
    "UnitColumns",
    "add_offload",
    "build_frontier",
    "build_frontiers",
    "build_offloads",
    "build_recompute",
    "call_name",
    "choose_level",
    "find_units",
    "find_windows",
    "forward_calls",
    "host_bytes",
    "limit_offload",
    "lost_inputs",
    "lower_hull",
]
