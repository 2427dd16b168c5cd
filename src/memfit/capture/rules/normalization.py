"""Normalization layers and their internal buffers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.capture.rules.layout import bytes_of, contiguous_copy, suggested_format
from memfit.capture.rules.vendor import probed
from memfit.torch_private.dispatch import below_autograd

_aten = torch.ops.aten
_LARGE_MAP, _LARGE_MAP_BACKWARD = 1024, 2048
"""Positions from which on channels-last group norm sums by thread (cpu/group_norm_kernel.cpp)."""


def _layer_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Partial weight and bias gradients per thread (ATen/native/cpu/layer_norm_kernel.cpp, `LayerNormBackward`)."""
    grad, source, shape = args[:3]
    mask = args[-1]
    held = contiguous_copy(grad) + contiguous_copy(source)
    if mask[1] or mask[2]:
        held += context.threads * 2 * math.prod(shape) * source.element_size()
    return held


def _layer_norm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The input is made contiguous first (ATen/native/layer_norm.cpp, `layer_norm_cpu`)."""
    return contiguous_copy(args[0])


def _group_norm(
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


def _group_norm_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Sums of channels-last maps: per sample and channel, and large ones also per thread (`GroupNormKernelImpl`)."""
    source, samples, channels, positions, groups = args[0], *args[3:7]
    if suggested_format(source) is torch.contiguous_format:
        return 0
    sums = context.threads * channels + groups if positions >= _LARGE_MAP else channels
    return 2 * samples * sums * max(4, source.element_size())


def _group_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Two sums per sample and channel (cpu/group_norm_kernel.cpp, `GroupNormBackwardKernelImplInternal`).

    Large channels-last maps have them also per thread, and per group.
    """
    source, samples, channels, positions, groups = args[1], *args[5:9]
    sums = channels
    if positions >= _LARGE_MAP_BACKWARD and suggested_format(source) is not torch.contiguous_format:
        sums += context.threads * channels + groups
    return 2 * samples * sums * max(4, source.element_size())


def _batch_norm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
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


def _layer_norm_results(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Statistics in the input's dtype, or in that of parameters that differ from it (`layer_norm_cpu`)."""
    result, *statistics = func(*args, **kwargs)
    source, _, weight, bias = args[:4]
    dtype = next((t.dtype for t in (weight, bias) if t is not None and t.dtype != source.dtype), source.dtype)
    return result, *(torch.empty_like(tensor, dtype=dtype) for tensor in statistics)


def _layer_norm_gradients(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """On CPU the input's gradient is contiguous, whatever the gradient that comes in (`layer_norm_backward_cpu`)."""
    gradient, *others = func(*args, **kwargs)
    if gradient is not None:
        gradient = gradient.new_empty(gradient.shape)
    return (gradient, *others)


FUNCTIONS = {"cpu": {"group_norm": _group_norm}}
KERNELS = {
    "cpu": {
        "aten.native_group_norm.default": _group_norm_results,
        "aten.native_group_norm_backward.default": _group_norm_gradients,
        "aten.native_layer_norm.default": _layer_norm_results,
        "aten.native_layer_norm_backward.default": _layer_norm_gradients,
        "aten.native_batch_norm.default": _batch_norm_results,
        "aten.native_batch_norm_backward.default": _batch_norm_gradients,
    }
}
WORKSPACES = {
    "cpu": {
        "aten.native_layer_norm.default": _layer_norm,
        "aten.native_layer_norm_backward.default": _layer_norm_backward,
        "aten.native_group_norm.default": _group_norm_workspace,
        "aten.native_group_norm_backward.default": _group_norm_backward,
        "aten.native_batch_norm.default": _batch_norm,
        "aten.native_batch_norm_backward.default": _batch_norm_backward,
    }
}
