"""Norms and finite checks of sharded gradients: every rank looks at its part, and one number is sent.

Gradients are DTensors, so that torch's own `clip_grad_norm_` and `GradScaler` are right for a sharded model, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit.errors import InputError
from memfit.sharded.fully_shard import get_runtime
from memfit.torch_private.distributed_tensors import local_tensor


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of a sharded model so that their norm is at most `max_norm`; return the norm before."""
    if not norm_type > 0:
        raise InputError(
            f"norm_type is {norm_type!r}; give a positive number, or float('inf') for the largest gradient"
        )
    get_runtime(model)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


@torch.no_grad()
def finite_gradients(model: nn.Module) -> bool:
    """Return whether no gradient on any rank is infinite or not a number."""
    runtime = get_runtime(model)
    wrong = torch.zeros((), device=runtime.device)
    for parameter in model.parameters():
        gradient = None if parameter.grad is None else local_tensor(parameter.grad)
        if gradient is not None:
            wrong += (~torch.isfinite(gradient)).any().to(wrong.device)
    for link in runtime.links:
        link.all_reduce(wrong, "all-reduce of what gradients are finite").wait()
    return not wrong.item()


class ShardedGradScaler(torch.amp.GradScaler):
    """torch's `GradScaler` on the device of a sharded model."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(get_runtime(model).device.type, **options)
