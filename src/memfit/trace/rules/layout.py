"""Copies that CPU kernels make of operands whose layout or dtype they cannot read, and plain scratch memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.trace.rules import RuleContext


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


def _pool_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The gradient, and the indices, in the input's memory format (ATen/native/AdaptiveMaxPooling2d.cpp, ...)."""
    if args[1].dim() != 4:
        return contiguous_copy(args[0])
    wanted = torch.contiguous_format if args[1].is_contiguous() else torch.channels_last
    operands = (args[0], *(value for value in args[2:] if isinstance(value, Tensor)))
    return sum(
        0 if tensor.is_contiguous(memory_format=wanted) else tensor.numel() * tensor.element_size()
        for tensor in operands
    )


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


def _embedding(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """ATen/native/Embedding.cpp, `embedding_symint`: the indices are flattened."""
    return contiguous_copy(args[1])


def _sum(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The input in the dtype of the result (ATen/native/ReduceOps.cpp through ReduceOpsUtils.h, `make_reduction`)."""
    return args[0].numel() * result.element_size() if args[0].dtype != result.dtype else 0


def _embedding_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Gradient and indices are made contiguous (ATen/native/Embedding.cpp, `embedding_dense_backward_cpu`)."""
    return contiguous_copy(args[0]) + contiguous_copy(args[1])


_SHRUNK_LOSSES = tuple(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)

KERNELS = {device: dict.fromkeys(_SHRUNK_LOSSES, _reduced_loss) for device in ("cpu", "cuda")}
WORKSPACES = {
    "cpu": {
        "aten.adaptive_max_pool2d_backward.default": _pool_backward,
        "aten.max_pool2d_with_indices_backward.default": _pool_backward,
        "aten._adaptive_avg_pool2d_backward.default": _pool_backward,
        "aten.roll.default": _roll,
        "aten.mse_loss.default": _pointwise_loss,
        "aten.smooth_l1_loss.default": _pointwise_loss,
        "aten.huber_loss.default": _pointwise_loss,
        "aten._softmax.default": _contiguous_input,
        "aten._log_softmax.default": _contiguous_input,
        "aten.embedding.default": _embedding,
        "aten.sum.default": _sum,
        "aten.sum.dim_IntList": _sum,
        "aten.cumsum.default": _cumulative,
        "aten.cumprod.default": _cumulative,
        "aten.embedding_dense_backward.default": _embedding_backward,
    }
}
