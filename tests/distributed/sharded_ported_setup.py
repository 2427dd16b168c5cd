"""Behaviours of PyTorch's FSDP tests about building, wrapping and first values; each function runs on every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit.errors import InputError, StateError
from memfit.sharded import (
    FlatDTensor,
    Precision,
    RankMismatch,
    Reduction,
    Schedule,
    full_parameters,
    get_runtime,
    shard,
)
from tests.distributed.sharded_behaviour import Trained, loss_of, tokens_of
from tests.distributed.sharded_models import GPT, Chain
from tests.distributed.sharded_parity import check_equal, whole_parameters


def behaviours(names: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """Every function of a module that takes nothing and gives nothing: a behaviour of its own."""
    own = {name: each for name, each in names.items() if isinstance(each, FunctionType) and not name.startswith("_")}
    return {
        name: each
        for name, each in own.items()
        if each.__module__ == names["__name__"] and not signature(each).parameters
    }


def small(seed: int = 0, *sizes: int) -> nn.Sequential:
    """Linear layers of odd sizes."""
    torch.manual_seed(seed)
    widths = sizes or (3, 5, 3, 1)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(widths)))


def same_training(ours: Trained, theirs: Trained, steps: int = 2) -> None:
    """Fail unless both have the same losses, and then the same parameters."""
    for number in range(steps):
        assert ours.step(number) == theirs.step(number)
    ours.check_equals(theirs)


def compared(build: Any, steps: int = 2, **options: Any) -> Trained:
    """Train a sharded model beside a plain one."""
    ours = Trained(build, **options)
    same_training(ours, Trained(build, plain=True), steps)
    return ours


class _Named(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["second"](self["first"](x).relu())


def _dicts() -> nn.Module:
    return Chain(*(_Named({"first": nn.Linear(16, 16), "second": nn.Linear(16, 16)}) for _ in range(2)))


def a_module_dict_with_a_forward_is_a_unit() -> None:
    ours = compared(_dicts, units=[_Named])
    assert [unit.name for unit in get_runtime(ours.model).units if unit.name] == ["blocks.0", "blocks.1"]


def a_module_dict_without_a_forward_is_refused() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2)})
    with pytest.raises(InputError, match="no forward"):
        shard(model)


def a_model_of_one_layer_has_one_unit() -> None:
    model = shard(nn.Linear(4, 4))
    assert [unit.name for unit in get_runtime(model).units] == [""]
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.full_tensor().shape == (4, 4)


def a_model_without_parameters_runs() -> None:
    model = shard(nn.Sequential(nn.ReLU(), nn.Tanh()))
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and not list(model.parameters())


def units_have_the_names_of_their_modules_and_parameters() -> None:
    plain, model = GPT(), shard(GPT())
    assert {unit.name for unit in get_runtime(model).units} == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


def the_class_of_every_module_stays() -> None:
    plain, model = GPT(), shard(GPT())
    assert [type(each) for each in model.modules()] == [type(each) for each in plain.modules()]


def parameters_have_their_whole_shape_and_a_flat_part() -> None:
    plain, model = small(), shard(small())
    for (_, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(one, FlatDTensor) and isinstance(one, nn.Parameter)
        assert one.shape == other.shape and one.dtype == other.dtype and one.requires_grad and one.is_leaf
        assert one.to_local().dim() == 1
        assert torch.equal(one.full_tensor(), other)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, one.to_local().numel())
        assert sum(parts) == other.numel()


def a_rank_may_have_no_element_of_a_parameter() -> None:
    model = shard(nn.Linear(1, 1))
    model(torch.ones(2, 1)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    held = [each.to_local().numel() for each in model.parameters()]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, held)
    assert [sum(each) for each in zip(*parts, strict=True)] == [1, 1]
    assert any(0 in each for each in parts)


def a_transposed_parameter_keeps_its_values() -> None:
    torch.manual_seed(0)
    value = torch.randn(5, 3)
    model, plain = nn.Linear(5, 3), nn.Linear(5, 3)
    model.load_state_dict(plain.state_dict())
    for each in (model, plain):
        each.weight = nn.Parameter(value.t())
    assert not model.weight.is_contiguous()
    shard(model)
    x = torch.randn(2, 5)
    torch.testing.assert_close(model(x), plain(x))
    model(x).sum().backward()
    assert torch.equal(model.weight.full_tensor(), plain.weight)


def channels_last_weights_keep_their_values() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    torch.manual_seed(0)
    model = shard(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    assert torch.equal(model.weight.full_tensor(), plain.weight)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(x), plain(x))


def buffers_stay_whole_and_train_as_without() -> None:
    torch.manual_seed(dist.get_rank())
    model = shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    torch.manual_seed(dist.get_rank())
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with full_parameters(model):
        plain.load_state_dict(model.state_dict())
    x = torch.randn(8, 4)
    assert torch.equal(model(x), plain(x))
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer) and type(model.get_buffer(name)) is torch.Tensor


def buffers_that_are_not_saved_stay() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.arange(4.0), persistent=False)
    shard(model)
    assert torch.equal(model.table, torch.arange(4.0)) and "table" not in model.state_dict()


def a_mesh_of_two_dimensions_needs_no_names() -> None:
    for shape in ((dist.get_world_size(), 1), (1, dist.get_world_size())):
        compared(GPT, steps=1, mesh=init_device_mesh("cpu", shape))


def a_mesh_made_from_a_group_is_used() -> None:
    group = dist.group.WORLD
    assert group is not None
    compared(GPT, steps=1, mesh=DeviceMesh.from_group(group, "cpu"))


def a_mesh_of_this_rank_alone_trains_by_itself() -> None:
    """As the tests of one rank: nothing is sent, and gradients are this rank's own."""
    alone, _ = dist.new_subgroups(1)
    ours = Trained(mesh=DeviceMesh.from_group(alone, "cpu"))
    torch.manual_seed(0)
    plain = GPT()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)
    for number in range(2):
        loss = loss_of(plain, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert ours.step(number) == loss.item()
    check_equal("parameter", whole_parameters(ours.model), whole_parameters(plain))


def what_is_no_mesh_is_refused() -> None:
    with pytest.raises(InputError, match="mesh"):
        shard(nn.Linear(2, 2), mesh=(2, 2))  # type: ignore[arg-type]


def a_module_on_meta_that_nobody_can_fill_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises(InputError, match=r"module 'bare' \(Bare\) is on the meta device and has no reset_parameters"):
        shard(nn.Sequential(OrderedDict(linear=nn.Linear(2, 2), bare=Bare())))


def a_model_on_meta_is_filled_by_a_function() -> None:
    with torch.device("meta"):
        model = GPT()
    filled: list[str] = []

    def fill(module: nn.Module) -> None:
        filled.append(type(module).__name__)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    shard(model, init=fill)
    assert filled.count("Linear") == sum(isinstance(each, nn.Linear) for each in model.modules())
    assert all((each.full_tensor() == 0.25).all() for each in model.parameters())
    assert not any(each.is_meta for each in model.buffers())


def a_model_on_meta_in_mixed_precision_is_filled_in_its_own_dtype() -> None:
    seen: set[torch.dtype] = set()

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            seen.add(parameter.dtype)
            nn.init.normal_(parameter)

    with torch.device("meta"):
        model = GPT()
    shard(model, init=fill, precision=Precision(param_dtype=torch.bfloat16))
    assert seen == {torch.float32} == {each.dtype for each in model.parameters()}
    assert model(tokens_of(0)).dtype == torch.bfloat16


def modules_on_meta_beside_ones_with_values_are_filled() -> None:
    torch.manual_seed(0)
    model = small()
    kept = model[0].weight.detach().clone()
    model[1] = nn.Linear(5, 3, device="meta")
    shard(model)
    assert torch.equal(model[0].weight.full_tensor(), kept)
    assert model(torch.ones(2, 3)).isfinite().all()


def values_may_be_reset_after_sharding_from_meta() -> None:
    """FSDP2's order: shard on meta, then give values; here `to_empty` is not needed."""
    with torch.device("meta"):
        model = GPT()
    shard(model)
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    plain = GPT()
    torch.manual_seed(3)
    for module in plain.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    check_equal("parameter", whole_parameters(model), whole_parameters(plain))


def ranks_that_began_apart_start_from_rank_0() -> None:
    torch.manual_seed(dist.get_rank())
    model = shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), from_rank_0=True)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    check_equal("parameter", whole_parameters(model), whole_parameters(plain))


