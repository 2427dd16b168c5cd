"""The names of PyTorch's prototypes in `torch.distributed._tools`, without a GPU and beside the pipeline."""

from memfit.compat.aggregate import aggregate_stats
from memfit.compat.graph import (
    AncestorMatrix,
    Graph,
    ModOrder,
    ModRuntime,
    ModStats,
    ModuleInfo,
    Node,
    display_bytes,
    get_peak_memory_runtime_baseline,
    is_self_or_submodule,
    is_submodule,
    parse_module_info,
)
from memfit.compat.memory_tracker import MemTracker, ModMemStats, ModState
from memfit.compat.module_stats import module_info
from memfit.compat.runtime_estimator import CallOrders, RuntimeEstimator
from memfit.compat.sac import MSPS, SACGreedyOrderMeta, SACStats, SACTradeOffStats, greedy_order, sac_stats
from memfit.compat.sac_estimator import SACEstimator
from memfit.compat.sac_milp import SACDecision, SACSolution, get_optimal_checkpointing_policy_per_module, sac_milp
from memfit.compat.tradeoff_curve import tradeoff_curve

__all__ = [
    "MSPS",
    "AncestorMatrix",
    "CallOrders",
    "Graph",
    "MemTracker",
    "ModMemStats",
    "ModOrder",
    "ModRuntime",
    "ModState",
    "ModStats",
    "ModuleInfo",
    "Node",
    "RuntimeEstimator",
    "SACDecision",
    "SACEstimator",
    "SACGreedyOrderMeta",
    "SACSolution",
    "SACStats",
    "SACTradeOffStats",
    "aggregate_stats",
    "display_bytes",
    "get_optimal_checkpointing_policy_per_module",
    "get_peak_memory_runtime_baseline",
    "greedy_order",
    "is_self_or_submodule",
    "is_submodule",
    "module_info",
    "parse_module_info",
    "sac_milp",
    "sac_stats",
    "tradeoff_curve",
]
