"""The state of torch's optimizers, made without a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from memfit.torch_private.dispatch import DisableTorchFunction, disable_current_modes

_META = torch.device("meta")
_ADAM = ("group", "params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")


def init_adam_state(optimizer: torch.optim.Optimizer, made: Callable[[torch.Tensor], Any]) -> bool:
    """Give an Adam or AdamW the state that its first step leaves, values aside; return False for any other optimizer.

    `_init_group` (torch/optim/adam.py) makes the state of a group's parameters, and the step counts it on. It is called
    for one parameter of each group; the others get the like of it, and `made` is told of their tensors. Counters that
    are on the device, as fused steps have them, are torch's to make. Without `_init_group`, where its arguments are
    others, or where a hook of the user's (`_optimizer_step_pre_hooks`, torch/optim/optimizer.py) comes before the step,
    the caller runs the step itself.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or "step" in vars(optimizer):
        return False
    hooked: Any = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    init_group: Any = getattr(optimizer, "_init_group", None)
    if hooked or init_group is None or tuple(inspect.signature(init_group).parameters) != _ADAM:
        return False
    with torch.no_grad():
        for group in optimizer.param_groups:
            with DisableTorchFunction():
                trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            on_device = group["fused"] or group["capturable"]
            done = 0
            while done < len(trained):
                init_group({**group, "params": [trained[done]]}, [], [], [], [], [], [])
                done += 1 if on_device else 1 + _add_like(optimizer, trained[done], trained[done + 1 :], made)
    with DisableTorchFunction(), disable_current_modes():
        counters = [entries["step"] for entries in optimizer.state.values() if not entries["step"].is_meta]
        if counters:
            torch._foreach_add_(counters, 1)
    return True


def _add_like(
    optimizer: torch.optim.Optimizer,
    first: torch.Tensor,
    others: list[torch.Tensor],
    made: Callable[[torch.Tensor], Any],
) -> int:
    """Give parameters the state that another one of their group has, until one is not of the same kind; count them."""
    with DisableTorchFunction(), disable_current_modes():
        state = optimizer.state[first].items()
        counters = {name: tensor for name, tensor in state if tensor.dim() == 0 and not tensor.is_meta}
        like = {name: tensor.dtype for name, tensor in state if tensor.is_meta and tensor.shape == first.shape}
        if len(counters) + len(like) != len(state) or not _is_plain(first):
            return 0
        for count, parameter in enumerate(others):
            if parameter.dtype != first.dtype or not _is_plain(parameter):
                return count
            size, stride = parameter.size(), parameter.stride()
            entries = {
                name: torch.empty_strided(size, stride, dtype=like[name], device=_META)
                if name in like
                else counters[name].clone()
                for name, _ in state
            }
            for tensor in entries.values():
                made(tensor)
            optimizer.state[parameter] = entries
    return len(others)


def _is_plain(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a contiguous meta tensor with a dense gradient."""
    plain = type(parameter) in (torch.Tensor, torch.nn.Parameter) and parameter.is_meta and parameter.is_contiguous()
    return plain and not parameter.grad.is_sparse  # type: ignore[union-attr]
