"""What sharding changes in a step: shards, gathered parameters, reductions, communication."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import memfit
from memfit import Step, spec
from memfit.capture import Category, Parameter, Phase, Trace
from memfit.cost import Collective, Roofline, Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.memory import CATEGORIES, Timeline
from memfit.sharded.wrap_policy import default_units
from memfit.sharding import ShardOptions, repeated_blocks, shard
from memfit.sharding.sharded_step import FlatOptions, Sharding, shard_bytes

WIDTH, BLOCKS, RANKS = 64, 3, 4
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4
ROOT_BYTES = (10 * WIDTH + WIDTH + 12 * WIDTH + 12) * 4  # the head's ten rows are padded to twelve


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


@pytest.fixture(scope="module")
def captured() -> Trace:
    return memfit.trace(Step(Model, spec((2, 10)), loss=lambda out, _: out.sum()), target="cpu")


def sharded(trace: Trace, ranks: int = RANKS, options: ShardOptions | None = None) -> Sharding:
    runtime = Runtime.of(trace, Roofline())
    return shard(Timeline.of(trace, 1), runtime, Target.parse("cpu", ranks=ranks), options)


def level(sharding: Sharding, category: Category, op: int) -> int:
    return int(sharding.during_by_row[CATEGORIES.index(category), op])


def test_repeated_blocks_are_the_numbered_modules_that_are_alike(captured: Trace) -> None:
    assert repeated_blocks(captured) == ("blocks.0", "blocks.1", "blocks.2")


class Block(nn.Module):
    """Two linear layers, numbered, which would be the repeated modules where blocks are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def wrapped_model(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Four blocks, every second in a wrapper."""
    return nn.Sequential(*(wrap(Block()) if number % 2 else Block() for number in range(4)))


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(checkpoint_wrapper, id="checkpoint-wrapper"),
        pytest.param(torch.compile, id="compiled"),
        pytest.param(lambda block: checkpoint_wrapper(torch.compile(block)), id="both"),
    ],
)
def test_blocks_are_found_in_wrappers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    step = Step(lambda: wrapped_model(wrap), spec((2, WIDTH)), loss=lambda out, _: out.sum())
    trace = memfit.trace(step, target="cpu")
    assert repeated_blocks(trace) == ("0", "1", "2", "3")
    assert default_units(wrapped_model(wrap)) == ("0", "1", "2", "3")
    root, *blocks = sharded(trace).units
    assert root.parameters == 0
    assert [unit.shard_bytes for unit in blocks] == [2 * BLOCK_BYTES // RANKS] * 4


def test_the_last_block_may_stay_after_its_forward(captured: Trace) -> None:
    """`reshard_after_forward=False`: its parameters are there until its backward, and gathered once."""
    usual, kept = sharded(captured), sharded(captured, options=ShardOptions(keep_last=True))
    assert [unit.module for unit in usual.units if unit.kept] == [""]
    assert [unit.module for unit in kept.units if unit.kept] == ["", "blocks.2"]
    turn = next(index for index, op in enumerate(captured.ops) if op.phase is Phase.LOSS)
    between = [level(each, Category.GATHERED_PARAMETER, turn) for each in (usual, kept)]
    assert between[1] - between[0] == BLOCK_BYTES
    gathers = [
        [each.module for each in sharding.schedule.transfers if each.kind is Collective.ALL_GATHER]
        for sharding in (usual, kept)
    ]
    assert [each.count("blocks.2") for each in gathers] == [2, 1]
    assert [each.count("blocks.1") for each in gathers] == [2, 2]


def test_the_last_block_may_stay_in_the_flat_layout_too(captured: Trace) -> None:
    runtime, target = Runtime.of(captured, Roofline()), Target.parse("cpu", ranks=RANKS)
    modules = []
    for keep_last in (False, True):
        options = ShardOptions(keep_last=keep_last)
        sharding = shard(Timeline.of(captured, 1), runtime, target, options, flat=FlatOptions())
        modules.append([each.module for each in sharding.schedule.transfers if each.kind is Collective.ALL_GATHER])
    assert [each.count("blocks.2") for each in modules] == [2, 1]


def test_replicated_steps_keep_nothing() -> None:
    with pytest.raises(InputError, match="keep_last"):
        ShardOptions(parallel="ddp", keep_last=True)


@pytest.mark.parametrize(("shape", "rows"), [((10, 3), 3), ((8, 3), 2), ((1,), 1), ((), 1), ((3, 5), 1)])
def test_a_shard_is_whole_rows_padded(shape: tuple[int, ...], rows: int) -> None:
    parameter = Parameter(names=("p",), storage=0, shape=shape, dtype="float32", trainable=True, gradient=-1, state=())
    elements = rows
    for size in shape[1:]:
        elements *= size
    assert shard_bytes(parameter, RANKS) == 4 * elements
    assert shard_bytes(parameter, RANKS, "bfloat16") == 2 * elements


def test_parameters_gradients_and_state_are_divided(captured: Trace) -> None:
    found = sharded(captured)
    shards = sum(shard_bytes(parameter, RANKS) for parameter in captured.parameters)
    assert level(found, Category.PARAMETER, 0) == shards
    last = len(captured.ops) - 1
    assert level(found, Category.GRADIENT, last) == shards
    counters = 4 * len(captured.parameters)  # AdamW's step, one number for each parameter
    assert level(found, Category.OPTIMIZER_STATE, last) == 2 * shards + counters


def test_a_unit_has_its_parameters_and_its_buffer_while_it_runs(captured: Trace) -> None:
    found = sharded(captured)
    units = {unit.module: unit for unit in found.units}
    (block,), root = units["blocks.1"].calls, units[""]
    assert units["blocks.1"].gathered_bytes == BLOCK_BYTES
    assert root.gathered_bytes == ROOT_BYTES
    assert level(found, Category.GATHERED_PARAMETER, block.begin) == ROOT_BYTES + BLOCK_BYTES
    assert level(found, Category.COMMUNICATION, block.begin) == BLOCK_BYTES, "its own buffer"
    end = root.calls[0].end
    assert level(found, Category.COMMUNICATION, end - 1) == BLOCK_BYTES, "the last block's, until the forward ends"
    assert level(found, Category.GATHERED_PARAMETER, end) == ROOT_BYTES, "only the root's stay"
    assert level(found, Category.COMMUNICATION, end) == 0


def test_between_two_units_both_buffers_and_the_new_parameters_are_there(captured: Trace) -> None:
    found = sharded(captured)
    block = next(unit for unit in found.units if unit.module == "blocks.1").calls[0]
    assert level(found, Category.COMMUNICATION, block.begin - 1) == 2 * BLOCK_BYTES
    assert level(found, Category.GATHERED_PARAMETER, block.begin - 1) == ROOT_BYTES + BLOCK_BYTES
    assert int(found.before_by_row[CATEGORIES.index(Category.COMMUNICATION), block.begin]) == BLOCK_BYTES


def test_in_backward_the_next_unit_is_gathered_ahead(captured: Trace) -> None:
    found = sharded(captured)
    block = next(unit for unit in found.units if unit.module == "blocks.1").calls[0]
    at = block.backward_begin
    assert level(found, Category.GATHERED_PARAMETER, at) == ROOT_BYTES + BLOCK_BYTES
    assert level(found, Category.COMMUNICATION, at) == 2 * BLOCK_BYTES, "blocks.0 ahead, and what blocks.2 reduces"
    assert level(found, Category.GATHERED_PARAMETER, block.backward_end) == ROOT_BYTES


def test_the_whole_gradients_of_a_unit_are_gone_when_its_backward_ends(captured: Trace) -> None:
    found = sharded(captured)
    block = next(unit for unit in found.units if unit.module == "blocks.2").calls[0]
    head = (WIDTH * 10 + 10) * 4
    assert level(found, Category.GRADIENT, block.backward_end - 2) == head + BLOCK_BYTES
    assert level(found, Category.GRADIENT, block.backward_end) == head + BLOCK_BYTES // RANKS


def test_gathered_and_reduced_bytes_follow_their_dtypes(captured: Trace) -> None:
    options = ShardOptions(shard_dtype="float32", param_dtype="bfloat16", reduce_dtype="float32")
    block = next(unit for unit in sharded(captured, options=options).units if unit.module == "blocks.0")
    assert (block.gathered_bytes, block.reduced_bytes) == (BLOCK_BYTES // 2, BLOCK_BYTES)


def test_more_ranks_keep_less(captured: Trace) -> None:
    starts = [int(sharded(captured, ranks).during[0]) for ranks in (2, 4, 8)]
    assert starts == sorted(starts, reverse=True)


def test_communication_is_counted_and_none_of_it_hidden_on_a_cpu(captured: Trace) -> None:
    found = sharded(captured)
    assert 0 < found.exposed_ms - found.beside_ms == pytest.approx(found.communication_ms)


def test_a_parameter_tied_across_units_belongs_to_the_root() -> None:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].weight = self.blocks[0].weight

    trace = memfit.trace(Step(Tied, spec((2, 10)), loss=lambda out, _: out.sum()), target="cpu")
    units = {unit.module: unit for unit in sharded(trace).units}
    assert units["blocks.0"].parameters == 1 and units["blocks.1"].parameters == 2
    assert units[""].parameters == 5


def test_unknown_units_are_refused_by_name(captured: Trace) -> None:
    with pytest.raises(InputError, match=r"'blocks\.9'"):
        sharded(captured, options=ShardOptions(units=("blocks.9",)))


def test_a_dtype_that_is_none_is_refused(captured: Trace) -> None:
    with pytest.raises(InputError, match="param_dtype is 'half'"):
        sharded(captured, options=ShardOptions(param_dtype="half"))  # type: ignore[arg-type]


def test_gradients_kept_between_steps_are_shards_in_the_forward() -> None:
    step = Step(Model, spec((2, 10)), loss=lambda out, _: out.sum(), set_to_none=False)
    trace = memfit.trace(step, target="cpu")
    shards = sum(shard_bytes(parameter, RANKS) for parameter in trace.parameters)
    assert level(sharded(trace), Category.GRADIENT, 0) == shards


def test_optimizer_temporaries_have_the_dtype_and_padding_of_the_shards() -> None:
    trace = memfit.trace(Step(Model, spec((2, 10)), loss=lambda out, _: out.sum()), target="h100-sxm")
    runtime = Runtime.of(trace, Roofline())
    target = Target.parse("h100-sxm", ranks=RANKS)
    rows = [
        shard(Timeline.of(trace, 1), runtime, target, ShardOptions(shard_dtype=dtype)).during_by_row
        for dtype in ("float32", "float64")
    ]
    optimizer = [i for i, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER]
    single, double = (int(each[CATEGORIES.index(Category.TEMPORARY), optimizer].max()) for each in rows)
    assert double == pytest.approx(2 * single, rel=0.02)
