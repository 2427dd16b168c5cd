"""Reductions and scans: sums, means, products, extremes and quantiles, cumulative sums and products.

Defined in torch by ATen/native/ReduceOps.cpp, TensorIteratorReduce.cpp and Sorting.cpp, on CUDA by cuda/Reduce*.cu; the
derivatives of products and extremes by torch/csrc/autograd/FunctionsManual.cpp. What CUDA's kernel stages is in
`reduce_kernel.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules.base import LOW_PRECISION, Rule, RuleContext, bytes_of
from memfit.capture.rules.reduce_kernel import Reduction, plain_kernel, staging_bytes, sum_kernel
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


# -- reductions on CUDA ----------------------------------------------------------------------------------------


def _cuda_sum(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """A copy in the dtype of the result, if that is another, and the staging of partial sums.

    16 bits are summed to float32 without a copy (ReduceOpsUtils.h, `make_reduction_from_out_ty`).
    """
    source, dims = args[0], _dims(args, kwargs, 1)
    same = source.dtype == result.dtype or (source.dtype in LOW_PRECISION and result.dtype == torch.float32)
    dtype = source.dtype if same else result.dtype
    copy = 0 if same else source.numel() * dtype.itemsize
    return copy + staging_bytes(context, source, dims, sum_kernel(dtype, result.dtype), result.element_size())


def _cuda_norm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Staging only (cuda/ReduceNormKernel.cu): the order of the norm comes before the dimensions."""
    kernel = plain_kernel(args[0].dtype, result.dtype)
    return staging_bytes(context, args[0], _dims(args, kwargs, 2), kernel, result.element_size())


def _cuda_extreme(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Extremes, `any` and `all` accumulate in the input's dtype.

    cuda/ReduceMaxValuesKernel.cu, ReduceMinValuesKernel.cu, ReduceLogicKernel.cu.
    """
    size = args[0].element_size()
    kernel = Reduction(accumulator_bytes=size, element_bytes=size)
    return staging_bytes(context, args[0], _dims(args, kwargs, 1), kernel, result.element_size())


def _cuda_extreme_place(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """An extreme with its index is a pair of 16 bytes, whatever the dtype (SharedReduceOps.h, `MinMaxReductionOps`).

    `argmax` of a whole tensor flattens it first (ReduceOps.cpp, `argmax_argmin_impl`).
    """
    source, dims = args[0], _dims(args, kwargs, 1)
    copy = bytes_of(source) if dims is None and not source.is_contiguous() else 0
    kernel = Reduction(accumulator_bytes=16, element_bytes=source.element_size(), accumulates_in_output=False)
    output_bytes = (result if isinstance(result, Tensor) else result[0]).element_size()
    return copy + staging_bytes(context, source, dims, kernel, output_bytes)


def _cuda_variance(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Mean, sum of squares and two counts a value; two elements are read at once.

    SharedReduceOps.h, `WelfordData`; cuda/ReduceMomentKernel.cu, `std_var_kernel_impl`.
    """
    source = args[0]
    wide = 32 if source.dtype == torch.float64 else 16
    kernel = Reduction(
        accumulator_bytes=wide, element_bytes=source.element_size(), input_vector=2, accumulates_in_output=False
    )
    output_bytes = (result if isinstance(result, Tensor) else result[0]).element_size()
    return staging_bytes(context, source, _dims(args, kwargs, 1), kernel, output_bytes)


def _cuda_logsumexp(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Maxima, and the exponentials of every element (ReduceOps.cpp, `logsumexp_out_impl`).

    Integers are converted first.
    """
    source = args[0]
    converted = 0 if source.is_floating_point() else source.numel() * result.element_size()
    exponentials = source.numel() * result.element_size()
    kernel = sum_kernel(result.dtype, result.dtype)
    staged = staging_bytes(context, source, _dims(args, kwargs, 1), kernel, result.element_size())
    return converted + bytes_of(result) + exponentials + staged


def _dims(args: Any, kwargs: dict[str, Any], position: int) -> list[int] | None:
    """Return the dimensions that a call reduces, None for all."""
    dims = args[position] if len(args) > position else kwargs.get("dim")
    return [dims] if isinstance(dims, int) else (list(dims) if dims else None)


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
_CUDA_SUMS = (
    *(f"{name}.default" for name in ("sum", "mean", "nansum", "prod")),
    *("sum.dim_IntList", "mean.dim", "prod.dim_int"),
)
_CUDA_NORMS = ("linalg_vector_norm.default", "norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype")
_CUDA_EXTREMES = (
    *(f"{name}.default" for name in ("amax", "amin", "max", "min", "any", "all")),
    *(f"{name}.{overload}" for name in ("any", "all") for overload in ("dim", "dims")),
)
_CUDA_PLACES = ("max.dim", "min.dim", "argmax.default", "argmin.default")
_CUDA_VARIANCES = tuple(f"{name}.correction" for name in ("var", "std", "var_mean", "std_mean"))
_CUDA_REDUCTIONS = (
    (_CUDA_SUMS, _cuda_sum),
    (_CUDA_NORMS, _cuda_norm),
    (_CUDA_EXTREMES, _cuda_extreme),
    (_CUDA_PLACES, _cuda_extreme_place),
    (_CUDA_VARIANCES, _cuda_variance),
)
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
    "cuda": {
        "aten.cumsum.default": _cumulative,
        "aten.cumprod.default": _cumulative,
        **{f"aten.{name}": rule for names, rule in _CUDA_REDUCTIONS for name in names},
        "aten.logsumexp.default": _cuda_logsumexp,
    },
}
