"""The modules of a step: statistics of each, and the tree they make, under the names of PyTorch's `ilp_utils`."""

from memfit.graph.aggregate import aggregate_stats
from memfit.graph.info import module_info
from memfit.graph.names import display_bytes, is_self_or_submodule, is_submodule
from memfit.graph.stats import ModOrder, ModRuntime, ModStats, ModuleInfo
from memfit.graph.tree import AncestorMatrix, Graph, Node, get_peak_memory_runtime_baseline, parse_module_info

__all__ = [
    "AncestorMatrix",
    "Graph",
    "ModOrder",
    "ModRuntime",
    "ModStats",
    "ModuleInfo",
    "Node",
    "aggregate_stats",
    "display_bytes",
    "get_peak_memory_runtime_baseline",
    "is_self_or_submodule",
    "is_submodule",
    "module_info",
    "parse_module_info",
]
