"""Copies that CPU kernels make of operands whose layout or dtype they cannot read, and plain scratch memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext


def bytes_of(tensor: Tensor) -> int:
    """Bytes of the tensor's elements, wherever they are."""
    return tensor.numel() * tensor.element_size()


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether the elements fill one block without gaps or overlap (c10, `is_non_overlapping_and_dense`)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


_CHANNELS_LAST = {
    4: ((1, 3, 2, 0), torch.channels_last),
    5: ((1, 4, 3, 2, 0), torch.channels_last_3d),
}


def suggested_format(tensor: Tensor) -> torch.memory_format:
    """Channels-last for strides in that order, with gaps or without (c10/core/MemoryFormat.h)."""
    order, layout = _CHANNELS_LAST.get(tensor.dim(), ((), torch.contiguous_format))
    sizes, strides = tensor.size(), tensor.stride()
    least = 0
    for dim in order:
        if sizes[dim] == 0 or strides[dim] < least or strides[1] == 0 or (dim == 0 and least == strides[1]):
            return torch.contiguous_format
        least = strides[dim] * max(1, sizes[dim])
    return layout


def contiguous_copy(tensor: Tensor) -> int:
    """Bytes of the copy that `tensor.contiguous()` makes, 0 when it is contiguous already."""
    return 0 if tensor.is_contiguous() else bytes_of(tensor)


def format_copy(tensor: Tensor, layout: torch.memory_format) -> int:
    """Bytes of the copy that `tensor.contiguous(memory_format=layout)` makes, 0 when it has that layout already."""
    return 0 if tensor.is_contiguous(memory_format=layout) else bytes_of(tensor)


def pool(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The input in the format that its strides suggest (ATen/native/cpu/MaxPoolKernel.cpp and its siblings)."""
    return format_copy(args[0], suggested_format(args[0]))


def pool_backward_by_gradient(
    context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor
) -> int:
    """All operands in the format that the gradient's strides suggest; a result in another is written in a copy.

    cpu/MaxPoolKernel.cpp, `max_pool2d_backward_kernel_impl`; cpu/AvgPoolKernel.cpp; cpu/AdaptiveAvgPoolKernel.cpp.
    """
    layout = suggested_format(args[0])
    indices = [value for value in args[2:] if isinstance(value, Tensor)]
    return sum(format_copy(tensor, layout) for tensor in (args[0], *indices, result))


def pool_backward_by_result(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Gradient and indices in the result's format (cpu/AdaptiveMaxPoolKernel.cpp)."""
    layout = suggested_format(result)
    indices = [value for value in args[2:] if isinstance(value, Tensor)]
    return sum(format_copy(tensor, layout) for tensor in (args[0], *indices))


def _roll(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Several dimensions are rolled one after the other (ATen/native/TensorTransformations.h, `roll_common`)."""
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    return result.numel() * result.element_size() if len(dims) > 1 else 0


def _pointwise_loss(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The unreduced loss, then the reduction (ATen/native/BinaryOps.cpp, `mse_loss_out` and its like)."""
    reduction = kwargs.get("reduction", args[2] if len(args) > 2 else 1)
    if reduction == 0:
        return 0
    mean_divisor = 8 + result.element_size() if reduction == 1 else 0
    return args[0].numel() * result.element_size() + mean_divisor


def _reduced_loss(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The result is first given the unreduced shape, and shrinking it to a scalar keeps that storage."""
    result = func(*args, **kwargs)
    if result.dim() == 0 and args[0].numel() > 1:
        return result.new_empty(args[0].numel()).as_strided((), ())
    return result


def _cumulative(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The input in the dtype of the result (ATen/native/ReduceOps.cpp, `impl_func_cum_ops`)."""
    return args[0].numel() * result.element_size() if args[0].dtype != result.dtype else 0


def _contiguous_input(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """ATen/native/SoftMax.cpp, `softmax_cpu_out`: the input is made contiguous."""
    return contiguous_copy(args[0])


def _softmax_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Gradient and output are made contiguous (ATen/native/SoftMax.cpp, `softmax_backward_cpu_out`)."""
    return contiguous_copy(args[0]) + contiguous_copy(args[1])


def _contiguous_result(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The result is contiguous, whatever the layout of the operands."""
    return torch.empty_like(func(*args, **kwargs), memory_format=torch.contiguous_format)


def _embedding(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """ATen/native/Embedding.cpp, `embedding_symint`: the indices are flattened."""
    return contiguous_copy(args[1])


_PARALLEL_ELEMENTS = 32768
"""From how many elements on kernels use several threads (ATen/Parallel.h, `internal::GRAIN_SIZE`)."""


def _whole(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """One partial result for each thread (ATen/native/TensorIteratorReduce.cpp, `two_pass_reduction`)."""
    several = context.threads > 1 and result.numel() == 1 and args[0].numel() >= _PARALLEL_ELEMENTS
    return context.threads * result.element_size() if several else 0


def _sum(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The input in the dtype of the result (ATen/native/ReduceOps.cpp through ReduceOpsUtils.h, `make_reduction`)."""
    cast = args[0].numel() * result.element_size() if args[0].dtype != result.dtype else 0
    return cast + _whole(context, func, args, kwargs, result)


def _embedding_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Gradient and indices are made contiguous (ATen/native/Embedding.cpp, `embedding_dense_backward_cpu`)."""
    return contiguous_copy(args[0]) + contiguous_copy(args[1])


_SHRUNK_LOSSES = tuple(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)

_POOLS = (
    "aten.max_pool2d_with_indices.default",
    "aten._adaptive_avg_pool2d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.avg_pool2d.default",
)
_WHOLE = tuple(f"aten.{name}.default" for name in ("amax", "amin", "nansum", "prod"))
_SOFTMAX_BACKWARDS = ("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")

KERNELS = {device: dict.fromkeys(_SHRUNK_LOSSES, _reduced_loss) for device in ("cpu", "cuda")}
KERNELS["cpu"] |= dict.fromkeys(_SOFTMAX_BACKWARDS, _contiguous_result)
WORKSPACES = {
    "cpu": {
        **dict.fromkeys(_SOFTMAX_BACKWARDS, _softmax_backward),
        **dict.fromkeys(_POOLS, pool),
        "aten.adaptive_max_pool2d_backward.default": pool_backward_by_result,
        "aten.avg_pool2d_backward.default": pool_backward_by_gradient,
        "aten.max_pool2d_with_indices_backward.default": pool_backward_by_gradient,
        "aten._adaptive_avg_pool2d_backward.default": pool_backward_by_gradient,
        "aten.roll.default": _roll,
        "aten.mse_loss.default": _pointwise_loss,
        "aten.smooth_l1_loss.default": _pointwise_loss,
        "aten.huber_loss.default": _pointwise_loss,
        "aten._softmax.default": _contiguous_input,
        "aten._log_softmax.default": _contiguous_input,
        "aten.embedding.default": _embedding,
        "aten.sum.default": _sum,
        "aten.sum.dim_IntList": _sum,
        **dict.fromkeys(_WHOLE, _whole),
        "aten.cumsum.default": _cumulative,
        "aten.cumprod.default": _cumulative,
        "aten.embedding_dense_backward.default": _embedding_backward,
    }
}
