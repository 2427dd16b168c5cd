"""Under sharding a rank's optimizer works on its shards, and communication costs more than its waits."""

from __future__ import annotations

import pytest
from llama import Shape, training_step

import memfit
from memfit.capture import Phase
from memfit.cost import CollectiveModel, Roofline, Runtime
from memfit.hardware import Target
from memfit.sharding import ShardOptions
from memfit.sharding.schedule import copies_ms
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


def test_communication_costs_copies_and_slower_kernels_beside_its_waits() -> None:
    trace = memfit.trace(training_step(SHAPE, batch=1, length=128), target="h100-sxm")
    problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("h100-sxm", ranks=8), SolveOptions())
    sharding = problem.sharding
    assert sharding is not None
    copied_ms = copies_ms(sharding.schedule, trace.hardware)
    hidden_ms = sharding.communication_ms - (sharding.exposed_ms - sharding.beside_ms)
    slowdown = CollectiveModel(Target.parse("h100-sxm", ranks=8)).backend.slowdown
    assert 0 < copied_ms < sharding.beside_ms < copied_ms + slowdown * hidden_ms
    assert problem.exposed_ms == sharding.exposed_ms


def test_ranks_of_one_cpu_hide_nothing_and_have_no_kernels_to_slow_down() -> None:
    tiny = Shape(layers=1, hidden=64, heads=2, key_value_heads=2, feed_forward=64, vocabulary=64)
    trace = memfit.trace(training_step(tiny, batch=1, length=16), target="cpu")
    problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("cpu", ranks=2), SolveOptions())
    sharding = problem.sharding
    assert sharding is not None and sharding.beside_ms == copies_ms(sharding.schedule, trace.hardware) > 0
    assert sharding.exposed_ms - sharding.beside_ms == pytest.approx(sharding.communication_ms)


def test_ranks_of_a_cpu_that_send_to_each_other_need_less_than_gloos_reduce_scatter() -> None:
    """Gloo's is an all-reduce, of twice the bytes; memfit's runtime sends each part to the rank that keeps it."""
    trace = memfit.trace(training_step(SHAPE, batch=1, length=16), target="cpu")
    found = {}
    for engine in ("fsdp2", "sharded"):
        options = SolveOptions(shard=ShardOptions(engine=engine))  # type: ignore[arg-type]
        sharding = Problem.of(Runtime.of(trace, Roofline()), Target.parse("cpu", ranks=4), options).sharding
        assert sharding is not None
        found[engine] = sharding.communication_ms
    assert found["sharded"] == pytest.approx(3 / 4 * found["fsdp2"], rel=0.1), "two gathers and a half reduction"
