"""Sharding of a step that was captured with autocast: which dtypes there are, and which casts there are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit import Step, spec
from memfit.capture import Category, Phase, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import CATEGORIES, Timeline
from memfit.sharding import Sharding, ShardOptions, shard
from memfit.sharding.sharded_step import shard_bytes

WIDTH, RANKS = 64, 4
BLOCK = WIDTH * WIDTH + WIDTH
CAST = "aten._to_copy.default"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


@pytest.fixture(scope="module", params=[1, 2])
def half(request: pytest.FixtureRequest) -> Trace:
    step = Step(
        Model,
        spec((2, WIDTH)),
        loss=lambda out, _: out.float().sum(),
        autocast=torch.bfloat16,
        accumulation_steps=request.param,
    )
    return memfit.trace(step, target="cpu")


def sharded(trace: Trace, options: ShardOptions | None = None) -> Sharding:
    return shard(Timeline.of(trace, 1), Runtime.of(trace, Roofline()), Target.parse("cpu", ranks=RANKS), options)


def casts(trace: Trace) -> list[int]:
    parameters = {parameter.storage for parameter in trace.parameters}
    return [i for i, op in enumerate(trace.ops) if op.name == CAST and op.inputs[0].storage in parameters]


def test_autocast_gathers_in_its_dtype_and_keeps_and_reduces_in_the_parameters_own(half: Trace) -> None:
    found = sharded(half)
    assert (found.param_dtype, found.shard_dtype, found.reduce_dtype) == ("bfloat16", "float32", "float32")
    block = found.units[1]
    assert (block.gathered_bytes, block.gradient_bytes) == (2 * BLOCK, 2 * BLOCK)
    assert (block.shard_bytes, block.reduced_bytes) == (4 * BLOCK // RANKS, 4 * BLOCK)


def test_an_explicit_dtype_wins(half: Trace) -> None:
    found = sharded(half, ShardOptions(param_dtype="float32", reduce_dtype="bfloat16", shard_dtype="bfloat16"))
    assert (found.param_dtype, found.shard_dtype, found.reduce_dtype) == ("float32", "bfloat16", "bfloat16")
    block = found.units[1]
    assert (block.gathered_bytes, block.shard_bytes, block.reduced_bytes) == (4 * BLOCK, 2 * BLOCK // RANKS, 2 * BLOCK)


def test_without_autocast_every_dtype_is_the_parameters_own() -> None:
    trace = memfit.trace(Step(Model, spec((2, WIDTH)), loss=lambda out, _: out.sum()), target="cpu")
    found = sharded(trace)
    assert (found.param_dtype, found.shard_dtype, found.reduce_dtype) == (None, None, None)
    assert found.runtime.trace is trace


def test_parameters_that_are_gathered_in_the_dtype_of_a_cast_are_not_cast(half: Trace) -> None:
    found, full = sharded(half), sharded(half, ShardOptions(param_dtype="float32"))
    assert {half.ops[index].outputs[0].storage for index in casts(half)} <= found.removed
    rows = [CATEGORIES.index(category) for category in (Category.ACTIVATION, Category.TEMPORARY)]
    last = next(unit for unit in full.units if not unit.module).calls[0].end - 1
    with_casts, without = (int(each.during_by_row[rows, last].sum()) for each in (full, found))
    assert with_casts - without == 3 * 2 * BLOCK, "autocast keeps a copy of every parameter until the forward ends"


def test_the_whole_gradient_is_the_one_that_autocast_would_have_cast_back(half: Trace) -> None:
    found, full = sharded(half), sharded(half, ShardOptions(param_dtype="float32"))
    (first, *_) = found.units[3].calls
    row = CATEGORIES.index(Category.GRADIENT)
    assert int(found.during_by_row[row, first.backward_end - 1]) == 2 * BLOCK
    assert int(full.during_by_row[row, first.backward_end - 1]) == 4 * BLOCK
    temporary = CATEGORIES.index(Category.TEMPORARY)
    back = [i for i, op in enumerate(half.ops) if op.phase is Phase.BACKWARD and op.forward_op in casts(half)]
    back = [index for index in back if half.ops[index].name == CAST]
    assert len(back) == len(casts(half))
    assert all(found.during_by_row[temporary, index] < full.during_by_row[temporary, index] for index in back)


def test_shards_of_gradients_and_state_keep_the_parameters_dtype(half: Trace) -> None:
    found = sharded(half)
    shards = sum(shard_bytes(parameter, RANKS) for parameter in half.parameters)
    last = len(half.ops) - 1
    columns = {category: int(found.during_by_row[row, last]) for row, category in enumerate(CATEGORIES)}
    assert columns[Category.PARAMETER] == columns[Category.GRADIENT] == shards
    assert columns[Category.OPTIMIZER_STATE] == 2 * shards + 4 * len(half.parameters)


def test_a_shard_is_copied_in_the_gathered_dtype_before_it_is_sent(half: Trace) -> None:
    made = [each.size_bytes for each in sharded(half).allocations if each.ahead and each.begin == 0]
    copies, buffer = made[:2]
    assert (copies, buffer) == (2 * BLOCK // RANKS, 2 * BLOCK)


def test_casts_take_neither_time_nor_memory_in_the_step_without_them(half: Trace) -> None:
    found = sharded(half)
    before = Runtime.of(half, Roofline())
    step = [i for i, op in enumerate(half.ops) if op.phase is not Phase.OPTIMIZER]
    gone = [i for i in step if found.runtime.op_ms[i] != before.op_ms[i]]
    assert set(casts(half)) <= set(gone)
    assert all(half.ops[index].name == CAST for index in gone) and len(gone) == 2 * len(casts(half))
    assert not np.any([found.trace.storages[half.ops[index].outputs[0].storage].bytes for index in casts(half)])
