"""Sharded modules that run several times in a step: accumulation, shared modules, gradients used up in the backward."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit import Step, spec
from memfit.capture import Category, Phase, Trace
from memfit.cost import Collective, CollectiveModel, Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import CATEGORIES, Timeline
from memfit.sharding import Sharding, ShardOptions, shard
from memfit.sharding.sharded_step import shard_bytes

WIDTH, RANKS, PASSES = 64, 4, 3
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4
TARGET = Target.parse("cpu", ranks=RANKS)
GPUS = Target.parse("h100-sxm", ranks=RANKS)
GATHER, REDUCE = Collective.ALL_GATHER, Collective.REDUCE_SCATTER


class Model(nn.Module):
    order = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for number in self.order:
            x = self.blocks[number](x).relu()
        return self.head(x)


class Shared(Model):
    order = (0, 1, 0)


class SharedInARow(Model):
    order = (0, 0, 1)


def captured(model: type[nn.Module], **options) -> Trace:
    return memfit.trace(Step(model, spec((2, 10)), loss=lambda out, _: out.sum(), **options), target="cpu")


@pytest.fixture(scope="module")
def once() -> Trace:
    return captured(Model)


@pytest.fixture(scope="module")
def accumulated() -> Trace:
    return captured(Model, accumulation_steps=PASSES)


def sharded(
    trace: Trace, op_ms: list[float] | None = None, options: ShardOptions | None = None, target: Target = TARGET
) -> Sharding:
    runtime = Runtime.of(trace, Roofline()) if op_ms is None else Runtime(trace, op_ms)
    return shard(Timeline.of(trace, 1), runtime, target, options)


def waits_ms(sharding: Sharding) -> float:
    return sharding.exposed_ms - sharding.beside_ms


def level(sharding: Sharding, category: Category, op: int) -> int:
    return int(sharding.during_by_row[CATEGORIES.index(category), op])


def moves(sharding: Sharding) -> list[tuple[Collective, str]]:
    return [(each.kind, each.module) for each in sharding.transfers]


def test_a_pass_gathers_twice_and_reduces_once_for_each_block(once: Trace) -> None:
    assert moves(sharded(once)) == [
        (GATHER, ""),
        (GATHER, "blocks.0"),
        (GATHER, "blocks.1"),
        (GATHER, "blocks.1"),
        (GATHER, "blocks.0"),
        (REDUCE, "blocks.1"),
        (REDUCE, "blocks.0"),
        (REDUCE, ""),
    ]


def test_every_pass_of_accumulation_moves_the_same(once: Trace, accumulated: Trace) -> None:
    single, several = sharded(once), sharded(accumulated)
    assert moves(several) == moves(single) * PASSES
    assert several.communication_ms == pytest.approx(PASSES * single.communication_ms)
    assert all(len(unit.calls) == PASSES for unit in several.units)


def test_between_passes_there_are_shards_of_parameters_and_gradients_only(accumulated: Trace) -> None:
    found = sharded(accumulated)
    shards = sum(shard_bytes(parameter, RANKS) for parameter in accumulated.parameters)
    for call in next(unit for unit in found.units if not unit.module).calls[1:]:
        column = {c: int(found.before_by_row[row, call.begin]) for row, c in enumerate(CATEGORIES)}
        root = next(unit for unit in found.units if not unit.module).gathered_bytes
        block = BLOCK_BYTES if call.begin == found.units[1].calls[0].begin else 0
        assert column[Category.GRADIENT] == column[Category.PARAMETER] == shards
        assert column[Category.GATHERED_PARAMETER] == root + block
    last = len(accumulated.ops) - 1
    assert level(found, Category.GRADIENT, last) == shards


def test_a_later_pass_has_its_whole_gradient_until_it_is_reduced(accumulated: Trace) -> None:
    found = sharded(accumulated)
    shards = sum(shard_bytes(parameter, RANKS) for parameter in accumulated.parameters)
    head = (WIDTH * 10 + 10) * 4
    block = next(unit for unit in found.units if unit.module == "blocks.1")
    for call in block.calls[1:]:
        assert level(found, Category.GRADIENT, call.backward_end - 2) == shards + head + BLOCK_BYTES
        assert level(found, Category.GRADIENT, call.backward_end) == shards + head


def test_a_shared_module_is_gathered_for_each_run_and_reduced_once() -> None:
    found = sharded(captured(Shared))
    assert Counter(moves(found))[GATHER, "blocks.0"] == 4
    assert Counter(moves(found))[REDUCE, "blocks.0"] == 1
    last = next(each for each in found.transfers if each.kind is REDUCE and each.module == "blocks.0")
    first_run, second_run = next(unit for unit in found.units if unit.module == "blocks.0").calls
    assert last.issued == first_run.backward_end > second_run.backward_end


def test_a_module_that_runs_twice_in_a_row_is_not_gathered_ahead_of_itself() -> None:
    found = sharded(captured(SharedInARow))
    gathers = [each for each in found.transfers if each.kind is GATHER and each.module == "blocks.0"]
    first_run, second_run = next(unit for unit in found.units if unit.module == "blocks.0").calls
    assert [each.issued for each in gathers[-1:]] == [first_run.backward_begin]
    assert gathers[-2].needed == second_run.backward_begin


def test_gradients_of_a_block_whose_inputs_need_none_wait_for_the_end_of_the_pass() -> None:
    class Frozen(Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner.requires_grad_(False)

    trace = captured(Frozen)
    found = sharded(trace)
    end = next(index for index, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER)
    assert [(each.module, each.issued) for each in found.transfers if each.kind is REDUCE][1:] == [
        ("", end),
        ("blocks.0", end),
    ]


def test_an_optimizer_in_the_backward_leaves_no_gradient_and_still_waits_for_the_reduction() -> None:
    def descend(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)  # type: ignore[arg-type]
        parameter.grad = None

    model = Model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)

    def run(model: nn.Module, _: None, batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    trace = memfit.trace(Step(model, spec((2, 10)), optimizer=None, run=run), target="cpu")
    found = sharded(trace)
    head = (WIDTH * 10 + 10) * 4
    (block,) = next(unit for unit in found.units if unit.module == "blocks.1").calls
    assert level(found, Category.GRADIENT, block.backward_end - 2) == head + BLOCK_BYTES
    assert level(found, Category.GRADIENT, block.backward_end) == head
    assert int(found.before_by_row[CATEGORIES.index(Category.GRADIENT), -1]) == 0


@pytest.mark.parametrize("passes", [1, PASSES])
def test_long_ops_hide_all_but_what_begins_and_ends_a_pass(passes: int) -> None:
    trace = captured(Model, accumulation_steps=passes)
    found = sharded(trace, [1e6] * len(trace.ops), target=GPUS)
    root = next(unit for unit in found.units if not unit.module)
    cost = CollectiveModel(GPUS)
    ends = cost.collective_ms(GATHER, root.gathered_bytes) + cost.collective_ms(REDUCE, root.reduced_bytes)
    assert waits_ms(found) == pytest.approx(passes * ends)
    alone = sharded(trace, [1e6] * len(trace.ops))  # a CPU sends with the cores that compute
    assert waits_ms(alone) == pytest.approx(alone.communication_ms)


def test_ops_without_time_hide_nothing(accumulated: Trace) -> None:
    found = sharded(accumulated, [0.0] * len(accumulated.ops), target=GPUS)
    assert waits_ms(found) == pytest.approx(found.communication_ms)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20))
def test_what_is_exposed_is_part_of_what_is_moved(accumulated: Trace, pattern: list[float]) -> None:
    times = (pattern * len(accumulated.ops))[: len(accumulated.ops)]
    found = sharded(accumulated, times, target=GPUS)
    assert 0 < waits_ms(found) <= found.communication_ms * (1 + 1e-9)


@pytest.mark.parametrize("model", [Model, Shared, SharedInARow])
def test_levels_are_the_sum_of_what_was_kept_and_what_was_made(model: type[nn.Module]) -> None:
    trace = captured(model, accumulation_steps=2)
    found = sharded(trace)
    ops = len(trace.ops)
    during = np.array([op.workspace_bytes for op in trace.ops] + [0])
    for number, storage in enumerate(trace.storages):
        if number not in found.removed and (storage.free_after == -1 or storage.free_after >= storage.alloc_at):
            during[max(storage.alloc_at, 0) : ops + 1 if storage.free_after == -1 else storage.free_after + 1] += (
                storage.bytes
            )
    for made in found.allocations:
        during[max(made.begin, 0) : ops + 1 if made.end == -1 else made.end] += made.size_bytes
    raised = found.during - during
    assert (raised >= 0).all()
    moments = {made.begin for made in found.allocations} | {made.end for made in found.allocations}
    assert {int(op) + 1 for op in np.flatnonzero(raised)} <= moments | {1}, "only where sharding acts after an op"


def _penalty(model: nn.Module, batch: torch.Tensor) -> None:
    inputs = batch.clone().requires_grad_(True)
    output = model(inputs).sum()
    (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
    (slope.square().sum() + output).backward()


def _two_forwards(model: nn.Module, batch: torch.Tensor) -> None:
    (model(batch).sum() + model(2 * batch).sum()).backward()


def _two_backwards(model: nn.Module, batch: torch.Tensor) -> None:
    loss = model(batch).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _look_first(model: nn.Module, batch: torch.Tensor) -> None:
    with torch.no_grad():
        model(batch)
    model(batch).sum().backward()


@pytest.mark.parametrize("train", [_penalty, _two_forwards, _two_backwards, _look_first])
def test_whatever_a_step_does_nothing_is_freed_twice_or_left_gathered(train) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        train(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    trace = memfit.trace(Step(Model, spec((2, 10)), run=run), target="cpu")
    found = sharded(trace)
    assert (found.before_by_row >= 0).all() and (found.during_by_row >= 0).all()
    assert (found.before[1:] <= found.during[:-1]).all()
    for category in (Category.GATHERED_PARAMETER, Category.COMMUNICATION):
        assert level(found, category, len(trace.ops)) == 0
    assert 0 < waits_ms(found) <= found.communication_ms * (1 + 1e-9)
