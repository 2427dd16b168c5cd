"""How fast the prototype's own checkpointing problem is solved, on one graph, by memfit and by PyTorch's `sac_milp`.

The graph is memfit's, of 16 layers like Llama's, sharded over eight ranks so that activations decide. The budget lies
in the middle between the smallest that can be met and the baseline. PyTorch's solver may stop at a gap of 5 % or
after 180 s; memfit's proves its answer. PyTorch's needs `pulp` below 4 (`pip install memfit[bench]`).
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch

import memfit
from memfit.compat import Graph, module_info, parse_module_info
from memfit.compat.sac_milp import sac_milp
from memfit.cost import Roofline, Runtime
from memfit.units import GiB, MiB, display_bytes

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import Shape, training_step

SHAPE = Shape(layers=16, hidden=1024, heads=16, key_value_heads=16, feed_forward=4096, vocabulary=32000)

RANKS = 8
REPEATS = 5


def module_graph() -> Graph:
    """The modules of the 16 layers that benchmarks/estimate_speed.py has."""
    trace = memfit.trace(training_step(SHAPE, length=512, dtype=torch.float32), target="h100-sxm")
    return parse_module_info(module_info(Runtime.of(trace, Roofline())))


def smallest_bytes(graph: Graph, baseline_bytes: int) -> int:
    """The smallest budget that can be met, to a MiB."""
    low, high = 0, baseline_bytes
    while high - low > MiB:
        middle = (low + high) // 2
        if sac_milp(graph, middle / GiB, RANKS).peak_mem < 0:
            low = middle
        else:
            high = middle
    return high


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compare()


def compare() -> None:
    from torch.distributed._tools.sac_ilp import sac_milp as their_sac_milp

    graph = module_graph()
    baseline_bytes = sac_milp(graph, math.inf, RANKS).peak_mem
    smallest = smallest_bytes(graph, baseline_bytes)
    budget_bytes = (smallest + baseline_bytes) // 2
    budget = budget_bytes / GiB
    print(
        f"{len(graph.nodes)} modules, {RANKS} ranks: baseline {display_bytes(baseline_bytes)}, "
        f"smallest {display_bytes(smallest)}, budget {display_bytes(budget_bytes)}"
    )

    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        ours = sac_milp(graph, budget, RANKS)
        seconds.append(time.perf_counter() - began)
    our_seconds = statistics.median(seconds)
    print(
        f"memfit:  {our_seconds:.3f} s (median of {REPEATS}), recompute {ours.recomputation_time:.4f} ms, "
        f"peak {display_bytes(ours.peak_mem)}, {ours.status.value}, gap {ours.gap:g}, {ours.rows} rows"
    )

    theirs = copy.deepcopy(graph)
    began = time.perf_counter()
    decisions, their_ms, their_bytes = their_sac_milp(theirs, budget, RANKS)  # type: ignore[arg-type]
    their_seconds = time.perf_counter() - began
    if decisions:
        print(f"PyTorch: {their_seconds:.1f} s, recompute {their_ms:.2f} ms, peak {display_bytes(their_bytes)}")
    else:
        print(f"PyTorch: {their_seconds:.1f} s, no answer")
    print(f"times faster than PyTorch's sac_milp: {their_seconds / our_seconds:.0f} (must be at least 50)")


if __name__ == "__main__":
    main()
