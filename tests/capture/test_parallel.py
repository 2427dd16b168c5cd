"""Steps that run on several ranks, captured as they are on ranks that are not there."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import _random as dtensor_random
from torch.testing._internal.distributed.fake_pg import FakeStore

import memfit
from memfit import Step, spec
from memfit.capture import Category, Trace, check_trace, load_trace, save_trace
from memfit.errors import InputError, MemfitError
from memfit.memory import Stream, Timeline
from memfit.memory.allocations import STREAMS
from tests.capture.parallel_model import Model

RANKS = 4


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def step(model: Any = sharded, **options: Any) -> Step:
    return Step(model, spec((4, 32)), loss=lambda output, _: output.square().mean(), **options)


def captured(model: Any = sharded, mesh: Any = None, target: str = "h100-sxm", **options: Any) -> Trace:
    trace = memfit.trace(step(model, **options), target=target, mesh=mesh or {"dp": RANKS})
    check_trace(trace)
    return trace


def test_a_trace_has_the_mesh_its_collectives_and_streams(tmp_path: Any) -> None:
    trace = captured()
    assert trace.mesh == {"dp": RANKS}
    kinds = [each.kind for each in trace.collectives]
    assert kinds.count("all_gather") == 7, "four units in the forward, and three that were resharded in the backward"
    assert kinds.count("reduce_scatter") == 4
    whole = sum(parameter.numel() * 4 for parameter in Model().parameters())
    assert sum(each.bytes for each in trace.collectives if each.kind == "reduce_scatter") == whole
    assert {each.stream for each in trace.collectives} == {"gather", "reduce"}
    for each in trace.collectives:
        assert trace.ops[each.op].name.startswith("c10d.")
    table = Timeline.of(trace, 512).allocations
    assert {STREAMS[number] for number in table.stream.tolist()} == {Stream.COMPUTE, Stream.COPY, Stream.REDUCE}
    save_trace(trace, tmp_path / "trace")
    assert load_trace(tmp_path / "trace") == trace


def test_parameters_gradients_and_state_are_this_ranks_shards() -> None:
    trace = captured(optimizer=torch.optim.AdamW)
    by_name = {parameter.names[0]: parameter for parameter in trace.parameters}
    weight = by_name["blocks.0.0.weight"]
    assert weight.shape == (48, 32)
    assert trace.storages[weight.storage].bytes == 48 * 32 * 4 // RANKS
    assert [trace.storages[number].bytes for number in weight.state] == [48 * 32 * 4 // RANKS] * 2
    assert trace.storages[weight.gradient].category is Category.GRADIENT


def test_two_captures_are_equal_and_more_ranks_are_not() -> None:
    assert captured().fingerprint == captured().fingerprint != captured(mesh={"dp": 8}).fingerprint


def test_a_factory_may_make_the_mesh_itself() -> None:
    def build() -> nn.Module:
        return sharded(dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),)))

    assert captured(build).collectives == captured().collectives


@pytest.mark.parametrize("target", ["h100-sxm", "cpu"])
def test_a_model_may_draw_its_weights_after_it_was_sharded(target: str) -> None:
    """The first random op on a DTensor makes a tracker of the GPU's generator, which would outlive the group."""

    def initialized(mesh: DeviceMesh) -> nn.Module:
        model = sharded(mesh).to_empty(device=mesh.device_type)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        return model

    before = dtensor_random._rng_tracker
    assert captured(initialized, target=target).fingerprint == captured(target=target).fingerprint
    assert dtensor_random._rng_tracker is before


def test_a_model_may_be_materialized_after_it_was_sharded() -> None:
    def build(mesh: DeviceMesh) -> nn.Module:
        return sharded(mesh).to_empty(device="cuda")

    assert captured(build).fingerprint == captured().fingerprint


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_resharding_after_the_forward(reshard: bool | int) -> None:
    trace = captured(lambda mesh: sharded(mesh, reshard_after_forward=reshard))
    gathers = [each for each in trace.collectives if each.kind == "all_gather"]
    again = 0 if reshard is False else 4  # the root is resharded too when it is told so
    assert len(gathers) == 4 + again
    assert sorted({each.ranks for each in gathers}) == ([2, RANKS] if reshard == 2 else [RANKS])


def test_hybrid_sharding_reduces_over_the_replicas() -> None:
    trace = captured(mesh={"replicate": 2, "shard": 4})
    assert {(each.kind, each.ranks) for each in trace.collectives} == {
        ("all_gather", 4),
        ("reduce_scatter", 4),
        ("all_reduce", 2),
    }


def test_a_block_that_is_gathered_ahead_is_gathered_before_the_one_before_it_computes() -> None:
    def build(mesh: DeviceMesh) -> nn.Module:
        model: Any = sharded(mesh)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
        return model

    def gathers_before_first_product(trace: Trace) -> int:
        product = next(index for index, op in enumerate(trace.ops) if op.name == "aten.addmm.default")
        return sum(each.op < product for each in trace.collectives)

    assert gathers_before_first_product(captured()) == 2, "the root, and the first block"
    assert gathers_before_first_product(captured(build)) == 3


def test_gradients_are_reduced_in_the_last_micro_batch_only() -> None:
    def run(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = memfit.trace(Step(sharded, spec((4, 32)), run=run), target="h100-sxm", mesh={"dp": RANKS})
    check_trace(trace)
    kinds = [each.kind for each in trace.collectives]
    assert kinds.count("reduce_scatter") == 4 and kinds.count("all_gather") == 14


def test_nothing_is_left_behind() -> None:
    hook = sys.excepthook
    plain = memfit.trace(step(Model), target="h100-sxm").fingerprint
    captured()
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert not torch.cuda.is_initialized() and "resize_" not in vars(torch.UntypedStorage)
    assert memfit.trace(step(Model), target="h100-sxm").fingerprint == plain


def test_nothing_is_left_behind_after_an_error() -> None:
    def fails(mesh: DeviceMesh) -> nn.Module:
        model = sharded(mesh)
        model.head.register_forward_hook(lambda *_: 1 / 0)
        return model

    for model in (fails, lambda mesh: 1 / 0):
        with pytest.raises(MemfitError, match="division by zero"):
            captured(model)
        assert not dist.is_initialized()
    captured()


def test_a_process_group_of_the_users_is_refused_and_left_alone() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        with pytest.raises(InputError, match="has a process group"):
            captured()
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_captured_says_what_to_do() -> None:
    with pytest.raises(InputError, match="function that builds and wraps"):
        captured(Model())
    with pytest.raises(InputError, match=r"mesh=\{'dp': 8\}"):
        memfit.trace(step(), target="h100-sxm", mesh={})
    with pytest.raises(InputError, match="whole numbers of at least 1"):
        captured(mesh={"dp": 0})
    with pytest.raises(InputError, match=r"CPUOffloadPolicy"):
        captured(lambda mesh: sharded(mesh, offload_policy=CPUOffloadPolicy()))


def test_a_sharded_model_without_a_mesh_names_the_way(tmp_path: Any) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = fully_shard(Model(), mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
        with pytest.raises(InputError, match="mesh="):
            memfit.trace(step(model), target="h100-sxm")
    finally:
        dist.destroy_process_group()
