"""Inner modules that are sharded first, and the model around them last, as in FSDP2's recipe: run on every rank."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

from memfit.errors import InputError, StateError
from memfit.sharded import (
    FlatDTensor,
    Precision,
    RankMismatch,
    Schedule,
    UnitOptions,
    find_runtime,
    full_parameters,
    full_state_dict,
    get_runtime,
    no_sync,
    shard,
)
from tests.distributed.sharded_behaviour import check_freed, gathers, loss_of, watched
from tests.distributed.sharded_models import GPT
from tests.distributed.sharded_recipes import adamw, assert_same, built, by_fsdp2, by_memfit, train, whole


def children_then_root(model: Any) -> nn.Module:
    for block in model.blocks:
        shard(block)
    return shard(model)


def three_levels(model: Any) -> nn.Module:
    for block in model.blocks:
        shard(block.up)
        shard(block)
    return shard(model)


def recipe_of_fsdp2() -> None:
    """The recipe trains to FSDP2's bits, also in three levels, and gathers what one call with units gathers."""
    results, seen = [], []
    for wrap in (by_fsdp2, by_memfit, children_then_root, three_levels):
        model = built(wrap)
        optimizer = adamw(model.parameters())
        train(model, optimizer, range(2))
        if wrap is not by_fsdp2:
            with watched(model) as events:
                loss_of(model, 2).backward()
            check_freed(model)
            seen.append((gathers(events, "forward"), gathers(events, "backward")))
        else:
            loss_of(model, 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        results.append(({**whole(model)}, norm))
    for parameters, norm in results[1:]:
        assert torch.allclose(norm, results[0][1])
        assert_same(parameters, results[1][0])
    assert seen[0] == seen[1] and seen[2] != seen[1]
    for name, value in results[0][0].items():  # clipped by norms that are summed in another order
        assert torch.allclose(value, results[1][0][name], atol=1e-6), name


def what_the_recipe_leaves() -> None:
    """Names, options, methods, state and blocks of code are those of a model that was sharded in one call."""
    torch.manual_seed(0)
    plain = GPT()
    torch.manual_seed(0)
    model = GPT()
    early = adamw(model.parameters())
    shard(model.blocks[0], keep=True)
    shard(model.blocks[1], units={"": UnitOptions(backward_gather=True), "up": UnitOptions(keep=True)})
    shard(model.blocks[2])
    inner = get_runtime(model.blocks[0])
    model.blocks[2].unshard()
    assert [unit.name for unit in inner.units] == [""] and inner.units[0].title == "the root unit"
    shard(model)
    runtime = get_runtime(model)
    assert [unit.name for unit in runtime.units] == ["", "blocks.0", "blocks.1", "blocks.1.up", "blocks.2"]
    assert [unit.number for unit in runtime.units] == [0, 1, 2, 3, 4]
    assert [unit.options.keep for unit in runtime.units] == [True, True, False, True, False]
    assert find_runtime(model) is runtime
    with pytest.raises(StateError, match="not sharded"):
        get_runtime(model.blocks[0])
    assert_same(full_state_dict(model)["model"], dict(plain.state_dict()))
    with full_parameters(model, units=["blocks.1.up"]):
        assert torch.equal(model.blocks[1].up.weight, plain.blocks[1].up.weight)
    model.blocks[0].unshard()
    assert torch.equal(model.blocks[0].up.weight, plain.blocks[0].up.weight)
    model.blocks[0].reshard()
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    assert all(each.grad is None for each in model.parameters())
    model.set_requires_gradient_sync(True)
    with no_sync(model):
        loss_of(model, 1).backward()
    assert all(each.grad is None for each in model.parameters())
    loss_of(model, 2).backward()
    assert all(each.grad is not None for each in model.parameters())
    early.step()  # it was made before anything was sharded
    changed = [name for name, each in plain.named_parameters() if not torch.equal(whole(model)[name], each)]
    assert len(changed) == len(whole(model))
    model.zero_grad()
    assert all(each.grad is None for each in model.parameters())
    other = built(children_then_root, seed=1)
    its = adamw(other.parameters())
    state, of_optimizer = deepcopy(get_state_dict(model, early))  # torch would let both count with one tensor
    set_state_dict(other, its, model_state_dict=state, optim_state_dict=of_optimizer)
    for each, optimizer in ((model, early), (other, its)):
        train(each, optimizer, range(3, 5))
    assert_same(whole(model), whole(other))


def options_of_each_call() -> None:
    """Blocks compute in bfloat16 and return float32, the root computes in float32, as with FSDP2's policies."""
    results = []
    for function, options in (
        (shard, {"precision": Precision(param_dtype=torch.bfloat16, output_dtype=torch.float32)}),
        (fully_shard, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)}),
    ):
        torch.manual_seed(0)
        model = GPT()
        for block in model.blocks:
            function(block, **options)  # type: ignore[operator]
        function(model)  # type: ignore[operator]
        seen: list[torch.dtype] = []
        model.blocks[1].up.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(module.weight.dtype))
        model.norm.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].dtype))
        train(model, adamw(model.parameters()), range(2))
        assert seen == [torch.bfloat16, torch.float32] * 2
        results.append(whole(model))
    assert_same(*results)
    model = GPT()
    shard(model.blocks[0], ignored=["up.bias"], schedule=Schedule(bucket_cap_bytes=0))
    shard(model)
    assert type(model.blocks[0].up.bias) is nn.Parameter  # what an inner call leaves whole, the last one does, too
    assert isinstance(model.blocks[1].up.bias, FlatDTensor)


