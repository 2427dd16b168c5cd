"""State dicts of a sharded model and its optimizer: sharded, full, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from memfit.errors import InputError, StateError
from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.sharded.flat_param import FlatShard
from memfit.sharded.full_parameters import gather_alike, gather_values
from memfit.sharded.fully_shard import get_runtime
from memfit.sharded.optimizer_state import (
    NamedState,
    flat_places,
    get_named_state,
    parameter_names,
    prepare_named_state,
)
from memfit.sharded.runtime import ShardedRuntime


def sharded_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, to_load: bool = False
) -> dict[str, Any]:
    """Return the state of `model` and, where one is given, `optimizer` by names, without a gather.

    The tensors are those of the model and the optimizer. `torch.distributed.checkpoint` saves them and loads into them;
    `to_load` makes the state that an optimizer has only after its first step.
    """
    runtime = sharded_runtime(model)
    found: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        if to_load:
            make_optimizer_state(optimizer)
        found["optimizer"] = get_named_state(model, runtime, optimizer)
    return found


def full_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, rank_0_only: bool = False, cpu: bool = True
) -> dict[str, Any]:
    """Return the whole state of `model` and, where one is given, `optimizer`, as of one process without sharding.

    All ranks must call it. One unit at a time is gathered, and copied to the host unless `cpu` is False. With
    `rank_0_only` the others get an empty dict.
    """
    runtime = get_runtime(model)
    keeps = not rank_0_only or all(link.rank == 0 for link in runtime.links)
    found: dict[str, Any] = {"model": _full_model(model, runtime, keeps, cpu)}
    if optimizer is not None:
        found["optimizer"] = _full_optimizer(model, runtime, optimizer, keeps, cpu)
    return found if keeps else {}


def load_state_dict(model: nn.Module, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load what `full_state_dict`, `sharded_state_dict` or a plain process gave; the ranks may be others.

    The optimizer's state may be by names or by numbers, as `optimizer.state_dict()` of a plain optimizer has it.
    """
    wanted = ["model"] if optimizer is None else ["model", "optimizer"]
    for each in wanted:
        if each not in state:
            raise InputError(
                f"the state has no {each!r}, only {', '.join(map(repr, state)) or 'nothing'}; give a dict such as "
                "{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}"
            )
    if optimizer is None:
        model.load_state_dict(state["model"])
        return
    prepared = prepare_named_state(model, sharded_runtime(model), optimizer, state["optimizer"])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(prepared)


def sharded_runtime(model: nn.Module) -> ShardedRuntime | None:
    """Return the runtime of a model, or None where it is a plain one."""
    try:
        return get_runtime(model)
    except StateError:
        return None


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that an optimizer has after a step, where it has none, and change nothing else.

    Only a step makes it: one with gradients and learning rates of zero, as torch.distributed.checkpoint does.
    """
    if optimizer.state:
        return
    every = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    gradients = [parameter.grad for parameter in every]
    values = [parameter.detach().clone() for parameter in every]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in every:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        with torch.no_grad():
            for parameter, gradient, value in zip(every, gradients, values, strict=True):
                parameter.grad = gradient
                parameter.copy_(value)


def _full_model(model: nn.Module, runtime: ShardedRuntime, keeps: bool, cpu: bool) -> dict[str, Any]:
    found: dict[str, torch.Tensor] = {}
    for unit in runtime.units:
        for flat in unit.flats:
            values = gather_values(flat, f"gather of {unit.title} for full_state_dict")
            for number, (slot, value) in enumerate(zip(flat.layout.slots, values, strict=True)):
                whole = _whole(flat, number, value)
                if keeps:
                    found.update(dict.fromkeys(slot.names, _copy(whole, cpu)))
    if not keeps:
        return {}
    return {
        name: found[name] if isinstance(value, FlatDTensor) else _copy(value, cpu)
        for name, value in model.state_dict().items()
    }


def _full_optimizer(
    model: nn.Module, runtime: ShardedRuntime, optimizer: torch.optim.Optimizer, keeps: bool, cpu: bool
) -> NamedState:
    named = get_named_state(model, runtime, optimizer)
    names = {every[0]: parameter for parameter, every in parameter_names(model, optimizer).items()}
    places = flat_places(runtime)
    sharded: dict[tuple[FlatShard, str, torch.dtype], list[tuple[str, int, FlatDTensor]]] = defaultdict(list)
    state: dict[str, dict[str, Any]] = {}
    for name, values in named["state"].items():
        state[name] = {}
        for key, value in values.items():
            if isinstance(value, FlatDTensor) and type(value.local) is not torch.Tensor:
                state[name][key] = _copy(value.full_tensor(), cpu)
            elif isinstance(value, FlatDTensor):
                flat, number = places[names[name]]
                sharded[flat, key, value.dtype].append((name, number, value))
                state[name][key] = None  # in its place, for the order of the keys
            else:
                state[name][key] = _copy(value, cpu)
    for (flat, key, dtype), members in sharded.items():

        def fill(own: torch.Tensor, flat: FlatShard = flat, members: list[Any] = members) -> None:
            for _, number, value in members:
                flat.local(number, own).copy_(value.local.reshape(-1))

        buffer = gather_alike(flat, dtype, fill, f"gather of optimizer state {key!r} for full_state_dict")
        for name, number, _ in members:
            slot = flat.layout.slots[number]
            whole = _whole(flat, number, buffer[slot.begin : slot.end].view(slot.shape))
            if keeps:
                state[name][key] = _copy(whole, cpu)
    return {"state": state, "param_groups": named["param_groups"]}


def _whole(flat: FlatShard, number: int, block: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor; of a block of tensor or expert parallel all ranks gather it."""
    inner = flat.inners[number]
    return block if inner is None else inner.wrap(block).full_tensor()


def _copy(value: Any, cpu: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.to("cpu", copy=True) if cpu else value.clone()
