"""Optimizer state by parameter names, in the two forms that PyTorch has: named, and numbered as optimizers give it.

Note [Elementwise]
An optimizer on flat shards keeps state of the shard's shape, which is elementwise, beside scalars such as `step`. The
whole state of a parameter without dimensions has no dimensions either; there, what other parameters have decides, and
where none has it, every state but `step` is elementwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from memfit.errors import InputError
from memfit.sharded.comm import check_agreement
from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.sharded.flat_param import FlatShard
from memfit.sharded.runtime import ShardedRuntime
from memfit.torch_private.wrappers import name_in_state

NamedState = dict[str, Any]
"""`state` by parameter names, and `param_groups` whose `params` are names."""


def get_named_state(model: nn.Module, runtime: ShardedRuntime | None, optimizer: torch.optim.Optimizer) -> NamedState:
    """Return an optimizer's state by names; the tensors are the optimizer's own."""
    names = parameter_names(model, optimizer)
    state: dict[str, dict[str, Any]] = {}
    described: list[str] = []
    for parameter, every in names.items():
        if parameter not in optimizer.state:
            continue
        found: dict[str, Any] = {}
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, FlatDTensor):
                described.append(f"elementwise optimizer state {key!r} of {every[0]!r} in {value.dtype}")
            elif isinstance(parameter, FlatDTensor) and isinstance(value, torch.Tensor) and value.dim():
                raise InputError(
                    f"optimizer state {key!r} of {every[0]!r} is a tensor of {tuple(value.shape)} and not sharded as "
                    "the parameter is; state that is neither elementwise, such as torch.zeros_like(parameter), nor a "
                    "scalar cannot be saved"
                )
            found[key] = value
        state[every[0]] = found
    if runtime is not None:
        for link in runtime.links:
            check_agreement(link, described)
    groups = [
        {**group, "params": [names[parameter][0] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load_named_state(
    model: nn.Module,
    runtime: ShardedRuntime | None,
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, Any],
    *,
    copy: bool = True,
) -> None:
    """Make an optimizer continue from a state, named or numbered, whole or sharded.

    Without `copy` the tensors given become the optimizer's where they can.
    """
    optimizer.load_state_dict(prepare_named_state(model, runtime, optimizer, given, copy=copy))


def prepare_named_state(
    model: nn.Module,
    runtime: ShardedRuntime | None,
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, Any],
    *,
    copy: bool = True,
) -> dict[str, Any]:
    """Return what `optimizer.load_state_dict` takes for a state; refuse a wrong one, and change nothing."""
    names = parameter_names(model, optimizer)
    places = flat_places(runtime)
    shapes = {
        name: (places[parameter][0].flat_specs[places[parameter][1]].shape if parameter in places else parameter.shape)
        for parameter, every in names.items()
        for name in every
    }
    named = name_state(given, [[names[each] for each in group["params"]] for group in optimizer.param_groups])
    elementwise = _elementwise(named["state"], shapes)
    settings = _settings(named["param_groups"])
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in optimizer.param_groups:
        numbers: list[int] = []
        wanted: dict[str, Any] | None = None
        for parameter in group["params"]:
            name = next((each for each in names[parameter] if each in settings), None)
            if name is None:
                raise InputError(
                    f"the optimizer has {names[parameter][0]!r}, and the saved optimizer state has not; give the state "
                    "of an optimizer with the same parameters"
                )
            if wanted is not None and not _same(wanted, settings[name]):
                raise InputError(
                    f"{names[parameter][0]!r} and {names[group['params'][0]][0]!r} are in one group of the optimizer, "
                    "and were in groups with different settings when saved; build the optimizer with the same groups"
                )
            wanted = settings[name]
            saved = named["state"].get(name)
            if saved is not None:
                state[number] = {
                    key: _own(value, places.get(parameter), elementwise[key], f"{key!r} of {name!r}", copy)
                    for key, value in saved.items()
                }
            numbers.append(number)
            number += 1
        groups.append({**(wanted or {key: each for key, each in group.items() if key != "params"}), "params": numbers})
    return {"state": state, "param_groups": groups}


def plain_optimizer_state(named: Mapping[str, Any]) -> dict[str, Any]:
    """Number a named optimizer state, as `optimizer.load_state_dict` of a plain optimizer takes it.

    The optimizer must be given its parameters in the same order and groups.
    """
    numbers: dict[str, int] = {}
    groups: list[dict[str, Any]] = []
    for group in named["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    return {"state": {numbers[name]: dict(each) for name, each in named["state"].items()}, "param_groups": groups}


def name_state(given: Mapping[str, Any], names: Sequence[Sequence[Sequence[str]]]) -> NamedState:
    """Name a numbered optimizer state; numbers count through groups of parameters with these names."""
    if not {"state", "param_groups"} <= given.keys():
        raise InputError(
            f"an optimizer state has 'state' and 'param_groups'; this has {', '.join(map(repr, given)) or 'nothing'}"
        )
    groups = given["param_groups"]
    if not any(isinstance(each, int) for group in groups for each in group["params"]):
        return {"state": dict(given["state"]), "param_groups": list(groups)}
    counts = [len(group["params"]) for group in groups]
    if counts != [len(group) for group in names]:
        raise InputError(
            f"this optimizer state has groups of {counts} parameters without names, and the optimizer groups of "
            f"{[len(group) for group in names]}; build the optimizer with the same groups, or give a state by names"
        )
    found = {
        number: every[0]
        for group, own in zip(groups, names, strict=True)
        for number, every in zip(group["params"], own, strict=True)
    }
    return {
        "state": {found[number]: each for number, each in given["state"].items()},
        "param_groups": [{**group, "params": [found[number] for number in group["params"]]} for group in groups],
    }


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return all names of the optimizer's parameters, in its order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name_in_state(name))
    found: dict[nn.Parameter, tuple[str, ...]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise InputError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's; give the model that the optimizer was built for, and do this between steps"
                )
            found[parameter] = tuple(names[parameter])
    return found


def flat_places(runtime: ShardedRuntime | None) -> dict[nn.Parameter, tuple[FlatShard, int]]:
    """Return the flat shard of every sharded parameter and its number there."""
    if runtime is None:
        return {}
    return {
        parameter: (flat, number)
        for unit in runtime.units
        for flat in unit.flats
        for number, parameter in enumerate(flat.parameters)
    }


def _own(value: Any, place: tuple[FlatShard, int] | None, elementwise: bool, what: str, copy: bool) -> Any:
    """Return this rank's part of a state, in a tensor that nobody else has."""
    if not isinstance(value, torch.Tensor):
        return value
    spec = None if place is None else place[0].flat_specs[place[1]]
    if isinstance(value, FlatDTensor) and spec is not None and value.flat_spec.alike(spec):
        return spec.wrap(value.local.detach().clone() if copy else value.local.detach())
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if spec is None or not elementwise:
        return value.detach().clone() if copy else value.detach()
    check_elementwise(what, value.shape, spec.shape)
    return spec.wrap(spec.own(value).detach().clone())


def check_elementwise(what: str, shape: Sequence[int], parameter_shape: Sequence[int]) -> None:
    """Refuse optimizer state of another shape than its parameter, which cannot be cut as the parameter is."""
    if tuple(shape) != tuple(parameter_shape):
        raise InputError(
            f"optimizer state {what} has shape {tuple(shape)}, and the parameter {tuple(parameter_shape)}; state "
            "that is neither elementwise nor a scalar cannot be sharded"
        )


def _elementwise(state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> dict[str, bool]:
    """See Note [Elementwise]."""
    found: dict[str, bool] = {}
    for name, values in state.items():
        for key, value in values.items():
            if shapes.get(name) and isinstance(value, torch.Tensor):
                found[key] = found.get(key, False) or value.dim() > 0
    for values in state.values():
        for key in values:
            found.setdefault(key, key != "step")
    return found


def _settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for name in group["params"]
    }


def _same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first is second or (first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and torch.equal(first, second)
    return first == second
