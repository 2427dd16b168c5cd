"""Norms and finite checks of sharded gradients: every rank looks at its part, and one number is sent."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from memfit.errors import InputError
from memfit.sharded.fully_shard import get_runtime


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of a sharded model so that their norm is at most `max_norm`; return the norm before.

    Use it instead of `torch.nn.utils.clip_grad_norm_`, which would see this rank's part only.
    """
    if not norm_type > 0:
        raise InputError(
            f"norm_type is {norm_type!r}; give a positive number, or float('inf') for the largest gradient"
        )
    runtime = get_runtime(model)
    link = runtime.links[0]
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    sharded = runtime.parameters
    counted = [
        each.grad
        for each in parameters
        if each.grad is not None and each.grad.numel() and (each in sharded or link.rank == 0)
    ]
    total = get_total_norm(counted, norm_type).to(device=runtime.device, dtype=torch.float32)
    if math.isinf(norm_type):
        link.all_reduce(total, "all-reduce of the gradients' norm", largest=True).wait()
    else:
        total = total**norm_type
        link.all_reduce(total, "all-reduce of the gradients' norm").wait()
        total = total ** (1 / norm_type)
    clip_grads_with_norm_(parameters, max_norm, total)
    return total


@torch.no_grad()
def finite_gradients(model: nn.Module) -> bool:
    """Return whether no gradient on any rank is infinite or not a number."""
    runtime = get_runtime(model)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    wrong = torch.zeros((), device=runtime.device)
    for gradient in gradients:
        wrong += (~torch.isfinite(gradient)).any().to(wrong.device)
    for link in runtime.links:
        link.all_reduce(wrong, "all-reduce of what gradients are finite").wait()
    return not wrong.item()


# -- A gradient scaler for sharded models: a step is skipped on all ranks or on none ----------------------------------


class ShardedGradScaler(torch.amp.GradScaler):
    """torch's `GradScaler` for one sharded model; what one rank finds infinite, every rank does."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._runtime = get_runtime(model)
        super().__init__(self._runtime.device.type, **options)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        for found_inf in found.values():
            shared = found_inf.to(self._runtime.device)
            for link in self._runtime.links:
                link.all_reduce(shared, "all-reduce of what gradients are finite", largest=True).wait()
            found_inf.copy_(shared)
        return found
