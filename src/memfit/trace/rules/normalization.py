"""Normalization layers and their internal buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memfit.trace.rules import RuleContext


def _layer_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Partial weight and bias gradients per thread (ATen/native/cpu/layer_norm_kernel.cpp, `LayerNormBackward`)."""
    grad, _, shape = args[:3]
    mask = args[-1]
    if not (mask[1] or mask[2]):
        return 0
    width = 1
    for size in shape:
        width *= size
    return context.threads * 2 * width * grad.element_size()


def _batch_norm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Mean and variance sums (ATen/native/Normalization.cpp, `batch_norm_cpu_update_stats_template`)."""
    return 2 * result[1].numel() * result[1].element_size()


def _batch_norm_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The gradient is built in a second buffer (Normalization.cpp, `batch_norm_backward_cpu_template`)."""
    source: Tensor = args[1]
    return source.numel() * source.element_size()


WORKSPACES = {
    "cpu": {
        "aten.native_layer_norm_backward.default": _layer_norm_backward,
        "aten.native_batch_norm.default": _batch_norm,
        "aten.native_batch_norm_backward.default": _batch_norm_backward,
    }
}
