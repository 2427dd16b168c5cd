"""`torch.func`: whether a transform is active, and what a wrapped tensor wraps (torch/csrc/functorch/init.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

_functorch = torch._C._functorch


def unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor inside all wrappers of `vmap`, `grad` and their like."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def transform_active() -> bool:
    """Return whether any transform of `torch.func` is active."""
    return _functorch.maybe_current_level() is not None


def differentiates() -> bool:
    """Return whether a transform that differentiates is active (`grad`, `vjp`, `jvp`)."""
    kinds = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)
    return any(level.key() in kinds for level in _functorch.get_interpreter_stack() or ())