def buffers_of_rank_0_go_to_all() -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(float(dist.get_rank() + 1))
    shard(model, from_rank_0=True)
    assert torch.equal(model.running_mean, torch.ones(3))


def buffers_on_meta_get_rank_0s_values() -> None:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = nn.BatchNorm1d(3)
    if dist.get_rank() == 0:
        model.running_mean.fill_(5.0)
    shard(model, from_rank_0=True)
    assert torch.equal(model.running_mean, torch.full((3,), 5.0))


def a_model_and_its_parts_may_not_be_sharded_again() -> None:
    model = shard(GPT())
    with pytest.raises(StateError, match="sharded already"):
        shard(model)
    with pytest.raises(StateError, match="inner modules first, and the model around them last"):
        shard(model.blocks[0])  # type: ignore[index]


def a_model_that_is_not_sharded_has_no_runtime() -> None:
    with pytest.raises(StateError, match="not sharded"):
        get_runtime(GPT())


def units_of_a_class_are_found() -> None:
    model = GPT()
    kind = type(model.blocks[0])
    shard(model, units=kind)
    assert [unit.name for unit in get_runtime(model).units if unit.name] == ["blocks.0", "blocks.1", "blocks.2"]


def units_by_size_are_found() -> None:
    def large(path: str, module: nn.Module) -> bool:
        return sum(each.numel() for each in module.parameters()) >= 2_000 and isinstance(module, nn.Linear)

    model = shard(GPT(), units=large)
    names = {unit.name for unit in get_runtime(model).units if unit.name}
    assert names and all(model.get_submodule(name).weight.numel() >= 1_900 for name in names)  # type: ignore[union-attr, operator]


