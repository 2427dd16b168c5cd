"""Convolution, pooling, resampling and other ops on images: layouts and what the kernels allocate inside.

Covers `aten.convolution`, the 2d and 3d pools, upsampling, `im2col` and `col2im`, pixel shuffles and padding.
Defined in torch by ATen/native/Convolution.cpp, ConvUtils.h and mkldnn/Conv.cpp, cpu/MaxPoolKernel.cpp and its
siblings, Im2Col.cpp, Col2Im.cpp, PixelShuffle.cpp, ReflectionPad.cpp, and cudnn/Conv_v8.cpp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memfit.capture.kernels import vendor_has
from memfit.capture.rules.base import (
    CHANNELS_LAST,
    LOW_PRECISION,
    RuleContext,
    bytes_of,
    format_copy,
    input_gradient,
    suggested_format,
)
from memfit.capture.rules.measured_kernels import probed
from memfit.capture.rules.reduce_kernel import staging_bytes, sum_kernel

# -- convolution ---------------------------------------------------------------------------------------------


def _cpu_convolution(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Channels-last in, channels-last out (ATen/native/ConvUtils.h, `mkldnn_conv_use_channels_last`).

    ATen's own kernels for three dimensions are contiguous.
    """
    result = func(*args, **kwargs)
    vendor = result.dim() != 5 or _vendor_convolves(context, *args)
    if vendor and any(suggested_format(each) is not torch.contiguous_format for each in args[:2]):
        return torch.empty_like(result, memory_format=CHANNELS_LAST[result.dim()])
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _vendor_convolves(
    context: RuleContext, source: Tensor, weight: Tensor, _: Any, stride: Any, padding: Any, dilation: Any, *rest: Any
) -> bool:
    """Whether oneDNN convolves (ATen/native/Convolution.cpp, `ConvParams::use_mkldnn`)."""
    if source.dtype in LOW_PRECISION:
        return vendor_has(source.dtype)
    plain = all(step == 1 for step in (*stride, *dilation)) and weight.shape[-2:] == (1, 1)
    wide = weight.size(-1) > 3 and weight.size(-2) > 3
    samples, groups = source.size(0), rest[-1]
    return (
        vendor_has(source.dtype)
        and (not plain or samples >= 16 or context.threads > 1)
        and (groups > 1 or wide or samples > 1 or math.prod(source.shape[:4]) > 20480)
    )


