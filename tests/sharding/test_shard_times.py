"""Under sharding a rank's optimizer works on its shards."""

from __future__ import annotations

import pytest
from llama import Shape, training_step

import memfit
from memfit.capture import Phase
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.sharding import ShardOptions
from memfit.solve import Problem, SolveOptions

SHAPE = Shape(layers=2, hidden=2048, heads=16, key_value_heads=8, feed_forward=4096, vocabulary=4096)


def optimizer_ms(ranks: int, **options: str) -> float:
    trace = memfit.trace(training_step(SHAPE, batch=1, length=128), target="h100-sxm")
    shard = SolveOptions(shard=ShardOptions(**options))
    problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("h100-sxm", ranks=ranks), shard)
    return problem.runtime.by_phase_ms[Phase.OPTIMIZER]


def test_the_optimizers_time_falls_with_the_ranks_down_to_what_kernels_take_at_least() -> None:
    alone, two, eight, many = (optimizer_ms(ranks) for ranks in (1, 2, 8, 512))
    assert two == pytest.approx(alone / 2, rel=0.05)
    assert eight == pytest.approx(alone / 8, rel=0.3) and eight >= alone / 8
    assert alone / 512 < many < eight


def test_shards_in_another_dtype_take_the_time_of_their_bytes() -> None:
    assert optimizer_ms(2, shard_dtype="float32") == pytest.approx(2 * optimizer_ms(2), rel=0.05)
