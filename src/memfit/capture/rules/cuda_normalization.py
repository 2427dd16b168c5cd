"""Normalization layers on CUDA: the fused RMS norm, cuDNN's batch norm, and the buffers of the backward
kernels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.capture.rules.layout import contiguous_copy
from memfit.torch_private.dispatch import below_autograd

_aten = torch.ops.aten
_CUDNN_MIN_EPSILON = 0.0
_CUDNN_BATCH_LIMIT = {True: 880801, False: 65535}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """Channels-last for what is, else contiguous (c10/core/TensorImpl.h, `suggest_memory_format`)."""
    layout = _CHANNELS_LAST.get(tensor.dim())
    if layout is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=layout):
        return torch.contiguous_format
    return layout


def _accumulator_bytes(tensor: Tensor) -> int:
    """Element size of `at::toAccumulateType` on CUDA: float32 for the 16-bit dtypes."""
    return max(4, tensor.element_size())


# -- RMS norm ------------------------------------------------------------------------------------------------


def _rms_norm(
    context: RuleContext,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """One fused kernel, unless dtypes differ or the layout is channels-last (layer_norm.cpp,
    `rms_norm_symint`).
    """
    mixed = weight is not None and weight.dtype != input.dtype
    if mixed or input.is_complex() or memory_format_of(input) is not torch.contiguous_format:
        return NotImplemented
    return _FusedRmsNorm.apply(input, tuple(normalized_shape), weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's own autograd formula: torch has one for `_fused_rms_norm` on CUDA only
    (tools/autograd/derivatives.yaml).
    """

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
    """Contiguous gradients of the input and the weight (cuda/layer_norm_kernel.cu,
    `_fused_rms_norm_backward_cuda`).
    """
    _, source, shape, _, weight, mask = args
    wanted = mask[1] and weight is not None
    return (source.new_empty(source.shape) if mask[0] else None, weight.new_empty(shape) if wanted else None)


# -- layer norm ----------------------------------------------------------------------------------------------


def _contiguous_input(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The input is made contiguous first (cuda/layer_norm_kernel.cu, `layer_norm_cuda`)."""
    return contiguous_copy(args[0])


def gamma_beta_bytes(rows: int, width: int, multiprocessors: int, element_size: int, gradients: int) -> int:
    """Partial sums of many short rows (layer_norm_kernel.cu, `LaunchGammaBetaBackwardCUDAKernel`)."""
    if not gradients or rows <= 64 * 1024 or width // 32 >= multiprocessors // 2:
        return 0
    columns = -(-width // 32)
    blocks = min(64 * 1024 // 2 // columns, -(-rows // 32))
    return (gradients * blocks + 1) * width * element_size


def _layer_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Copies of strided operands, and partial sums of the parameters' gradients."""
    grad, source, shape = args[:3]
    mask = args[-1]
    width = math.prod(shape)
    rows = source.numel() // max(1, width)
    partial = gamma_beta_bytes(rows, width, context.multiprocessors, source.element_size(), sum(map(bool, mask[1:3])))
    return contiguous_copy(grad) + contiguous_copy(source) + partial


def _layer_norm_gradients(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The input's gradient is contiguous (cuda/layer_norm_kernel.cu, `layer_norm_backward_cuda`)."""
    gradient, *others = func(*args, **kwargs)
    if gradient is not None:
        gradient = gradient.new_empty(gradient.shape)
    return (gradient, *others)


def _rms_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """As layer norm, with one parameter (layer_norm_kernel.cu, `RMSNormBackwardKernelImpl`)."""
    grad, source, shape, _, _, mask = args
    width = math.prod(shape)
    rows = source.numel() // max(1, width)
    partial = gamma_beta_bytes(rows, width, context.multiprocessors, source.element_size(), int(mask[1]))
    return contiguous_copy(grad) + contiguous_copy(source) + partial


# -- group norm ----------------------------------------------------------------------------------------------


def _group_norm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
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


def _group_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
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


def uses_cudnn(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    """Whether cuDNN normalizes (ATen/native/Normalization.cpp, `_select_batch_norm_backend`)."""
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


def _batch_norm(
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
    """Statistics only in training; the reserve is 0 for plain batch norm (cudnn/BatchNorm.cpp,
    `cudnn_batch_norm`).
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


FUNCTIONS = {"cuda": {"rms_norm": _rms_norm, "batch_norm": _batch_norm}}
KERNELS = {
    "cuda": {
        "aten._fused_rms_norm.default": _fused_rms_norm,
        "aten._fused_rms_norm_backward.default": _fused_rms_norm_gradients,
        "aten.native_layer_norm_backward.default": _layer_norm_gradients,
        "aten.cudnn_batch_norm.default": _cudnn_batch_norm,
        "aten.cudnn_batch_norm_backward.default": _cudnn_batch_norm_gradients,
    }
}
WORKSPACES = {
    "cuda": {
        "aten._fused_rms_norm.default": _contiguous_input,
        "aten._fused_rms_norm_backward.default": _rms_norm_backward,
        "aten.native_layer_norm.default": _contiguous_input,
        "aten.native_layer_norm_backward.default": _layer_norm_backward,
        "aten.native_group_norm.default": _group_norm,
        "aten.native_group_norm_backward.default": _group_norm_backward,
    }
}