def _cuda_convolution(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Channels-last where input or weight is, as on CPU (ConvUtils.h, `cudnn_conv_suggest_memory_format`).

    MIOpen keeps to contiguous results unless it is told otherwise.
    """
    result = func(*args, **kwargs)
    layout = CHANNELS_LAST.get(result.dim())
    asked = layout is not None and any(suggested_format(each) is layout for each in args[:2])
    if not asked or context.vendor == "AMD" or torch.float64 in (args[0].dtype, args[1].dtype):
        return result
    return torch.empty_like(result, memory_format=layout)


def _cuda_convolution_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """cuDNN's workspace is chosen at run time (cudnn/Conv_v8.cpp, `get_plans_from_find` and heuristics)."""
    context.note("convolutions: cuDNN chooses its workspace at run time; it is in what is reserved, not in the peak")
    return 0


def _cuda_convolution_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The bias's gradient is a sum over all but the channels (Convolution.cpp, `convolution_backward`)."""
    grad, mask = args[0], args[-1]
    if not mask[2] or grad.dim() < 3:
        return 0
    dims = [dim for dim in range(grad.dim()) if dim != 1]
    return staging_bytes(context, grad, dims, sum_kernel(grad.dtype, grad.dtype), grad.element_size())


# -- pools on CPU --------------------------------------------------------------------------------------------


def _pool(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The input in the format that its strides suggest (ATen/native/cpu/MaxPoolKernel.cpp and its siblings)."""
    return format_copy(args[0], suggested_format(args[0]))


def _pool_backward_by_gradient(
    context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor
) -> int:
    """All operands in the format that the gradient's strides suggest; a result in another is written in a copy.

    cpu/MaxPoolKernel.cpp, `max_pool2d_backward_kernel_impl`; cpu/AvgPoolKernel.cpp; cpu/AdaptiveAvgPoolKernel.cpp.
    """
    layout = suggested_format(args[0])
    indices = [value for value in args[2:] if isinstance(value, Tensor)]
    return sum(format_copy(tensor, layout) for tensor in (args[0], *indices, result))


def _pool_backward_by_result(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Gradient and indices in the result's format (cpu/AdaptiveMaxPoolKernel.cpp)."""
    layout = suggested_format(result)
    indices = [value for value in args[2:] if isinstance(value, Tensor)]
    return sum(format_copy(tensor, layout) for tensor in (args[0], *indices))


# -- layouts and storages that torch has no meta kernel for, or a wrong one -------------------------------------


def _keeps_format(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """On CPU the result is laid out as the input suggests (ATen/native/PixelShuffle.cpp, ReflectionPad.cpp, ...)."""
    result = func(*args, **kwargs)
    return torch.empty_like(result, memory_format=suggested_format(args[0]))


def _resized(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The result is first made as large as the input; shrinking it keeps that storage (ATen/native/Col2Im.cpp)."""
    result = func(*args, **kwargs)
    if bytes_of(result) >= bytes_of(args[0]):
        return result
    return result.new_empty(args[0].numel()).as_strided(result.shape, result.stride())


def _resized_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """What is too small for the result is freed once that has its own memory (ATen/native/Im2Col.cpp)."""
    return bytes_of(args[0]) if bytes_of(args[0]) < bytes_of(result) else 0


_POOLS = (
    "aten.max_pool2d_with_indices.default",
    "aten._adaptive_avg_pool2d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.avg_pool2d.default",
)
_RESAMPLING = """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa max_pool3d_with_indices avg_pool3d
_adaptive_avg_pool3d adaptive_max_pool3d"""
"""Forward and backward: positions and weights of each output, and copies, by format and instruction set."""
_FORMAT_KEEPERS = (
    "pixel_shuffle",
    "pixel_unshuffle",
    "max_unpool2d",
    "reflection_pad2d",
    "replication_pad2d",
    "replication_pad3d",
)
_RESIZED = ("aten.im2col.default", "aten.col2im.default")
KERNELS = {
    device: {
        **dict.fromkeys(_RESIZED, _resized),
        "aten.fractional_max_pool3d_backward.default": input_gradient,
    }
    for device in ("cpu", "cuda")
}
KERNELS["cpu"] |= {
    "aten.convolution.default": _cpu_convolution,
    **{f"aten.{name}.default": _keeps_format for name in _FORMAT_KEEPERS},
}
KERNELS["cuda"]["aten.convolution.default"] = _cuda_convolution
WORKSPACES = {
    "cpu": {
        "aten.convolution.default": probed,
        "aten.convolution_backward.default": probed,
        **dict.fromkeys(_POOLS, _pool),
        "aten.adaptive_max_pool2d_backward.default": _pool_backward_by_result,
        "aten.avg_pool2d_backward.default": _pool_backward_by_gradient,
        "aten.max_pool2d_with_indices_backward.default": _pool_backward_by_gradient,
        "aten._adaptive_avg_pool2d_backward.default": _pool_backward_by_gradient,
        **{f"aten.{name}{suffix}.default": probed for name in _RESAMPLING.split() for suffix in ("", "_backward")},
        **dict.fromkeys(_RESIZED, _resized_workspace),
    },
    "cuda": {
        "aten.convolution.default": _cuda_convolution_workspace,
        "aten.convolution_backward.default": _cuda_convolution_backward,
        **dict.fromkeys(_RESIZED, _resized_workspace),
    },
}
