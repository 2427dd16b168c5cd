"""Normalization layers: what they return and allocate, on CPU and CUDA.

Covers layer, RMS, group and batch norm: `rms_norm`, `group_norm` and `batch_norm` of torch, `aten._fused_rms_norm`,
`aten.native_layer_norm`, `aten.native_group_norm`, `aten.native_batch_norm`, `aten.cudnn_batch_norm` and their
backwards. Defined in torch by ATen/native/layer_norm.cpp, group_norm.cpp and Normalization.cpp with kernels in
cpu/layer_norm_kernel.cpp and cpu/group_norm_kernel.cpp, cuda/layer_norm_kernel.cu and cuda/group_norm_kernel.cu, and
cudnn/BatchNorm.cpp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules.base import RuleContext, bytes_of, contiguous_copy, memory_format_of, suggested_format
from memfit.capture.rules.measured_kernels import probed
from memfit.capture.rules.reduce_kernel import staging_bytes, sum_kernel
from memfit.torch_private.dispatch import below_autograd

_aten = torch.ops.aten


_CUDNN_MIN_EPSILON = 0.0
_CUDNN_BATCH_LIMIT = {True: 880801, False: 65535}
_LARGE_MAP, _LARGE_MAP_BACKWARD = 1024, 2048
"""Positions from which on channels-last group norm sums by thread (cpu/group_norm_kernel.cpp)."""


def _accumulator_bytes(tensor: Tensor) -> int:
    """Element size of `at::toAccumulateType` on CUDA: float32 for the 16-bit dtypes."""
    return max(4, tensor.element_size())


# -- RMS norm on CUDA: one fused kernel ----------------------------------------------------------------------


def _rms_norm(
    context: RuleContext,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """One fused kernel, unless dtypes differ or the layout is channels-last.

    layer_norm.cpp, `rms_norm_symint`.
    """
    mixed = weight is not None and weight.dtype != input.dtype
    if mixed or input.is_complex() or memory_format_of(input) is not torch.contiguous_format:
        return NotImplemented
    return _FusedRmsNorm.apply(input, tuple(normalized_shape), weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    """The autograd formula of `_fused_rms_norm`, which torch has on CUDA only (tools/autograd/derivatives.yaml)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, shape: tuple[int, ...], weight: Tensor | None, eps: float | None) -> Tensor:
        with below_autograd():
            output, factor = _aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, factor)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, factor = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with below_autograd():
            gradients = _aten._fused_rms_norm_backward(grads[0], input, ctx.shape, factor, weight, mask)
        return gradients[0], None, gradients[1], None


def _fused_rms_norm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result and a float32 factor per row (cuda/layer_norm_kernel.cu, `_fused_rms_norm_cuda`)."""
    source, shape = args[:2]
    rows = source.shape[: source.dim() - len(shape)] + (1,) * len(shape)
    dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
    return source.new_empty(source.shape), source.new_empty(rows, dtype=dtype)


def _fused_rms_norm_gradients(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Contiguous gradients of the input and the weight.

    cuda/layer_norm_kernel.cu, `_fused_rms_norm_backward_cuda`.
    """
    _, source, shape, _, weight, mask = args
    wanted = mask[1] and weight is not None
    return (source.new_empty(source.shape) if mask[0] else None, weight.new_empty(shape) if wanted else None)


def _rms_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """As layer norm, with one parameter (layer_norm_kernel.cu, `RMSNormBackwardKernelImpl`)."""
    grad, source, shape, _, _, mask = args
    width = math.prod(shape)
    rows = source.numel() // max(1, width)
    partial = gamma_beta_bytes(context, rows, width, source.dtype, int(mask[1]))
    return contiguous_copy(grad) + contiguous_copy(source) + partial


# -- layer norm ----------------------------------------------------------------------------------------------


