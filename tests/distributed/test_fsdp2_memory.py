"""The model of sharded memory against PyTorch's FSDP2 in two real processes, to the byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.multiprocessing as mp

import memfit
from memfit import spec
from memfit.capture import BEFORE_STEP, Category, Phase, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.sharding import Sharding, ShardOptions, shard
from tests.distributed import fsdp2_cases, fsdp2_ranks
from tests.distributed.measured_steps import bounds_of, check_peak
from tests.sharding.fsdp2_captures import captured

RANKS = 2
CASES = (
    "plain",
    "gradients kept",
    "accumulation",
    "mixed precision",
    "mixed precision, accumulation",
    "shared block",
    "shared block, accumulation",
    "shared block, mixed precision",
    "blocks only",
    "frozen parameters",
    "nested units",
    "optimizer in backward",
    "transformer",
    "transformer, accumulation",
)
EMBEDDING_CASE = "transformer, mixed precision"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        mp.spawn(fsdp2_ranks.measure, (RANKS, str(folder)), nprocs=RANKS)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def predicted(case: Any) -> tuple[Trace, Sharding]:
    model = case.model
    if case.in_backward:
        model = case.model()
        fsdp2_cases.train_in_backward(model)
    batch = case.batch()
    trace = memfit.trace(case.step(model, spec(tuple(batch.shape), batch.dtype)), target="cpu")
    options = ShardOptions(units=case.units)
    return trace, shard(Timeline.of(trace, 1), Runtime.of(trace, Roofline()), Target.parse("cpu", ranks=RANKS), options)


def resident_bytes(trace: Trace, sharding: Sharding) -> int:
    """What is there before the step, the batch included."""
    kept = sum(s.bytes for n, s in enumerate(trace.storages) if s.alloc_at == BEFORE_STEP and n not in sharding.removed)
    return kept + sum(each.size_bytes for each in sharding.allocations if each.begin == BEFORE_STEP)


def made_by_sharding(sharding: Sharding) -> list[int]:
    return [each.size_bytes for each in sharding.allocations if each.ahead and each.begin != BEFORE_STEP]


@pytest.mark.parametrize("name", CASES)
def test_memory_is_that_of_fsdp2_to_the_byte(name: str, measured: list[dict[str, Any]]) -> None:
    trace, sharding = predicted(fsdp2_cases.CASES[name])
    start = resident_bytes(trace, sharding)
    backward = next(index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
    made = made_by_sharding(sharding)
    inputs = sum(s.bytes for s in trace.storages if s.category is Category.INPUT)
    first, last = (each[name] for each in measured)
    assert first["resident_bytes"] == start - inputs, "shards, gradients and optimizer state"
    assert last["resident_bytes"] <= first["resident_bytes"], "the last rank's state has no padding"
    for found in (first, last):
        steps = found["steps"]
        assert all(made == step["made"] for step in steps), "what FSDP2 allocates for itself, one by one"
        check_peak(int(sharding.during[:backward].max()) - start, bounds_of(steps, "forward_peak_bytes"), "forward")
        check_peak(sharding.peak_bytes - start, bounds_of(steps))


@pytest.mark.parametrize("name", [*CASES, EMBEDDING_CASE])
def test_a_step_captured_as_it_is_has_the_peak_of_fsdp2_to_the_byte(name: str, measured: list[dict[str, Any]]) -> None:
    timeline = Timeline.of(captured(fsdp2_cases.CASES[name], "cpu", RANKS), 1)
    for found in measured:
        check_peak(timeline.peak_bytes - timeline.start_bytes, bounds_of(found[name]["steps"]))


def test_an_embedding_in_bfloat16_takes_less_than_is_predicted(measured: list[dict[str, Any]]) -> None:
    trace, sharding = predicted(fsdp2_cases.CASES[EMBEDDING_CASE])
    peak = sharding.peak_bytes - resident_bytes(trace, sharding)
    steps = measured[0][EMBEDDING_CASE]["steps"]
    assert all(made_by_sharding(sharding) == step["made"] for step in steps)
    low, high = bounds_of(steps)
    assert low < peak < 1.03 * high, "its result is float32 in the capture"


def test_all_cases_are_compared() -> None:
    assert tuple(fsdp2_cases.CASES) == (*CASES, EMBEDDING_CASE)
