"""How fast memfit proves a plan, and how that grows with depth: Llama shapes of 32, 64 and 126 layers, sharded.

The comparison with PyTorch's own solver is benchmarks/solve_prototype.py.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import memfit
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.solve import Problem, ShardOptions, SolveOptions, Status, minimum_budget_bytes, solve

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama import Shape, training_step

RANKS = 512
PARTS = (0.02, 0.15, 0.3, 0.5, 0.7)
OPTIONS = SolveOptions(shard=ShardOptions(shard_dtype="float32", reduce_dtype="float32"))


def seconds_to_solve(layers: int) -> float:
    """The sum over budgets between the smallest and the baseline, everything but the capture included."""
    shape = Shape(layers=layers, hidden=16384, heads=128, key_value_heads=8, feed_forward=53248)
    trace = memfit.trace(training_step(shape), target="h100-sxm")
    began = time.perf_counter()
    problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("h100-sxm", ranks=RANKS), OPTIONS)
    prepared = time.perf_counter() - began
    least, most = minimum_budget_bytes(problem), problem.baseline_bytes
    assert least is not None
    times = []
    for part in PARTS:
        began = time.perf_counter()
        solved = solve(problem, int(least + part * (most - least)))
        times.append(time.perf_counter() - began)
        assert solved.status is Status.OPTIMAL and solved.gap < 1e-9 and solved.replay is not None
        print(
            f"  {layers} layers, budget {solved.budget_bytes / 2**30:.1f} GiB: {times[-1]:.2f} s, {solved.rows} rows, "
            f"{solved.columns} columns, adds {solved.recompute_ms:.1f} ms, gap {solved.gap:.0e}, "
            f"replayed peak {solved.replay.peak_bytes / 2**30:.1f} GiB"
        )
    print(f"{layers} layers: prepared in {prepared:.2f} s, slowest solve {max(times):.2f} s")
    return prepared + statistics.median(times)


def main() -> None:
    seconds_to_solve(4)
    taken = {layers: seconds_to_solve(layers) for layers in (32, 64, 126)}
    print(f"growth from 32 to 64 layers: {taken[64] / taken[32]:.2f} (must be at most 2.5)")
    print(f"growth from 64 to 126 layers: {taken[126] / taken[64]:.2f} (must be at most 2.5)")
    print(f"126 layers, prepared and solved: {taken[126]:.2f} s (must be at most 30)")


if __name__ == "__main__":
    main()
