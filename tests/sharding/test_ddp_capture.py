"""DistributedDataParallel captured on ranks that are not there, against the planner's schedule of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit import Step, spec
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.sharding import Sharding, ShardOptions, captured_ranks, shard
from tests.distributed import ddp_ranks
from tests.distributed.data_parallel_ranks import Pictures, Words

RANKS = 8
STEPS = {
    "layers": (ddp_ranks.Net, spec((32, 64))),
    "buffers": (ddp_ranks.normed, spec((32, 64))),
    "tied embedding": (Words, spec((4, 16), torch.int64)),
    "convolutions": (Pictures, spec((4, 3, 12, 12))),
}
WRAPPED: dict[str, dict[str, Any]] = {
    "as it is": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.05},
}


class Passes:
    """Micro-batches, all but the last without reductions."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        for number in range(self.count):
            waits = number < self.count - 1 and isinstance(model, DistributedDataParallel)
            with model.no_sync() if waits else nullcontext():
                model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def planned(model: Any, batch: torch.Tensor, target: str, passes: int, options: dict[str, Any]) -> Sharding:
    trace = memfit.trace(Step(model, batch, run=Passes(passes)), target=target)
    given = dict(options)
    cap = {"bucket_cap_bytes": int(given.pop("bucket_cap_mb") * (1 << 20))} if "bucket_cap_mb" in given else {}
    timeline = Timeline.of(trace, 1 if target == "cpu" else 512)
    chosen = ShardOptions(parallel="ddp", **cap, **given)
    return shard(timeline, Runtime.of(trace, Roofline()), Target.parse(target, ranks=RANKS), chosen)


def captured(model: Any, batch: torch.Tensor, target: str, passes: int, options: dict[str, Any]) -> Sharding:
    def build() -> nn.Module:
        return DistributedDataParallel(model(), **options)

    trace = memfit.trace(Step(build, batch, run=Passes(passes)), target=target, mesh={"dp": RANKS})
    timeline = Timeline.of(trace, 1 if target == "cpu" else 512)
    return captured_ranks(timeline, Runtime.of(trace, Roofline()), Target.parse(target, ranks=RANKS))


def reductions(sharding: Sharding) -> list[tuple[str, int, str]]:
    return [
        (each.kind.value, each.size_bytes, each.stream.value)
        for each in sharding.schedule.transfers
        if each.kind.value == "all_reduce"
    ]


@pytest.mark.parametrize("options", WRAPPED.values(), ids=list(WRAPPED))
@pytest.mark.parametrize("name", STEPS)
def test_buckets_order_and_peak_are_those_of_the_planner(name: str, options: dict[str, Any]) -> None:
    model, batch = STEPS[name]
    ours, theirs = planned(model, batch, "h100-sxm", 1, options), captured(model, batch, "h100-sxm", 1, options)
    assert reductions(ours) == reductions(theirs)
    assert sum(ours.buckets) == sum(each.numel() * 4 for each in model().parameters() if each.requires_grad)
    assert ours.peak_bytes == theirs.peak_bytes


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["as it is", "views"])
def test_accumulated_micro_batches(target: str, options: dict[str, Any]) -> None:
    model, batch = STEPS["layers"]
    ours, theirs = planned(model, batch, target, 2, options), captured(model, batch, target, 2, options)
    assert reductions(ours) == reductions(theirs) and len(ours.buckets) == 2, "of the last micro-batch alone"
    assert ours.peak_bytes == theirs.peak_bytes


def test_reductions_overlap_the_backward_and_are_waited_for_when_it_ends() -> None:
    model, batch = STEPS["layers"]
    for options in (WRAPPED["as it is"], WRAPPED["views"]):
        ours, theirs = planned(model, batch, "h100-sxm", 1, options), captured(model, batch, "h100-sxm", 1, options)
        assert theirs.schedule.transfers[0].issued + 10 < theirs.schedule.transfers[0].needed
        assert 0 < theirs.exposed_ms < theirs.communication_ms
        # the planner counts copies in and out of buckets as communication; here they are ops of the step
        assert theirs.communication_ms < ours.communication_ms
