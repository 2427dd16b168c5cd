"""Levers that put something into the host's memory, against closed forms, captures and a measured step."""

from __future__ import annotations

import dataclasses
import gc
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.analysis.levers import Case, Lever
from memfit.analysis.levers.offload import offload
from memfit.analysis.report import Report
from memfit.capture import Category, Phase, Step
from memfit.cost import Collective, CollectiveModel, Roofline, Runtime
from memfit.hardware import Device, Target, load_device
from memfit.hardware.efficiency import Family
from memfit.memory import Timeline, measured
from memfit.sharding import ShardOptions
from memfit.sharding.sharded_step import shard
from tests.devices import without_workspaces

H100 = without_workspaces()

pytestmark = pytest.mark.usefixtures("frozen_heap")

WIDTH, BLOCKS = 512, 4
BLOCK_BYTES = 4 * WIDTH * WIDTH


class Weights(nn.Module):
    """Nothing but products: with few rows, parameters are all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Waves(nn.Module):
    """Nothing but activations: each op saves its result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(6):
            x = torch.tanh(x)
        return x.sum()


def case_of(step: Step, ranks: int = 1, target: str | Device = H100) -> Case:
    aim = Target.parse(target, ranks=ranks)
    report = Report.of_trace(memfit.trace(step, target=aim), target=aim)
    return Case(report=report, step=step, cost=Roofline.of(aim), budget_bytes=aim.usable_bytes)


def levers(case: Case) -> dict[str, Lever]:
    return {each.name: each for each in offload(case)}


def host_step_ms(parameter_bytes: int, state_bytes: int) -> float:
    """Parameters, gradients and state are read, parameters and state written, on one thread."""
    cpu = load_device("cpu")
    moved = parameter_bytes * 3 + state_bytes * 2
    return moved / (cpu.memory_bandwidth_bytes_per_s * cpu.efficiency[Family.OPTIMIZER].bandwidth) * 1e3


def without_a_step(model: nn.Module, _: Any, batch: torch.Tensor) -> None:
    model(batch).backward()
    model.zero_grad()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_on_the_host_leaves_what_a_step_without_one_needs(optimizer: Any) -> None:
    step = Step(Weights, memfit.spec((8, WIDTH)), optimizer=optimizer)
    case = case_of(step)
    each = levers(case)["optimizer on the host"]
    bare = memfit.trace(dataclasses.replace(step, optimizer=None, run=without_a_step), target=H100)
    assert each.peak_bytes == Timeline.of(bare, bare.hardware.allocator.rounding_bytes).peak_bytes
    trained = BLOCKS * BLOCK_BYTES
    state = case.timeline.by_category[Category.OPTIMIZER_STATE].max()
    spent = case.report.runtime.by_phase_ms[Phase.OPTIMIZER]
    there = case.target.device.host_link.copy_ms(trained)
    assert each.costs_ms == pytest.approx(2 * there + host_step_ms(trained, state) - spent, rel=1e-3)


def test_clipping_stays_on_the_device_when_the_optimizer_leaves_it() -> None:
    step = Step(Weights, memfit.spec((8, WIDTH)), optimizer=torch.optim.AdamW)
    cases = [case_of(each) for each in (step, dataclasses.replace(step, clip_grad_norm=1.0))]
    plain, clipped = (levers(case)["optimizer on the host"].costs_ms for case in cases)
    spent = [case.report.runtime.by_phase_ms[Phase.OPTIMIZER] for case in cases]
    assert plain is not None and clipped is not None
    assert abs(clipped - plain) < 0.2 * (spent[1] - spent[0]), "the device is not spared what clipping takes"


@pytest.mark.parametrize("ranks", [2, 8])
def test_shards_on_the_host_leave_what_is_gathered_and_reduced(ranks: int) -> None:
    case = case_of(Step(Weights, memfit.spec((1, WIDTH)), optimizer=torch.optim.AdamW), ranks)
    each = levers(case)["parameters, gradients and optimizer on the host"]
    # backward of a block: its parameters, the next one's buffer, what the last one reduces, its whole gradient
    assert each.peak_bytes == pytest.approx(4 * BLOCK_BYTES, rel=0.01)
    assert case.peak_bytes > each.peak_bytes + 2 * BLOCKS * BLOCK_BYTES // ranks, "the optimizer's state is gone"
    assert f"on {ranks} ranks" in each.how and "CPUOffloadPolicy()" in each.how