def _contiguous_input(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The input is made contiguous first (`layer_norm_cpu`, and `layer_norm_cuda` of cuda/layer_norm_kernel.cu)."""
    return contiguous_copy(args[0])


def _layer_norm_results(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Statistics in the input's dtype, or in that of parameters that differ from it (`layer_norm_cpu`)."""
    result, *statistics = func(*args, **kwargs)
    source, _, weight, bias = args[:4]
    dtype = next((t.dtype for t in (weight, bias) if t is not None and t.dtype != source.dtype), source.dtype)
    return result, *(torch.empty_like(tensor, dtype=dtype) for tensor in statistics)


def _contiguous_gradient(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The input's gradient is contiguous, whatever the gradient that comes in.

    `layer_norm_backward_cpu`, and `layer_norm_backward_cuda` of cuda/layer_norm_kernel.cu.
    """
    gradient, *others = func(*args, **kwargs)
    if gradient is not None:
        gradient = gradient.new_empty(gradient.shape)
    return (gradient, *others)


def _cpu_layer_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Partial weight and bias gradients per thread (ATen/native/cpu/layer_norm_kernel.cpp, `LayerNormBackward`)."""
    grad, source, shape = args[:3]
    mask = args[-1]
    held = contiguous_copy(grad) + contiguous_copy(source)
    if mask[1] or mask[2]:
        held += context.threads * 2 * math.prod(shape) * source.element_size()
    return held


def _cuda_layer_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Copies of strided operands, and partial sums of the parameters' gradients."""
    grad, source, shape = args[:3]
    mask = args[-1]
    width = math.prod(shape)
    rows = source.numel() // max(1, width)
    partial = gamma_beta_bytes(context, rows, width, source.dtype, sum(map(bool, mask[1:3])))
    return contiguous_copy(grad) + contiguous_copy(source) + partial


def gamma_beta_bytes(context: RuleContext, rows: int, width: int, dtype: torch.dtype, gradients: int) -> int:
    """Partial sums of many short rows, and their sum (layer_norm_kernel.cu, `LaunchGammaBetaBackwardCUDAKernel`)."""
    if not gradients or rows <= 64 * 1024 or width // 32 >= context.multiprocessors // 2:
        return 0
    columns = -(-width // 32)
    blocks = min(64 * 1024 // 2 // columns, -(-rows // 32))
    partial = torch.empty((blocks, width), dtype=dtype, device="meta")
    staged = staging_bytes(context, partial, [0], sum_kernel(dtype, dtype), dtype.itemsize)
    return (gradients * blocks + 1) * width * dtype.itemsize + staged


# -- group norm ----------------------------------------------------------------------------------------------


def _cpu_group_norm(
    context: RuleContext,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Channels-last stays so on CPU, here and in the backward (ATen/native/group_norm.cpp, `group_norm`)."""
    layout = suggested_format(input)
    if layout is torch.contiguous_format:
        return NotImplemented
    return _ChannelsLastGroupNorm.apply(input.contiguous(memory_format=layout), weight, bias, num_groups, eps)


class _ChannelsLastGroupNorm(torch.autograd.Function):
    """The derivative of `native_group_norm` on CPU; for any other device torch's own asks for contiguous operands."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
        samples, channels = input.shape[:2]
        ctx.sizes = (samples, channels, math.prod(input.shape[2:]), groups)
        with below_autograd():
            output, mean, deviation = _aten.native_group_norm(input, weight, bias, *ctx.sizes, eps)
        ctx.save_for_backward(input, weight, mean, deviation)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, mean, deviation = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=suggested_format(input))
        mask = list(ctx.needs_input_grad[:3])
        with below_autograd():
            gradients = _aten.native_group_norm_backward(grad, input, mean, deviation, weight, *ctx.sizes, mask)
        return *gradients, None, None


def _group_norm_results(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result in the input's format, statistics in the dtype of the parameters (group_norm.cpp)."""
    source, weight, bias, samples, _, _, groups = args[:7]
    mixed = next((tensor.dtype for tensor in (weight, bias) if tensor is not None), source.dtype)
    statistics = [source.new_empty((samples, groups), dtype=mixed) for _ in range(2)]
    return torch.empty_like(source, memory_format=suggested_format(source)), *statistics


def _group_norm_gradients(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The input's gradient in the input's format (group_norm.cpp, `native_group_norm_backward`)."""
    source, weight, channels, mask = args[1], args[4], args[6], args[-1]
    parameter = source if weight is None else weight
    return (
        torch.empty_like(source, memory_format=suggested_format(source)) if mask[0] else None,
        *(parameter.new_empty((channels,)) if wanted else None for wanted in mask[1:]),
    )


def _cpu_group_norm_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Sums of channels-last maps: per sample and channel, and large ones also per thread (`GroupNormKernelImpl`)."""
    source, samples, channels, positions, groups = args[0], *args[3:7]
    if suggested_format(source) is torch.contiguous_format:
        return 0
    sums = context.threads * channels + groups if positions >= _LARGE_MAP else channels
    return 2 * samples * sums * max(4, source.element_size())


def _cpu_group_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Two sums per sample and channel (cpu/group_norm_kernel.cpp, `GroupNormBackwardKernelImplInternal`).

    Large channels-last maps have them also per thread, and per group.
    """
    source, samples, channels, positions, groups = args[1], *args[5:9]
    sums = channels
    if positions >= _LARGE_MAP_BACKWARD and suggested_format(source) is not torch.contiguous_format:
        sums += context.threads * channels + groups
    return 2 * samples * sums * max(4, source.element_size())


def _cuda_group_norm_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Scale and shift per sample and channel (cuda/group_norm_kernel.cu, `GroupNormKernelImplInternal`)."""
    source, weight, bias, samples, channels, positions, groups = args[:7]
    held = 0
    size = _accumulator_bytes(source)
    if source.element_size() < size:
        held += 2 * samples * groups * size
    affine = weight is not None or bias is not None
    channels_last = memory_format_of(source) is not torch.contiguous_format
    if channels_last or (affine and positions > 1):
        held += 2 * samples * channels * size
    return held


def _cuda_group_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """`ds`, `db`, `c1`, `c2` and `c3` (group_norm_kernel.cu, `GroupNormBackwardKernelImplInternal`)."""
    _, source, _, _, weight, samples, channels, positions, groups, mask = args
    size = _accumulator_bytes(source)
    per_group = 2 * samples * groups * size if mask[0] else 0
    channels_last = memory_format_of(source) is not torch.contiguous_format
    if positions == 1 and not channels_last:
        return per_group
    scale = samples * channels * size if mask[0] and weight is not None and not channels_last else 0
    return 2 * samples * channels * size + per_group + scale


# -- batch norm ----------------------------------------------------------------------------------------------


def _cpu_batch_norm_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Mean and variance sums (ATen/native/Normalization.cpp, `batch_norm_cpu_update_stats_template`).

    Channels-last inputs have one more buffer for each thread, in which it sums its rows.
    """
    buffers = 2 if args[0].is_contiguous() else 2 + context.threads
    return buffers * result[1].numel() * max(4, result[1].element_size())


def _batch_norm_results(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Statistics are saved in training only, in the dtype of the weight (Normalization.cpp, `batch_norm_cpu`)."""
    result, *_ = func(*args, **kwargs)
    dtype = next((tensor.dtype for tensor in args[1:4] if tensor is not None), result.dtype)
    features = result.size(1) if args[5] else 0
    return result, *(result.new_empty((features,), dtype=dtype) for _ in range(2))


def _batch_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The gradient is built in a second buffer (Normalization.cpp, `batch_norm_backward_cpu_template`).

    Where gradient and input are laid out differently, another kernel takes them one channel after the other.
    """
    grad, source = args[:2]
    if suggested_format(grad) is not suggested_format(source):
        return probed(context, func, args, kwargs, result)
    return bytes_of(source)


def _batch_norm_gradients(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The input's gradient in the input's format (Normalization.cpp, `batch_norm_backward_cpu_template`)."""
    gradient, *others = func(*args, **kwargs)
    if gradient is not None:
        gradient = torch.empty_like(gradient, memory_format=suggested_format(args[1]))
    return (gradient, *others)


def uses_cudnn(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    """Return whether cuDNN normalizes (ATen/native/Normalization.cpp, `_select_batch_norm_backend`)."""
    return (
        torch.backends.cudnn.enabled
        and weight is not None
        and bias is not None
        and torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and (running_mean is not None or training)
        and input.dim() >= 3
        and 0 < input.size(0) <= _CUDNN_BATCH_LIMIT[training]
        and input.numel() < 2**31 - 1
        and eps >= _CUDNN_MIN_EPSILON
    )


def _cuda_batch_norm(
    context: RuleContext,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """cuDNN where it can, with a contiguous input (Normalization.cpp, `_batch_norm_impl_index`)."""
    if input.numel() == 0 or not uses_cudnn(input, weight, bias, running_mean, training, eps):
        return NotImplemented
    source = input.contiguous(memory_format=memory_format_of(input))
    return _aten.cudnn_batch_norm(source, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _cudnn_batch_norm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Statistics only in training; the reserve is 0 for plain batch norm.

    cudnn/BatchNorm.cpp, `cudnn_batch_norm`.
    """
    source, weight = args[:2]
    training = args[5]
    output = torch.empty_like(source, memory_format=memory_format_of(source))
    features = source.size(1) if training else 0
    statistics = [weight.new_empty(features) for _ in range(2)]
    return (output, *statistics, source.new_empty(0, dtype=torch.uint8))


def _cudnn_batch_norm_gradients(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Every gradient is computed, wanted or not (cudnn/BatchNorm.cpp, `cudnn_batch_norm_backward`)."""
    source, _, weight = args[:3]
    gradient = torch.empty_like(source, memory_format=memory_format_of(source))
    return gradient, weight.new_empty(weight.shape), weight.new_empty(weight.shape)


FUNCTIONS = {
    "cpu": {"group_norm": _cpu_group_norm},
    "cuda": {"rms_norm": _rms_norm, "batch_norm": _cuda_batch_norm},
}
KERNELS = {
    "cpu": {
        "aten.native_layer_norm.default": _layer_norm_results,
        "aten.native_layer_norm_backward.default": _contiguous_gradient,
        "aten.native_group_norm.default": _group_norm_results,
        "aten.native_group_norm_backward.default": _group_norm_gradients,
        "aten.native_batch_norm.default": _batch_norm_results,
        "aten.native_batch_norm_backward.default": _batch_norm_gradients,
    },
    "cuda": {
        "aten._fused_rms_norm.default": _fused_rms_norm,
        "aten._fused_rms_norm_backward.default": _fused_rms_norm_gradients,
        "aten.native_layer_norm_backward.default": _contiguous_gradient,
        "aten.cudnn_batch_norm.default": _cudnn_batch_norm,
        "aten.cudnn_batch_norm_backward.default": _cudnn_batch_norm_gradients,
    },
}
WORKSPACES = {
    "cpu": {
        "aten.native_layer_norm.default": _contiguous_input,
        "aten.native_layer_norm_backward.default": _cpu_layer_norm_backward,
        "aten.native_group_norm.default": _cpu_group_norm_workspace,
        "aten.native_group_norm_backward.default": _cpu_group_norm_backward,
        "aten.native_batch_norm.default": _cpu_batch_norm_workspace,
        "aten.native_batch_norm_backward.default": _batch_norm_backward,
    },
    "cuda": {
        "aten._fused_rms_norm.default": _contiguous_input,
        "aten._fused_rms_norm_backward.default": _rms_norm_backward,
        "aten.native_layer_norm.default": _contiguous_input,
        "aten.native_layer_norm_backward.default": _cuda_layer_norm_backward,
        "aten.native_group_norm.default": _cuda_group_norm_workspace,
        "aten.native_group_norm_backward.default": _cuda_group_norm_backward,
    },
}
