"""Activations whose derivative is one kernel on the target and a composition on meta tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.torch_private.dispatch import below_autograd

_aten = torch.ops.aten


def _mish(context: RuleContext, input: Tensor) -> Tensor:
    """ATen/native/Activation.cpp, `mish` and `mish_backward`."""
    return _Mish.apply(input)


class _Mish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        with below_autograd():
            return _aten.mish(input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (input,) = ctx.saved_tensors
        with below_autograd():
            return _aten.mish_backward(grads[0], input)


FUNCTIONS = {device: {"mish": _mish} for device in ("cpu", "cuda")}