def test_every_gather_fetches_its_shards_and_every_reduction_returns_them() -> None:
    ranks = 4
    step = Step(Weights, memfit.spec((1, WIDTH)), optimizer=torch.optim.AdamW)
    target = Target.parse(H100, ranks=ranks)
    trace = memfit.trace(step, target=target)
    runtime = Runtime(trace, [0.0] * len(trace.ops))
    found = shard(Timeline.of(trace, 512), runtime, target, ShardOptions(reduce_dtype="bfloat16"), on_host=True)
    kinds = [each.kind for each in found.transfers]
    assert kinds.count(Collective.ALL_GATHER) == 2 * BLOCKS and kinds.count(Collective.REDUCE_SCATTER) == BLOCKS
    assert {each.host_bytes for each in found.transfers} == {BLOCK_BYTES // ranks}, "in the dtype of the shards"
    cost, link = CollectiveModel(target), target.device.host_link
    alone = sum(cost.collective_ms(each.kind, each.size_bytes) for each in found.transfers)
    assert found.communication_ms == pytest.approx(alone + 3 * BLOCKS * link.copy_ms(BLOCK_BYTES // ranks))
    assert found.exposed_ms - found.beside_ms == pytest.approx(found.communication_ms), "ops without time hide nothing"


def test_shards_on_the_host_take_the_time_of_transfers_and_of_the_hosts_step() -> None:
    case = case_of(Step(Weights, memfit.spec((1, WIDTH)), optimizer=torch.optim.AdamW), 4)
    each = levers(case)["parameters, gradients and optimizer on the host"]
    sharding, options = case.report.problem.sharding, case.report.problem.options.shard
    assert sharding is not None
    runtime = Runtime.of(case.trace, case.cost)
    away = shard(case.report.problem.timeline, runtime, case.target, options, on_host=True)
    kept = BLOCKS * BLOCK_BYTES // 4
    spent = case.report.runtime.by_phase_ms[Phase.OPTIMIZER]
    expected = away.exposed_ms - sharding.exposed_ms + host_step_ms(kept, 2 * kept) - spent
    assert each.costs_ms == pytest.approx(expected, rel=1e-3) and away.exposed_ms > sharding.exposed_ms


def test_activations_on_the_host_peak_where_a_measured_step_does() -> None:
    """The step runs on the CPU, and what autograd saves leaves torch's memory for numpy's."""
    rows = (1024, 1024)
    step = Step(Waves, memfit.spec(rows), optimizer=torch.optim.SGD)
    case = case_of(step)
    each = levers(case)["activations on the host"]
    model, batch = Waves(), torch.randn(rows)

    def to_host(tensor: torch.Tensor) -> Any:
        return tensor if tensor.is_leaf else np.array(tensor.detach().numpy())

    def to_device(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed).clone()

    def train() -> None:
        with torch.autograd.graph.saved_tensors_hooks(to_host, to_device):
            loss = model(batch)
        loss.backward()
        model.zero_grad()

    train()
    gc.collect()
    with measured() as truth:
        train()
    assert each.peak_bytes == pytest.approx(batch.nbytes + truth.peak_bytes, rel=0.01)
    assert case.peak_bytes > 1.9 * each.peak_bytes


def test_one_rank_is_not_told_to_shard() -> None:
    found = offload(case_of(Step(Weights, memfit.spec((8, WIDTH)), optimizer=torch.optim.AdamW)))
    assert not any(re.search("fully_shard|FSDP|CPUOffload", f"{each.how} {each.assumes}") for each in found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cpu_has_no_other_memory(ranks: int) -> None:
    step = Step(Weights, memfit.spec((8, WIDTH)), optimizer=torch.optim.AdamW)
    assert levers(case_of(step, ranks, target="cpu")) == {}


def test_activations_on_the_host_are_a_lever_beside_a_plan_that_was_not_free_to_offload() -> None:
    step = Step(Waves, memfit.spec((64, WIDTH)), optimizer=torch.optim.SGD)
    found = []
    for granted in (None, "1GiB"):
        aim = Target.parse(H100, host_memory=granted)
        report = Report.of(memfit.plan(step, target=aim, progress=False), step)
        case = Case(report=report, step=step, cost=Roofline.of(aim), budget_bytes=aim.usable_bytes)
        found.append("activations on the host" in levers(case))
    assert found == [True, False]
