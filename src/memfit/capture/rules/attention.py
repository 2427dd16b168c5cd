"""Scaled dot-product attention: which backend runs on CPU and CUDA, and what the math backend is made of.

Covers `F.scaled_dot_product_attention` and `aten._safe_softmax`. Defined in torch by
ATen/native/transformers/attention.cpp (the calls), sdp_utils_cpp.cpp and cuda/sdp_utils.cpp (the choice). CUDA's
conditions are those of torch 2.13, with the cuDNN of the torch that captures, or of its default wheels. What the fused
kernels allocate is in `flash_attention.py` and `efficient_attention.py`; `flex_attention.py` has `flex_attention`.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.capture.rules.base import LOW_PRECISION, RuleContext
from memfit.torch_private.dispatch import disable_current_modes
from memfit.torch_private.kernels import attention_priority, cudnn_version, fused_sdp_choice

_aten = torch.ops.aten


_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3
_DEFAULT_ORDER = [_FLASH, _EFFICIENT, _MATH, _CUDNN]
_CUDNN_ORDER = [_CUDNN, _FLASH, _EFFICIENT, _MATH]
_AMD_NOTE = "attention on AMD: the buffers inside the kernels are taken to be those of NVIDIA's"


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the softmax scale (ATen/native/transformers/sdp_utils_cpp.h, `calculate_scale`)."""
    return 1.0 / math.sqrt(query.size(-1)) if scale is None else scale


def float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as additive one (attention.cpp, `convert_boolean_attn_mask`)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    minus_infinity = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device), minus_infinity)


# -- the math backend and CPU --------------------------------------------------------------------------------


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
    """Compute attention as the composed backend does (attention.cpp, `_scaled_dot_product_attention_math`).

    Called as one function under a dispatch mode, C++ would take the branches that it keeps for tensor subclasses.
    """
    dtype = query.dtype
    if dtype in LOW_PRECISION and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
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


# -- which backend runs on CUDA ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments that decide (sdp_utils_cpp.h, `sdp_params`)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool

    @property
    def needs_grad(self) -> bool:
        """Whether autograd will run a backward (sdp_utils_cpp.h, `input_requires_grad`)."""
        wanted = self.query.requires_grad or self.key.requires_grad or self.value.requires_grad
        return wanted and torch.is_grad_enabled()


def priority_order(capability: tuple[int, int], cudnn: int) -> list[int]:
    """Return the backends in the order in which they are tried.

    An order that the user has set with `sdpa_kernel(..., set_priority=True)` stays as it is.
    """
    order = [backend for backend in attention_priority() if backend <= _CUDNN]
    return _CUDNN_ORDER if order == _DEFAULT_ORDER and prefers_cudnn(capability, cudnn) else order


def prefers_cudnn(capability: tuple[int, int], cudnn: int) -> bool:
    """Return whether cuDNN goes first: from 9.15.1, which wheels for CUDA 12 do not have, on sm90, sm100 and sm103.

    cuda/sdp_utils.cpp, `check_prefer_cudnn_attention`.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return cudnn > 91500 and capability[0] in (9, 10) and capability[1] in (0, 3)


def _fits_every_kernel(call: AttentionCall) -> bool:
    """Return whether the conditions of all fused kernels hold.

    sdp_utils_cpp.h, `check_tensor_shapes`, `check_nonzero_sequence_lengths_dense`.
    """
    query, key, value = call.query, call.key, call.value
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.size(-2) > 0
        and key.size(-2) > 0
        and query.dtype == key.dtype == value.dtype
    )


def _heads_fit(call: AttentionCall, *, grouped: bool, same_kv_heads: bool) -> bool:
    """Return whether batch and heads agree, or divide (sdp_utils_cpp.h, `check_batch_size_and_num_heads_dense`)."""
    query, key, value = call.query, call.key, call.value
    if not query.size(0) == key.size(0) == value.size(0):
        return False
    heads, key_heads, value_heads = query.size(1), key.size(1), value.size(1)
    if call.enable_gqa and grouped:
        if same_kv_heads and key_heads != value_heads:
            return False
        return heads % key_heads == 0 and heads % value_heads == 0
    return heads == key_heads == value_heads


def _unit_stride(call: AttentionCall, *, ignore_single: bool) -> bool:
    """Return whether the last dimension is contiguous (sdp_utils_cpp.h, `check_last_dim_stride_equals_1_dense`)."""
    strided = all(tensor.stride(-1) == 1 for tensor in (call.query, call.key, call.value))
    if ignore_single and call.query.size(-1) == 1:
        strided = True
    return strided and (call.mask is None or call.mask.stride(-1) == 1)


def _low_precision(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """Return whether the dtype is float16, or bfloat16 from sm80 (cuda/sdp_utils.cpp, `check_dtypes_low_precision`)."""
    return call.query.dtype in (LOW_PRECISION if capability[0] >= 8 else (torch.float16,))


def can_use_flash(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """cuda/sdp_utils.cpp, `can_use_flash_attention`."""
    width = call.query.size(-1)
    sm86 = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    wide = 192 < width <= 224 or (width > 224 and call.dropout_p > 0)
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and _fits_every_kernel(call)
        and call.mask is None
        and call.key.size(-1) == call.value.size(-1) == width <= 256
        and (8, 0) <= capability <= (12, 1)
        and not (call.needs_grad and sm86 and wide)
        and not (call.is_causal and call.query.size(-2) != call.key.size(-2))
        and _low_precision(call, capability)
        and _heads_fit(call, grouped=True, same_kv_heads=True)
        and _unit_stride(call, ignore_single=True)
    )


def gemm_alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Return how many elements the efficient kernels load at once (cuda/sdp_utils.cpp, `minimum_gemm_alignment`)."""
    half = dtype in LOW_PRECISION
    tensor_cores = capability[0] >= 8 or (capability[0] >= 7 and half)
    alignment = 4 if capability[0] >= 8 else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def can_use_efficient(call: AttentionCall, capability: tuple[int, int]) -> bool:
    """cuda/sdp_utils.cpp, `can_use_mem_efficient_attention`; grouped heads are not supported up to 2.13."""
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or not _fits_every_kernel(call):
        return False
    query, value = call.query, call.value
    alignment = gemm_alignment(query.dtype, capability)
    aligned = query.size(-1) == call.key.size(-1) and all(
        size > 0 and size % alignment == 0 for size in (query.size(-1), value.size(-1))
    )
    dtypes = (*LOW_PRECISION, torch.float32) if capability[0] >= 8 else (torch.float16, torch.float32)
    offsets = all(tensor.storage_offset() % alignment == 0 for tensor in (query, call.key, value))
    return (
        (5, 0) <= capability <= (12, 1)
        and aligned
        and (offsets or capability[0] < 8)
        and _unit_stride(call, ignore_single=False)
        and _heads_fit(call, grouped=False, same_kv_heads=True)
        and query.dtype in dtypes
    )


