"""Reductions and scans: sums, means, products, extremes and quantiles, cumulative sums and products.

Defined in torch by ATen/native/ReduceOps.cpp, TensorIteratorReduce.cpp and Sorting.cpp; the derivatives of products and
extremes by torch/csrc/autograd/FunctionsManual.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules.base import LOW_PRECISION, Rule, RuleContext
from memfit.torch_private.dispatch import below_autograd

_aten = torch.ops.aten

# -- sums and means ------------------------------------------------------------------------------------------


_PARALLEL_ELEMENTS = 32768
"""From how many elements on kernels use several threads (ATen/Parallel.h, `internal::GRAIN_SIZE`)."""


def _reduce_whole(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """One partial result for each thread (ATen/native/TensorIteratorReduce.cpp, `two_pass_reduction`)."""
    several = context.threads > 1 and result.numel() == 1 and args[0].numel() >= _PARALLEL_ELEMENTS
    return context.threads * result.element_size() if several else 0


def _sum(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The input in the dtype of the result (ATen/native/ReduceOps.cpp through ReduceOpsUtils.h, `make_reduction`)."""
    cast = args[0].numel() * result.element_size() if args[0].dtype != result.dtype else 0
    return cast + _reduce_whole(context, func, args, kwargs, result)


def _mean(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """`mean` divides its sum by a number (ATen/native/ReduceOps.cpp, `mean_out` on CPU).

    A mean of 16-bit numbers is that of a float32 copy; any other copy is to the dtype of the result.
    """
    source = args[0]
    if result.dtype in LOW_PRECISION:
        copied = 4 * source.numel() if source.dtype != torch.float32 else 0
        return 4 * result.numel() + max(copied, 8 + 4)
    copied = source.numel() * result.element_size() if source.dtype != result.dtype else 0
    return max(copied, 8 + result.element_size()) if result.is_floating_point() else copied


def _cumulative(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The input in the dtype of the result (ATen/native/ReduceOps.cpp, `impl_func_cum_ops`)."""
    return args[0].numel() * result.element_size() if args[0].dtype != result.dtype else 0


# -- products --------------------------------------------------------------------------------------------------
#
# On meta tensors the derivatives of `prod` and `cumprod` take the way that is safe with zeros, and needs more memory
# (FunctionsManual.cpp, `prod_backward`; ReduceOps.cpp, `cumprod_backward`). On a device they look for zeros first, and
# divide by the input when there are none.


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


# -- extremes and quantiles --------------------------------------------------------------------------------------


def _extreme(name: str) -> Rule:
    def rule(context: RuleContext, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Without a dimension the gradient is shared by all elements that equal the result."""
        if args or kwargs or not input.requires_grad or not torch.is_grad_enabled():
            return NotImplemented
        return _Extreme.apply(input, name)

    return rule


class _Extreme(torch.autograd.Function):
    """FunctionsManual.cpp, `evenly_distribute_backward`, which on CPU asks whether the result is NaN: none is here."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, name: str) -> Tensor:
        with below_autograd():
            value = getattr(_aten, name)(input)
        ctx.save_for_backward(input, value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, value = ctx.saved_tensors
        with below_autograd():
            value.isnan()
            mask = input == value
            spread = grads[0].new_zeros(input.shape, dtype=input.dtype)
            return spread.masked_fill_(mask, grads[0] / mask.sum()), None


def _quantile(name: str) -> Rule:
    def rule(context: RuleContext, input: Tensor, q: Any, *args: Any, **kwargs: Any) -> Tensor:
        """A number is made a tensor, as in C++ (ATen/native/Sorting.cpp), beside the input and without a value."""
        return getattr(torch, name)(input, q if isinstance(q, Tensor) else input.new_full((), q), *args, **kwargs)

    return rule


_WHOLE = tuple(f"aten.{name}.default" for name in ("amax", "amin", "nansum", "prod"))
_QUANTILES = {name: _quantile(name) for name in ("quantile", "nanquantile")}
FUNCTIONS = {device: {"prod": _prod, "cumprod": _cumprod, **_QUANTILES} for device in ("cpu", "cuda")}
# On CPU the gradient of an extreme of the whole tensor depends on a value.
FUNCTIONS["cpu"] |= {name: _extreme(name) for name in ("max", "min", "median", "nanmedian")}
WORKSPACES = {
    "cpu": {
        "aten.sum.default": _sum,
        "aten.sum.dim_IntList": _sum,
        **dict.fromkeys(_WHOLE, _reduce_whole),
        "aten.mean.dim": _mean,
        "aten.mean.default": _mean,
        "aten.cumsum.default": _cumulative,
        "aten.cumprod.default": _cumulative,
    },
    "cuda": {"aten.cumsum.default": _cumulative, "aten.cumprod.default": _cumulative},
}
