"""The model of a replicated step against PyTorch's DistributedDataParallel in two real processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import memfit
from memfit import spec
from memfit.capture import BEFORE_STEP, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.sharding import Sharding, ShardOptions, shard
from tests.distributed import ddp_ranks
from tests.distributed.measured_steps import bounds_of, check_peak

RANKS = 2
CASES = ("plain", "views", "small buckets", "buffers", "accumulation", "SGD", "views, SGD")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ddp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        mp.spawn(ddp_ranks.measure, (RANKS, str(folder)), nprocs=RANKS)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def options_of(case: Any) -> ShardOptions:
    cap = {} if case.bucket_cap_mb is None else {"bucket_cap_bytes": case.bucket_cap_mb << 20}
    return ShardOptions(parallel="ddp", gradient_as_bucket_view=case.gradient_as_bucket_view, **cap)


def predicted(case: Any) -> tuple[Trace, Sharding]:
    trace = memfit.trace(case.step(case.model, spec((case.rows, 64))), target="cpu")
    target = Target.parse("cpu", ranks=RANKS)
    return trace, shard(Timeline.of(trace, 1), Runtime.of(trace, Roofline()), target, options_of(case))


def resident_bytes(trace: Trace, sharding: Sharding) -> int:
    kept = sum(s.bytes for n, s in enumerate(trace.storages) if s.alloc_at == BEFORE_STEP and n not in sharding.removed)
    return kept + sum(each.size_bytes for each in sharding.allocations if each.begin == BEFORE_STEP)


@pytest.mark.parametrize("name", CASES)
def test_memory_is_that_of_ddp(name: str, measured: list[dict[str, Any]]) -> None:
    trace, sharding = predicted(ddp_ranks.CASES[name])
    start = resident_bytes(trace, sharding)
    gradients = sum(trace.storages[each.storage].bytes for each in trace.parameters if each.trainable)
    assert sum(sharding.buckets) == gradients, "a bucket has a place for every gradient"
    for found in (rank[name] for rank in measured):
        used = 8 * found["parameters"]  # which parameters were used: an int32 for each, here and on the device
        assert abs(found["kept_bytes"] - found["state_bytes"] - sum(sharding.buckets)) <= used + 4096
        low, high = bounds_of(found["steps"])
        check_peak(sharding.peak_bytes - start, (low, high + used))


@pytest.mark.parametrize("name", ["plain", "small buckets"])
def test_buckets_are_filled_as_torch_fills_them(name: str) -> None:
    case = ddp_ranks.CASES[name]
    trace, sharding = predicted(case)
    options = options_of(case)
    model = case.model()
    parameters = [each for each in reversed(list(model.parameters())) if each.requires_grad]
    # weights and biases of a layer arrive together, the later layer first
    first = 1 << 20 if options.first_bucket_is_small else options.bucket_cap_bytes
    theirs, _ = dist._compute_bucket_assignment_by_size(
        parameters, [first, options.bucket_cap_bytes], [False] * len(parameters), list(range(len(parameters)))
    )
    sizes = [sum(parameters[i].numel() * 4 for i in bucket) for bucket in theirs]
    assert len(sharding.buckets) == len(sizes) > 1
    assert sum(sharding.buckets) == sum(sizes)
    assert len(trace.parameters) > len(parameters), "what is frozen has no place in a bucket"
    assert torch.tensor(sharding.buckets).sub(torch.tensor(sizes)).abs().max() <= 4 * 3000  # a bias more or less
