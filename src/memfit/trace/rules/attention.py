"""Scaled dot-product attention: which backend runs, and what the math backend is made of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memfit.trace.rules import RuleContext
from memfit.trace.rules.layout import contiguous_copy

_aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)


def scale_of(query: Tensor, scale: float | None) -> float:
    """The softmax scale (ATen/native/transformers/sdp_utils_cpp.h, `calculate_scale`)."""
    return 1.0 / math.sqrt(query.size(-1)) if scale is None else scale


def float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as additive one (attention.cpp, `convert_boolean_attn_mask`)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    minus_infinity = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device), minus_infinity)


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout: Any = torch.dropout,
) -> Tensor:
    """The composed backend (attention.cpp, `_scaled_dot_product_attention_math`).

    Called as one function under a dispatch mode, C++ would take the branches that it keeps for tensor subclasses.
    """
    dtype = query.dtype
    if dtype in _LOW and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(abs(scale_of(query, scale)))
    query = _aten.mul.Scalar(query, -factor if scale is not None and scale < 0 else factor)
    if is_causal:
        causal = torch.ones((query.size(-2), key.size(-2)), dtype=torch.bool, device=query.device)
        mask = float_mask(causal.tril(), query.dtype)
        del causal
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    weights = torch.matmul(query, _aten.mul.Scalar(key.transpose(-2, -1), factor))
    if mask is not None:
        weights.add_(mask)
    weights = _aten._safe_softmax(weights, -1)
    if dropout_p > 0.0:
        weights = dropout(weights, dropout_p, True)
    returned = weights.to(dtype)
    result = torch.matmul(weights, value).to(dtype)
    del returned
    return result


def _cpu_attention(
    context: RuleContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """CPU asks `_fused_sdp_choice`: 0 is math, 1 flash (ATen/native/transformers/sdp_utils_cpp.cpp)."""

    def stand_in(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return empty.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else empty

    with torch.utils._python_dispatch._disable_current_modes():
        choice = torch._fused_sdp_choice(
            stand_in(query),
            stand_in(key),
            stand_in(value),
            stand_in(attn_mask),
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    mask = float_mask(attn_mask, query.dtype)
    if choice == 1:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
    return math_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def _safe_softmax_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """The row test `isneginf`, `all` and a zero (ATen/native/SoftMax.cpp, `_safe_softmax`)."""
    return result.numel() + result.numel() // max(1, result.size(-1)) + result.element_size()


def _split(length: int) -> tuple[int, int]:
    """Rows and columns of a block of the score matrix (ATen/native/cpu/FlashAttentionKernel.cpp)."""
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return rows, 512


def _cpu_flash_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Scores, row maxima and sums and a block of the result, per thread (`cpu_flash_attention`)."""
    query, key = args[:2]
    rows, columns = _split(query.size(-2))
    rows, columns = min(rows, query.size(-2)), min(columns, key.size(-2))
    per_thread = rows * columns + 2 * rows + rows * query.size(-1)
    held = 4 * per_thread
    if query.dtype in _LOW:
        held += query.element_size() * rows * columns
    return context.threads * held


def _cpu_flash_backward_workspace(
    context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any
) -> int:
    """Scores and their gradients per thread, one row of sums (`cpu_flash_attention_backward`)."""
    gradient, query, key = args[:3]
    rows, columns = _split(query.size(-2))
    rows, columns = min(rows, query.size(-2)), min(columns, key.size(-2))
    held = context.threads * 2 * rows * columns * 4 + rows * 4
    if query.dtype in _LOW:
        held += context.threads * 2 * rows * columns * query.element_size()
    return held + contiguous_copy(gradient.transpose(1, 2))


FUNCTIONS = {"cpu": {"scaled_dot_product_attention": _cpu_attention}}
WORKSPACES = {
    "cpu": {
        "aten._safe_softmax.default": _safe_softmax_workspace,
        "aten._scaled_dot_product_flash_attention_for_cpu.default": _cpu_flash_workspace,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _cpu_flash_backward_workspace,
    },
    "cuda": {"aten._safe_softmax.default": _safe_softmax_workspace},
}