def state_on_groups_of_its_own() -> None:
    """State of an optimizer from before the last call, on other groups of the same ranks, is used without a gather."""
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]
    torch.manual_seed(0)
    model: Any = GPT()
    block = shard(model.blocks[0], mesh=meshes[0])
    optimizer = adamw(block.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    shard(model, mesh=meshes[1])
    for parameter in block.parameters():
        assert isinstance(parameter, FlatDTensor)
        assert parameter.flat_spec.alike(optimizer.state[parameter]["exp_avg"].flat_spec)
    loss_of(model, 1).backward()
    optimizer.step()


def inner_refusals() -> None:
    """Inner models that do not go together with the call around them are refused, and stay as they are."""
    ranks = dist.get_world_size()
    replicas = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))

    def prepared(**options: Any) -> Any:
        model = GPT()
        shard(model.blocks[0], **options)
        return model

    def shared() -> nn.Module:
        model = GPT(tied=True)
        shard(model.embedding)
        return model

    cases: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = [
        (prepared, {"mesh": replicas}, InputError, "over other ranks"),
        (lambda: prepared(schedule=Schedule(forward_prefetch=0)), {}, InputError, "one schedule"),
        (prepared, {"units": {"blocks.0.up": UnitOptions()}}, InputError, "in a call of its own; leave it out"),
        (prepared, {"units": {("blocks.0", "norm"): UnitOptions()}}, InputError, "in a call of its own; leave it out"),
        (prepared, {"units": [["blocks.0", "norm"]]}, InputError, "in a call of its own; leave it out"),
        (prepared, {"schedule": Schedule(order=("blocks.7",))}, InputError, "no unit; the units are '', 'blocks.0'"),
        (shared, {}, StateError, "shared with a module"),
        (lambda: shard(GPT()), {}, StateError, "sharded already"),
        (lambda: shard(GPT()).blocks[1], {}, StateError, "inner modules first"),  # type: ignore[index]
    ]
    for build, options, kind, message in cases:
        model = build()
        with pytest.raises(kind, match=message):
            shard(model, **options)
    model = prepared()
    with full_parameters(model.blocks[0]), pytest.raises(StateError, match="between steps"):
        shard(model)
    with pytest.raises(RankMismatch):
        shard(model, units=["blocks.1"] if dist.get_rank() else ["blocks.2"])
    shard(model)  # still possible
    train(model, adamw(model.parameters()), range(1))


def dimensions_to_shard() -> None:
    """`shard_placement_fn` changes nothing that a script can see but the layout; what it may not say is refused."""
    results = []
    for choose in (None, lambda parameter: Shard(parameter.dim() - 1), lambda parameter: Shard(-1)):
        torch.manual_seed(0)
        model = shard(GPT(), shard_placement_fn=choose)
        train(model, adamw(model.parameters()), range(1))
        results.append(whole(model))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    for choose, message in (
        (lambda parameter: Shard(2), "which has"),
        (lambda parameter: Replicate(), r"give Shard\(dim\)"),
        (lambda parameter: 0, r"give Shard\(dim\)"),
    ):
        with pytest.raises(InputError, match=message):
            shard(GPT(), shard_placement_fn=choose)
