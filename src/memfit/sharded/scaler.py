"""A gradient scaler for sharded models: a step is skipped on all ranks or on none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit.sharded.sharding import get_runtime


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
