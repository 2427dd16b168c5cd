"""The state of torch's optimizers, made without a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from memfit.torch_private.dispatch import DisableTorchFunction, disable_current_modes

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
            first: torch.Tensor | None = None
            alike = not group["fused"] and not group["capturable"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if first is None or not alike or not _add_like(optimizer, first, parameter, made):
                    init_group({**group, "params": [parameter]}, [], [], [], [], [], [])
                    first = parameter
    with DisableTorchFunction(), disable_current_modes():
        for entries in optimizer.state.values():
            if not entries["step"].is_meta:
                entries["step"] += 1
    return True


def _add_like(
    optimizer: torch.optim.Optimizer, first: torch.Tensor, parameter: torch.Tensor, made: Callable[[torch.Tensor], Any]
) -> bool:
    """Give a parameter the state that another one of its group has; return False where it is not of the same kind."""
    with DisableTorchFunction(), disable_current_modes():
        for each in (first, parameter):
            plain = type(each) in (torch.Tensor, torch.nn.Parameter) and each.is_meta and each.is_contiguous()
            if not plain or each.dtype != first.dtype or each.grad.is_sparse:  # type: ignore[union-attr]
                return False
        entries: dict[str, torch.Tensor] = {}
        for name, tensor in optimizer.state[first].items():
            if tensor.is_meta and tensor.shape == first.shape:
                size, stride = parameter.size(), parameter.stride()
                entries[name] = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
            elif tensor.dim() == 0 and not tensor.is_meta:
                entries[name] = tensor.clone()
            else:
                return False
        for tensor in entries.values():
            made(tensor)
        optimizer.state[parameter] = entries
    return True
