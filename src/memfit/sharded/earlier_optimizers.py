"""Optimizers that were made before their model was sharded: they are given the sharded parameters when they step.

Sharding puts other objects in the place of a model's parameters. FSDP2's users must make the optimizer afterwards, and
one that was made before trains nothing, without a word. Here a given-up parameter knows its successor, and its gradient
is the successor's: what clears, clips or unscales gradients before the first step sees and changes the right ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.errors import InputError
from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.torch_private.compiler import disable_dynamo
from memfit.torch_private.dispatch import is_wrapper_subclass
from memfit.torch_private.distributed_tensors import local_tensor

_SUCCESSOR = "_memfit_successor"
_COUNTER = "step"
"""The state in which torch's optimizers count their steps: one number, also of a parameter that is one number."""
_watched: list[Any] = []


def give_up(parameter: nn.Parameter, successor: nn.Parameter) -> None:
    """Free the data of a parameter that another one has taken the place of."""
    parameter.grad = None
    parameter.__dict__[_SUCCESSOR] = successor
    local = local_tensor(parameter.detach()) if isinstance(parameter, DTensor) else parameter
    if not local.is_meta and not is_wrapper_subclass(local):  # whose memory is that of its inner tensors
        local.data = local.data.new_empty(0)
    parameter.__class__ = _given_up(type(parameter))
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(disable_dynamo(_before_step)))


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Move an optimizer; as a hook of all optimizers it is also called where the step of one is compiled."""
    move_optimizer(optimizer)


def is_given_up(parameter: torch.Tensor) -> bool:
    """Return whether another parameter has taken the place of this one."""
    return _SUCCESSOR in parameter.__dict__


@cache
def _given_up(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class of given-up parameters of a class."""

    def get_grad(parameter: nn.Parameter) -> torch.Tensor | None:
        return parameter.__dict__[_SUCCESSOR].grad

    def set_grad(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        parameter.__dict__[_SUCCESSOR].grad = gradient

    return type(f"GivenUp{kind.__name__}", (kind,), {"grad": property(get_grad, set_grad)})


def move_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step the successors of parameters that were given up, with its state sharded as they are.

    State of the parameter's shape is sharded, one number stays; anything else means what only the optimizer knows, and
    is refused.
    """
    found: dict[torch.Tensor, FlatDTensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            successor = parameter.__dict__.get(_SUCCESSOR)
            if successor is not None:
                found[parameter] = successor
    if not found:
        return
    state = [
        (found.get(parameter, parameter), _sharded(optimizer, parameter.dtype, found[parameter], values))
        if parameter in found
        else (parameter, values)
        for parameter, values in optimizer.state.items()
    ]
    for group in optimizer.param_groups:  # in place: schedulers hold the groups, some optimizers the lists
        group["params"][:] = [found.get(parameter, parameter) for parameter in group["params"]]
    optimizer.state.clear()
    optimizer.state.update(state)


def _sharded(
    optimizer: torch.optim.Optimizer, before: torch.dtype, successor: FlatDTensor, values: Mapping[str, Any]
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and name != _COUNTER and value.shape == successor.shape:
            # shards may have another dtype than the model had; as in `load_state_dict` of optimizers, state follows it
            dtype = successor.dtype if value.is_floating_point() and value.dtype == before else value.dtype
            made[name] = successor.flat_spec.wrap(successor.flat_spec.own(value).to(successor.device, dtype, copy=True))
        elif isinstance(value, torch.Tensor) and value.numel() != 1:
            raise InputError(
                f"{type(optimizer).__name__} keeps {name!r} of {successor.flat_spec.slot.names[0]!r}, a tensor of "
                f"{list(value.shape)}, which cannot be sharded with the parameter's {list(successor.shape)}: shard the "
                "model before the optimizer's first step, or make the optimizer after it"
            )
        else:
            made[name] = value
    return made
