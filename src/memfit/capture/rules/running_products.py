"""`prod` and `cumprod`: on meta tensors their derivatives take the way that is safe with zeros, and needs more memory.

torch/csrc/autograd/FunctionsManual.cpp, `prod_backward`; ATen/native/ReduceOps.cpp, `cumprod_backward`. On a device
they look for zeros first, and divide by the input when there are none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.torch_private.dispatch import below_autograd

_aten = torch.ops.aten


def _prod(
    context: RuleContext,
    input: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **unusual: Any,
) -> Any:
    if unusual or (dim is not None and not isinstance(dim, int)) or not _divides(context, "prod", input):
        return NotImplemented
    return _Prod.apply(input, dim, keepdim, dtype)


def _cumprod(context: RuleContext, input: Tensor, dim: int, *, dtype: torch.dtype | None = None, **unusual: Any) -> Any:
    if unusual or not isinstance(dim, int) or not _divides(context, "cumprod", input):
        return NotImplemented
    return _Cumprod.apply(input, dim, dtype)


def _divides(context: RuleContext, name: str, input: Tensor) -> bool:
    """Whether a derivative is taken that looks for zeros."""
    if not (torch.is_grad_enabled() and input.requires_grad and input.dim() > 0):
        return False
    context.note(f"{name}: captured as without zeros in its input; with zeros its backward takes more memory")
    return True


class _Prod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
        ctx.dim, ctx.keepdim = dim, keepdim
        with below_autograd():
            if dim is None:
                result = _aten.prod(input, dtype=dtype)
            else:
                result = _aten.prod.dim_int(input, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(input, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        input, result = ctx.saved_tensors
        input = input.to(grad.dtype)
        if ctx.dim is None:
            _aten.eq.Scalar(input, 0)
        else:
            if not ctx.keepdim:
                grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
            zeros = _aten.eq.Scalar(input, 0)
            count = zeros.sum(ctx.dim, True)
            count.sum()
        return grad * (result / input), None, None, None


class _Cumprod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        ctx.dim = dim
        with below_autograd():
            result = _aten.cumprod(input, dim, dtype=dtype)
        ctx.save_for_backward(input, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, result = ctx.saved_tensors
        grad = grads[0].to(input.dtype)
        if input.size(ctx.dim) == 1:
            return grad, None, None
        weighted = result * grad
        zeros = _aten.eq.Scalar(input, 0)
        zeros.any()
        turned = weighted.flip(ctx.dim)
        summed = turned.cumsum(ctx.dim)
        back = summed.flip(ctx.dim)
        del turned, summed
        return back / input, None, None


FUNCTIONS = {device: {"prod": _prod, "cumprod": _cumprod} for device in ("cpu", "cuda")}
