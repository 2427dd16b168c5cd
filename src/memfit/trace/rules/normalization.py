"""Normalization layers and their internal buffers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from memfit.trace.rules import RuleContext
from memfit.trace.rules.layout import contiguous_copy


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


def _group_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Two sums per sample and channel (cpu/group_norm_kernel.cpp, `GroupNormBackwardKernelImplInternal`)."""
    samples, channels = args[5], args[6]
    return 2 * samples * channels * max(4, args[0].element_size())


def _batch_norm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Mean and variance sums (ATen/native/Normalization.cpp, `batch_norm_cpu_update_stats_template`).

    Channels-last inputs have one more buffer for each thread, in which it sums its rows.
    """
    buffers = 2 if args[0].is_contiguous() else 2 + context.threads
    return buffers * result[1].numel() * max(4, result[1].element_size())


def _batch_norm_results(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The saved statistics have the dtype of the weight (Normalization.cpp, `batch_norm_cpu`)."""
    result, mean, deviation = func(*args, **kwargs)
    dtype = next((tensor.dtype for tensor in args[1:4] if tensor is not None), result.dtype)
    return result, mean.to(dtype), deviation.to(dtype)


def _batch_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The gradient is built in a second buffer (Normalization.cpp, `batch_norm_backward_cpu_template`)."""
    source: Tensor = args[1]
    return source.numel() * source.element_size()


def _layer_norm_gradients(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """On CPU the input's gradient is contiguous, whatever the gradient that comes in (`layer_norm_backward_cpu`)."""
    gradient, *others = func(*args, **kwargs)
    if gradient is not None:
        gradient = gradient.new_empty(gradient.shape)
    return (gradient, *others)


KERNELS = {
    "cpu": {
        "aten.native_layer_norm_backward.default": _layer_norm_gradients,
        "aten.native_batch_norm.default": _batch_norm_results,
    }
}
WORKSPACES = {
    "cpu": {
        "aten.native_layer_norm.default": _layer_norm,
        "aten.native_layer_norm_backward.default": _layer_norm_backward,
        "aten.native_group_norm_backward.default": _group_norm_backward,
        "aten.native_batch_norm.default": _batch_norm,
        "aten.native_batch_norm_backward.default": _batch_norm_backward,
    }
}
