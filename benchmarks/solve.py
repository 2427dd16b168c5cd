"""How fast memfit proves a plan, and how that grows with depth: Llama shapes of 32, 64 and 126 layers, sharded.

Then encoders of PyTorch's own layers on one device, whose policies have nearly the same price per byte.

Last, the ratio to PyTorch's own solver on the prototype's own problem (peers/solve_prototype.py), which takes three
minutes: its time limit. `--alone` leaves it out.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import memfit
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.sharding import ShardOptions
from memfit.solve import Problem, SolveOptions, Status, minimum_budget_bytes, solve

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama import Shape, training_step

RANKS = 512
PARTS = (0.02, 0.15, 0.3, 0.5, 0.7)
OPTIONS = SolveOptions(shard=ShardOptions(shard_dtype="float32", reduce_dtype="float32"))


def seconds_to_solve(layers: int) -> float:
    """The sum over budgets between the smallest and the baseline, everything but the capture included."""
    shape = Shape(layers=layers, hidden=16384, heads=128, key_value_heads=8, feed_forward=53248)
    trace = memfit.trace(training_step(shape), target="h100-sxm")
    preparations = []
    for _ in range(3):
        began = time.perf_counter()
        problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("h100-sxm", ranks=RANKS), OPTIONS)
        preparations.append(time.perf_counter() - began)
    prepared = statistics.median(preparations)
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


ENCODERS = (("rtx-4090", 24, (8, 10, 12)), ("rtx-3090", 12, (6,)))


def slowest_encoder(dropout: float, length: int) -> float:
    """The slowest solve over devices and budgets of encoders with this dropout and sequence length."""
    slowest = 0.0
    for name, layers, budgets in ENCODERS:

        def encoder(layers: int = layers) -> nn.Module:
            return nn.Sequential(
                *(nn.TransformerEncoderLayer(1024, 16, 4096, dropout=dropout, batch_first=True) for _ in range(layers))
            )

        batch = memfit.spec((8, length, 1024), torch.float32)
        step = memfit.Step(encoder, batch, loss=lambda output, _: output.square().mean())
        target = Target.parse(name)
        problem = Problem.of(Runtime.of(memfit.trace(step, target=name), Roofline.of(target)), target)
        for budget in budgets:
            solved = solve(problem, budget << 30)
            assert solved.status is Status.OPTIMAL and solved.gap < 1e-9
            slowest = max(slowest, solved.seconds)
    return slowest


def main() -> None:
    seconds_to_solve(4)
    taken = {layers: seconds_to_solve(layers) for layers in (32, 64, 126)}
    print(f"growth from 32 to 64 layers: {taken[64] / taken[32]:.2f} (must be at most 2.5)")
    print(f"growth from 64 to 126 layers: {taken[126] / taken[64]:.2f} (must be at most 2.5)")
    print(f"126 layers, prepared and solved: {taken[126]:.2f} s (must be at most 30)")
    encoders = [slowest_encoder(dropout, length) for dropout in (0.1, 0.0) for length in (512, 768, 1024)]
    print(f"encoders of 12 and 24 layers, slowest solve: {max(encoders):.2f} s (must be at most 10)", flush=True)
    if "--alone" not in sys.argv:
        peer = Path(__file__).parent / "peers" / "solve_prototype.py"
        subprocess.run([sys.executable, str(peer)], check=True)


if __name__ == "__main__":
    main()
