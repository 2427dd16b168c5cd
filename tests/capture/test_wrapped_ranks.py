"""Models in DistributedDataParallel and FSDP1, captured as they are on ranks that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit import Step, spec
from memfit.capture import BEFORE_STEP, NO_INDEX, Category, Trace, check_trace, load_trace, save_trace
from memfit.cost import Roofline, Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.plans import wrappers_of
from memfit.sharding import captured_ranks
from memfit.torch_private.distributed import fake_group
from tests.capture.parallel_model import Model

RANKS = 4


BLOCK_BYTES = (32 * 48 + 48 + 48 * 32 + 32) * 4
WHOLE_BYTES = 3 * BLOCK_BYTES + (32 * 8 + 8) * 4


def fsdp1(mesh: DeviceMesh, **options: Any) -> nn.Module:
    if mesh.ndim > 1:
        options["device_mesh"] = mesh
    return FullyShardedDataParallel(Model(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **options)


def step(model: Any, **options: Any) -> Step:
    return Step(model, spec((4, 32)), loss=lambda output, _: output.square().mean(), **options)


def captured(model: Any, mesh: Any = None, target: str = "h100-sxm", **options: Any) -> Trace:
    trace = memfit.trace(step(model, **options), target=target, mesh=mesh or {"dp": RANKS})
    check_trace(trace)
    assert not dist.is_initialized()
    return trace


def kinds(trace: Trace) -> list[str]:
    return [each.kind for each in trace.collectives]


@pytest.mark.parametrize(
    "wrap", [lambda mesh: DistributedDataParallel(Model()), fsdp1, lambda mesh: fsdp1(mesh, use_orig_params=True)]
)
def test_wrappers_are_no_modules(wrap: Any, tmp_path: Any) -> None:
    trace = captured(wrap)
    plain = memfit.trace(step(Model), target="h100-sxm")
    assert [(call.module, call.kind) for call in trace.calls] == [(call.module, call.kind) for call in plain.calls]
    assert [each.path for each in trace.modules] == [each.path for each in plain.modules]
    assert [each.inputs for each in trace.model_calls] == [each.inputs for each in plain.model_calls]
    save_trace(trace, tmp_path / "trace")
    assert load_trace(tmp_path / "trace") == trace
    assert trace.fingerprint == captured(wrap).fingerprint


class OwnReplicas(DistributedDataParallel):
    """As libraries derive theirs."""


class OwnShards(FullyShardedDataParallel):
    pass


def checkpointed_blocks(mesh: DeviceMesh) -> nn.Module:
    model = Model()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fully_shard(checkpoint_wrapper(block), mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda mesh: OwnReplicas(Model()), ("DistributedDataParallel",)),
        (lambda mesh: OwnShards(Model()), ("FullyShardedDataParallel",)),
        (checkpointed_blocks, ("fully_shard",)),
    ],
)
def test_a_wrapper_has_the_name_of_its_class_of_torch(wrap: Any, names: tuple[str, ...]) -> None:
    assert captured(wrap).wrappers == names


def test_a_class_that_fully_shard_has_made_is_no_wrapper_of_its_own() -> None:
    with fake_group(2):
        model = checkpointed_blocks(init_device_mesh("cpu", (2,)))
        assert wrappers_of(model) == ["fully_shard", "CheckpointWrapper"]


def test_buckets_stay_and_are_reduced_beside_the_backward() -> None:
    trace = captured(lambda: DistributedDataParallel(Model(), device_ids=[0], bucket_cap_mb=0.01))
    assert kinds(trace) == ["all_reduce"] * len(trace.collectives) and len(trace.collectives) > 2
    assert {(each.ranks, each.stream) for each in trace.collectives} == {(RANKS, "reduce")}
    buckets = [each.bytes for each in trace.storages if each.category is Category.COMMUNICATION]
    assert sorted(buckets) == sorted(each.bytes for each in trace.collectives) and sum(buckets) == WHOLE_BYTES
    assert {each.alloc_at for each in trace.storages if each.category is Category.COMMUNICATION} == {BEFORE_STEP}


def test_gradients_that_are_views_of_buckets_are_counted_once() -> None:
    apart = captured(lambda: DistributedDataParallel(Model()), optimizer=torch.optim.SGD)
    views = captured(lambda: DistributedDataParallel(Model(), gradient_as_bucket_view=True), optimizer=torch.optim.SGD)
    assert Timeline.of(apart).peak_bytes - Timeline.of(views).peak_bytes > WHOLE_BYTES // 2
    gradients = {parameter.gradient for parameter in views.parameters}
    assert {views.storages[number].alloc_at for number in gradients} == {BEFORE_STEP} and len(gradients) == 1


def test_gradients_sent_in_bfloat16() -> None:
    def build() -> nn.Module:
        model = DistributedDataParallel(Model())
        model.register_comm_hook(None, bf16_compress_hook)
        return model

    assert [each.bytes for each in captured(build).collectives] == [WHOLE_BYTES // 2]


def test_unused_parameters_are_told_by_a_map_that_is_reduced_too() -> None:
    class Half(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[0](x))

    trace = captured(lambda: DistributedDataParallel(Half(), find_unused_parameters=True))
    count = len(list(Model().parameters()))
    assert [each.bytes for each in trace.collectives] == [WHOLE_BYTES, 4 * count]
    held = {parameter.names[0] for parameter in trace.parameters if parameter.gradient != NO_INDEX}
    assert held == {name for name, _ in Model().named_parameters() if name.startswith(("blocks.0", "head"))}


def test_units_of_fsdp1_gather_and_reduce() -> None:
    trace = captured(fsdp1)
    assert kinds(trace).count("all_gather") == 7, "four units, and three that were resharded again in the backward"
    assert kinds(trace).count("reduce_scatter") == 4
    assert {(each.kind, each.stream) for each in trace.collectives} == {
        ("all_gather", "gather"),
        ("reduce_scatter", "reduce"),
    }
    gathered = [each for each in trace.storages if each.category is Category.GATHERED_PARAMETER]
    assert {(each.module, each.bytes) for each in gathered} == {
        ("", WHOLE_BYTES - 3 * BLOCK_BYTES),
        *((f"blocks.{number}", BLOCK_BYTES) for number in range(3)),
    }
    timeline = Timeline.of(trace, 512)
    sharding = captured_ranks(timeline, Runtime.of(trace, Roofline()), Target.parse("h100-sxm", ranks=RANKS))
    assert [(unit.module, unit.kept, unit.gathered_bytes) for unit in sharding.units] == [
        ("", True, WHOLE_BYTES - 3 * BLOCK_BYTES),
        *((f"blocks.{number}", False, BLOCK_BYTES) for number in range(3)),
    ]
    reduced = [each for each in sharding.schedule.transfers if each.kind.value == "reduce_scatter"]
    assert all(each.needed > each.issued + 10 for each in reduced[:-1]), (
        "nothing waits for them before the backward ends"
    )


def test_a_forward_prefetch_names_the_unit_that_is_gathered() -> None:
    trace = captured(lambda mesh: fsdp1(mesh, forward_prefetch=True))
    first = next(index for index, op in enumerate(trace.ops) if op.name == "aten.addmm.default")
    assert sum(each.op < first for each in trace.collectives) == 3, "the root, the first block and the one after it"
    gathered = [each.module for each in trace.storages if each.category is Category.GATHERED_PARAMETER]
    assert gathered[:4] == ["", "blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("strategy", "mesh", "expected"),
    [
        (ShardingStrategy.SHARD_GRAD_OP, None, {("all_gather", 4): 4, ("reduce_scatter", 4): 4}),
        (ShardingStrategy.NO_SHARD, None, {("all_reduce", 4): 4}),
        (
            ShardingStrategy.HYBRID_SHARD,
            {"replicate": 2, "shard": 4},
            {("all_gather", 4): 7, ("reduce_scatter", 4): 4, ("all_reduce", 2): 4},
        ),
    ],
    ids=str,
)
def test_strategies_of_fsdp1(strategy: ShardingStrategy, mesh: Any, expected: dict[tuple[str, int], int]) -> None:
    trace = captured(lambda mesh: fsdp1(mesh, sharding_strategy=strategy, use_orig_params=True), mesh=mesh)
    found: dict[tuple[str, int], int] = {}
    for each in trace.collectives:
        found[each.kind, each.ranks] = found.get((each.kind, each.ranks), 0) + 1
    assert found == expected


def test_shards_are_cast_before_they_are_gathered() -> None:
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    trace = captured(lambda mesh: fsdp1(mesh, mixed_precision=half))
    gathers = [each.bytes for each in trace.collectives if each.kind == "all_gather"]
    assert gathers[1] == BLOCK_BYTES // 2
    reduced = [each.bytes for each in trace.collectives if each.kind == "reduce_scatter"]
    assert sum(reduced) == WHOLE_BYTES
    cast = [
        each for each in trace.storages if each.category is Category.COMMUNICATION and each.bytes == gathers[1] // 4
    ]
    assert len(cast) == 6 and {each.module for each in cast} == {f"blocks.{number}" for number in range(3)}


def test_a_model_that_checkpoints_itself_is_gathered_again() -> None:
    def build(mesh: DeviceMesh) -> nn.Module:
        model = Model()
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))

    trace = captured(build)
    assert kinds(trace).count("all_gather") == 7
    assert any("checkpoints modules" in note for note in trace.notes)


def test_shards_in_host_memory_are_refused() -> None:
    with pytest.raises(InputError, match="leave cpu_offload out"):
        captured(lambda mesh: fsdp1(mesh, cpu_offload=CPUOffload(offload_params=True)))


def test_nothing_is_left_behind() -> None:
    before = [vars(owner).get(name) for owner, name in _PATCHED]
    captured(lambda: DistributedDataParallel(Model()))
    captured(fsdp1)
    with pytest.raises(InputError):
        captured(lambda mesh: fsdp1(mesh, cpu_offload=CPUOffload(offload_params=True)))
    assert [vars(owner).get(name) for owner, name in _PATCHED] == before
    assert torch.zeros(2, device="meta").data_ptr() == 0


_PATCHED = [
    (DistributedDataParallel, "__init__"),
    (DistributedDataParallel, "forward"),
    (DistributedDataParallel, "_check_comm_hook"),
    (FullyShardedDataParallel, "__init__"),
    (dist.Reducer, "_rebuild_buckets"),
    (torch.UntypedStorage, "data_ptr"),
    (torch.Tensor, "data_ptr"),
]
