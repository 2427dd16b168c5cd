"""The names of PyTorch's prototypes in `torch.distributed._tools`, without a GPU and beside the pipeline."""

from memfit.compat.aggregate import aggregate_stats
from memfit.compat.curve import tradeoff_curve
from memfit.compat.greedy import greedy_order
from memfit.compat.info import module_info
from memfit.compat.memory_tracker import MemTracker, ModMemStats, ModState
from memfit.compat.names import display_bytes, is_self_or_submodule, is_submodule
from memfit.compat.op_policy import SACDecision, get_optimal_checkpointing_policy_per_module
from memfit.compat.orders import CallOrders
from memfit.compat.runtime_estimator import RuntimeEstimator
from memfit.compat.sac import MSPS, SACGreedyOrderMeta, SACStats, SACTradeOffStats, sac_stats
from memfit.compat.sac_estimator import SACEstimator
from memfit.compat.sac_milp import SACSolution, sac_milp
from memfit.compat.stats import ModOrder, ModRuntime, ModStats, ModuleInfo
from memfit.compat.tree import AncestorMatrix, Graph, Node, get_peak_memory_runtime_baseline, parse_module_info

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
