"""Scaled dot-product attention: which backend runs, and what the math backend is made of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memfit.capture.probe import filled, probe_workspace, real_execution, remembered
from memfit.capture.rules import RuleContext
from memfit.capture.rules.layout import contiguous_copy
from memfit.torch_private.dispatch import disable_current_modes
from memfit.torch_private.kernels import fused_sdp_choice

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

    with disable_current_modes():
        choice = fused_sdp_choice(
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
    query, key, value = args[:3]
    if not _rule_holds(context, func, query.dtype):
        return _measured_flash(context, func, query, key, value)
    return _flash_buffers(context, func, query, key)


def _cpu_flash_backward_workspace(
    context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any
) -> int:
    """Scores and their gradients per thread, one row of sums (`cpu_flash_attention_backward`)."""
    gradient, query, key, value = args[:4]
    copy = contiguous_copy(gradient.transpose(1, 2))
    if not _rule_holds(context, func, query.dtype):
        return copy + _measured_flash(context, func, query, key, value)
    return copy + _flash_buffers(context, func, query, key)


_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _flash_buffers(context: RuleContext, func: Any, query: Tensor, key: Tensor) -> int:
    """The kernel's own buffers; products inside it may take more: Note [Scratch of flash attention]."""
    low_bytes = query.element_size() if query.dtype in _LOW else 0
    accumulated_bytes = 4 if low_bytes else query.element_size()
    rows, columns = _split(query.size(-2))
    rows, columns = min(rows, query.size(-2)), min(columns, key.size(-2))
    if func is _FLASH:
        per_thread = rows * columns + 2 * rows + rows * query.size(-1)
        return context.threads * (accumulated_bytes * per_thread + low_bytes * rows * columns)
    return context.threads * 2 * rows * columns * (accumulated_bytes + low_bytes) + rows * accumulated_bytes


# Note [Scratch of flash attention]: the kernel multiplies blocks of the score matrix with `cpublas::gemm`, which gives
# 16-bit products to oneDNN or packs operands where the instruction set has it. What that allocates is measured. It
# depends on the sizes of a block, the head and the threads; batch, heads and lengths only give their number.
# So a small call with the same blocks is enough. Memory that worker threads allocate for themselves is not in torch's
# profile, here or in a real step.


def _rule_holds(context: RuleContext, func: Any, dtype: torch.dtype) -> bool:
    """Whether small calls of this dtype allocate the kernel's own buffers only, on this machine."""

    def held(queries: int, keys: int, head: int) -> bool:
        query, key = (
            torch.empty((1, context.threads, length, head), dtype=dtype, device="meta") for length in (queries, keys)
        )
        return _measured_flash(context, func, query, key, key) == _flash_buffers(context, func, query, key)

    return held(64, 64, 32) and held(33, 77, 24) and held(200, 96, 16)


def _measured_flash(context: RuleContext, func: Any, query: Tensor, key: Tensor, value: Tensor) -> int:
    """Measure a call with the same blocks as one on these tensors."""
    heads = min(query.size(0) * query.size(1), context.threads)
    queries, keys = query.size(-2), key.size(-2)
    queries = queries if queries < 1024 else 768 + queries % 256
    keys = keys if keys < 1024 else 512 + keys % 512

    def smaller(tensor: Tensor, length: int) -> Tensor:
        return filled((1, heads, length, tensor.size(-1)), tensor.stride(), tensor.dtype)

    def probe() -> int:
        with real_execution():
            operands = [smaller(query, queries), smaller(key, keys), smaller(value, keys)]
            if func is _FLASH:
                return probe_workspace(func, tuple(operands), {})
            output, statistics = _FLASH(*operands)
            gradient = torch.ones((1, queries, heads, query.size(-1)), dtype=query.dtype).transpose(1, 2)
            return probe_workspace(func, (gradient, *operands, output, statistics, 0.0, False), {})

    strides = (query.stride()[1:], key.stride()[1:], value.stride()[1:])
    return remembered((func, query.dtype, heads, queries, keys, query.size(-1), value.size(-1), strides), probe)


FUNCTIONS = {"cpu": {"scaled_dot_product_attention": _cpu_attention}}
WORKSPACES = {
    "cpu": {
        "aten._safe_softmax.default": _safe_softmax_workspace,
        "aten._scaled_dot_product_flash_attention_for_cpu.default": _cpu_flash_workspace,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _cpu_flash_backward_workspace,
    },
    "cuda": {"aten._safe_softmax.default": _safe_softmax_workspace},
}