def _mask_fits_cudnn(call: AttentionCall) -> bool:
    """Return whether a mask has no gradient and two or four dimensions (sdp_utils_cpp.h, `check_attn_mask_shape`)."""
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2))
    return all(size in (1, want) for size, want in zip(mask.shape, wanted[-mask.dim() :], strict=True))


def can_use_cudnn(call: AttentionCall, capability: tuple[int, int], cudnn: int) -> bool:
    """cuda/sdp_utils.cpp, `can_use_cudnn_attention` and `check_cudnn_tensor_shapes`; a `cudnn` of 0 is none."""
    if cudnn < 90000 or (call.dropout_p > 0 and 91100 < cudnn < 91400):
        return False
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if not torch.backends.cuda.cudnn_sdp_enabled() or not _fits_every_kernel(call):
        return False
    width, value_width = call.query.size(-1), call.value.size(-1)
    limit = 256 if capability == (9, 0) and cudnn >= 91000 else 128
    if capability[0] == 10 and (width, value_width) == (192, 128) and cudnn >= 91100:
        limit = 192
    return (
        (8, 0) <= capability <= (12, 1)
        and _low_precision(call, capability)
        and _mask_fits_cudnn(call)
        and (call.dropout_p * 16).is_integer()
        and _unit_stride(call, ignore_single=True)
        and _heads_fit(call, grouped=True, same_kv_heads=False)
        and max(call.query.size(0), call.query.size(1)) <= 65535
        and max(width, value_width) <= limit
        and width % 8 == 0
        and value_width % 8 == 0
        and call.key.size(-2) != 1
        and not (call.dropout_p and call.query.size(-2) == 1)
    )


def choose_backend(call: AttentionCall, capability: tuple[int, int], *, cudnn: int) -> int:
    """Return the first backend of the order that can run it (cuda/sdp_utils.cpp, `select_sdp_backend`)."""
    able = {
        _FLASH: can_use_flash,
        _EFFICIENT: can_use_efficient,
        _CUDNN: functools.partial(can_use_cudnn, cudnn=cudnn),
        _MATH: lambda *_: torch.backends.cuda.math_sdp_enabled(),
    }
    for backend in priority_order(capability, cudnn):
        if able[backend](call, capability):
            return backend
    raise RuntimeError(
        "no attention backend that is enabled can run these arguments; see torch.nn.attention.sdpa_kernel"
    )


# -- the calls on CUDA ---------------------------------------------------------------------------------------


def _fused_dropout(weights: Tensor, p: float, _: bool) -> Tensor:
    """Dropout.cpp, `dropout` on CUDA."""
    return _aten.native_dropout(weights, p, True)[0] if 0 < p < 1 else torch.dropout(weights, p, True)


def _padded(tensor: Tensor) -> Tensor:
    """Return the head size as a multiple of 8 (attention.cpp, `pad_last_dim`)."""
    missing = -tensor.size(-1) % 8
    return F.pad(tensor, (0, missing)) if missing else tensor


def _efficient_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask with strides of multiples of 8, expanded (attention.cpp, `preprocess_mask`, `pad_bias`)."""
    aligned = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
    if not aligned:
        width = mask.size(-1)
        mask = F.pad(mask, (0, 8 - width % 8))[..., :width]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def _cuda_attention(
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
    """The calls of attention.cpp, `scaled_dot_product_attention`."""
    call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    on_amd = context.vendor == "AMD"
    if on_amd:
        context.note(_AMD_NOTE)
    backend = choose_backend(call, context.compute_capability or (9, 0), cudnn=0 if on_amd else cudnn_version())
    mask = float_mask(attn_mask, query.dtype)
    if backend == _CUDNN:
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.needs_grad, dropout_p, is_causal, False, scale=scale
        )[0]
    if backend == _FLASH:
        width = query.size(-1)
        output = _aten._scaled_dot_product_flash_attention(
            _padded(query),
            _padded(key),
            _padded(value),
            dropout_p,
            is_causal,
            False,
            scale=scale_of(query, scale),
        )[0]
        return output[..., :width] if output.size(-1) != width else output
    if backend == _EFFICIENT:
        bias = None if mask is None else _efficient_bias(mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, call.needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    return math_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, dropout=_fused_dropout)


FUNCTIONS = {
    "cpu": {"scaled_dot_product_attention": _cpu_attention},
    "cuda": {"scaled_dot_product_attention": _cuda_attention},
}
WORKSPACES = {device: {"aten._safe_softmax.default": _safe_softmax_workspace} for device in ("cpu", "cuda")}