def every_module_with_parameters_may_be_a_unit() -> None:
    def own(path: str, module: nn.Module) -> bool:
        return bool(path) and any(True for _ in module.parameters(recurse=False))

    ours = compared(GPT, units=own, schedule=Schedule(bucket_cap_bytes=0))
    assert len(get_runtime(ours.model).units) > 20
    joined = compared(GPT, units=own)
    assert len(get_runtime(joined.model).units) < len(get_runtime(ours.model).units)


def norms_may_be_units_of_their_own() -> None:
    compared(GPT, units=lambda path, module: isinstance(module, nn.LayerNorm))


def a_unit_of_frozen_parameters_beside_trained_ones() -> None:
    def build() -> nn.Module:
        model = GPT()
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.weight.requires_grad_(False)
        return model

    ours = compared(build)
    for name, parameter in ours.model.named_parameters():
        assert parameter.requires_grad == (not name.startswith("blocks.0.") and name != "blocks.1.up.weight")


def ignored_parameters_and_their_gradients_are_plain_tensors() -> None:
    model = GPT()
    shard(model, ignored=["embedding.weight"])
    assert type(model.embedding.weight) is nn.Parameter
    loss_of(model, 0).backward()
    assert type(model.embedding.weight.grad) is torch.Tensor


def ignored_parameters_of_other_ranks_are_told() -> None:
    with pytest.raises(RankMismatch, match="rank 0 has"):
        shard(GPT(), ignored=["head.weight"] if dist.get_rank() else [])


def wrong_ignored_parameters_are_refused() -> None:
    for wrong in (["nothing"], [3], [nn.Parameter(torch.ones(2))]):
        with pytest.raises(InputError):
            shard(GPT(), ignored=wrong)  # type: ignore[arg-type]


def wrong_options_are_refused() -> None:
    for make in (
        lambda: Precision(param_dtype=torch.int8),
        lambda: Precision(cast_inputs="all"),  # type: ignore[arg-type]
        lambda: Reduction(divisor=0),
        lambda: Reduction(compress=torch.float64),
        lambda: Reduction(compress=torch.float16, hook=lambda whole, group: whole),
    ):
        with pytest.raises(InputError):
            make()


def two_models_train_side_by_side() -> None:
    """Two models of one process, as two pipeline stages have them, on one group."""
    first, second = Trained(), Trained()
    theirs = [Trained(plain=True), Trained(plain=True)]
    for number in range(2):
        losses = [loss_of(each.model, number + offset) for offset, each in enumerate((first, second))]
        sum(losses).backward()  # type: ignore[union-attr]
        for offset, (ours, plain) in enumerate(zip((first, second), theirs, strict=True)):
            ours.update()
            assert plain.step(number + offset) == losses[offset].item()
    for ours, plain in zip((first, second), theirs, strict=True):
        ours.check_equals(plain)


def a_sharded_model_inside_of_a_plain_one_trains() -> None:
    inner = shard(small(0, 4, 4, 4))
    torch.manual_seed(1)
    outer = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 1))
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 4), small(0, 4, 4, 4), nn.Linear(4, 1))
    plain[0].load_state_dict(outer[0].state_dict())
    plain[2].load_state_dict(outer[2].state_dict())
    x = torch.randn(2, 4)
    for each in (outer, plain):
        each(x).sum().backward()
    torch.testing.assert_close(outer[0].weight.grad, plain[0].weight.grad)
    torch.testing.assert_close(inner[0].weight.grad.full_tensor(), plain[1][0].weight.grad)


CASES = behaviours(globals())
