"""Scaled dot-product attention on CUDA: which backend runs, what it allocates, what its backward needs.

Facts are those of torch 2.13 built with cuDNN 9.15.1 or newer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.capture.rules.attention import float_mask, math_attention, scale_of
from memfit.capture.rules.layout import bytes_of
from memfit.torch_private.kernels import attention_priority

_aten = torch.ops.aten
_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3
_DEFAULT_ORDER = [_FLASH, _EFFICIENT, _MATH, _CUDNN]
_CUDNN_ORDER = [_CUDNN, _FLASH, _EFFICIENT, _MATH]
_LOW = (torch.float16, torch.bfloat16)
_FLOAT_BYTES = 4
_CUDNN_NOTE = "attention with grouped heads by cuDNN: what its engine holds beyond dQ in float32 is not counted"
_AMD_NOTE = "attention on AMD: the buffers inside the kernels are taken to be those of NVIDIA's"


@dataclass(frozen=True, slots=True)
class _Call:
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


# -- which backend -------------------------------------------------------------------------------------------


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def priority_order(capability: tuple[int, int]) -> list[int]:
    """cuDNN goes first on Hopper and datacentre Blackwell (cuda/sdp_utils.cpp,
    `check_prefer_cudnn_attention`).

    An order that the user has set with `sdpa_kernel(..., set_priority=True)` stays as it is.
    """
    order = [backend for backend in attention_priority() if backend <= _CUDNN]
    if order == _DEFAULT_ORDER and capability[0] in (9, 10):
        return _CUDNN_ORDER
    return order


def _fits_every_kernel(call: _Call) -> bool:
    """What all fused kernels ask for (sdp_utils_cpp.h, `check_tensor_shapes`,
    `check_nonzero_sequence_lengths_dense`).
    """
    query, key, value = call.query, call.key, call.value
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.size(-2) > 0
        and key.size(-2) > 0
        and query.dtype == key.dtype == value.dtype
    )


def _heads_fit(call: _Call, *, grouped: bool, same_kv_heads: bool) -> bool:
    """Batch and heads must agree, or divide (sdp_utils_cpp.h, `check_batch_size_and_num_heads_dense`)."""
    query, key, value = call.query, call.key, call.value
    if not query.size(0) == key.size(0) == value.size(0):
        return False
    heads, key_heads, value_heads = query.size(1), key.size(1), value.size(1)
    if call.enable_gqa and grouped:
        if same_kv_heads and key_heads != value_heads:
            return False
        return heads % key_heads == 0 and heads % value_heads == 0
    return heads == key_heads == value_heads


def _unit_stride(call: _Call, *, ignore_single: bool) -> bool:
    """The last dimension is contiguous (sdp_utils_cpp.h, `check_last_dim_stride_equals_1_dense`)."""
    strided = all(tensor.stride(-1) == 1 for tensor in (call.query, call.key, call.value))
    if ignore_single and call.query.size(-1) == 1:
        strided = True
    return strided and (call.mask is None or call.mask.stride(-1) == 1)


def _low_precision(call: _Call, capability: tuple[int, int]) -> bool:
    """float16 everywhere, bfloat16 from sm80 (cuda/sdp_utils.cpp, `check_dtypes_low_precision`)."""
    return call.query.dtype in (_LOW if capability[0] >= 8 else (torch.float16,))


def can_use_flash(call: _Call, capability: tuple[int, int]) -> bool:
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
    """Elements that the efficient kernels load at once (cuda/sdp_utils.cpp, `minimum_gemm_alignment`)."""
    half = dtype in _LOW
    tensor_cores = capability[0] >= 8 or (capability[0] >= 7 and half)
    alignment = 4 if capability[0] >= 8 else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def can_use_efficient(call: _Call, capability: tuple[int, int]) -> bool:
    """cuda/sdp_utils.cpp, `can_use_mem_efficient_attention`; grouped heads are not supported up to 2.13."""
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or not _fits_every_kernel(call):
        return False
    query, value = call.query, call.value
    alignment = gemm_alignment(query.dtype, capability)
    aligned = query.size(-1) == call.key.size(-1) and all(
        size > 0 and size % alignment == 0 for size in (query.size(-1), value.size(-1))
    )
    dtypes = (*_LOW, torch.float32) if capability[0] >= 8 else (torch.float16, torch.float32)
    offsets = all(tensor.storage_offset() % alignment == 0 for tensor in (query, call.key, value))
    return (
        (5, 0) <= capability <= (12, 1)
        and aligned
        and (offsets or capability[0] < 8)
        and _unit_stride(call, ignore_single=False)
        and _heads_fit(call, grouped=False, same_kv_heads=True)
        and query.dtype in dtypes
    )


def _mask_fits_cudnn(call: _Call) -> bool:
    """A mask without gradient, of two or four dimensions (sdp_utils_cpp.h, `check_attn_mask_shape`)."""
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2))
    return all(size in (1, want) for size, want in zip(mask.shape, wanted[-mask.dim() :], strict=True))


def can_use_cudnn(call: _Call, capability: tuple[int, int]) -> bool:
    """cuda/sdp_utils.cpp, `can_use_cudnn_attention` and `check_cudnn_tensor_shapes`."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if not torch.backends.cuda.cudnn_sdp_enabled() or not _fits_every_kernel(call):
        return False
    width, value_width = call.query.size(-1), call.value.size(-1)
    limit = 256 if capability == (9, 0) else 128
    if capability[0] == 10 and (width, value_width) == (192, 128):
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


def choose_backend(call: _Call, capability: tuple[int, int], *, has_cudnn: bool = True) -> int:
    """The first backend of the order that can run it (cuda/sdp_utils.cpp, `select_sdp_backend`)."""
    able = {_FLASH: can_use_flash, _EFFICIENT: can_use_efficient, _CUDNN: can_use_cudnn}
    for backend in priority_order(capability):
        if backend == _MATH:
            if torch.backends.cuda.math_sdp_enabled():
                return _MATH
        elif (has_cudnn or backend != _CUDNN) and able[backend](call, capability):
            return backend
    raise RuntimeError(
        "no attention backend that is enabled can run these arguments; see torch.nn.attention.sdpa_kernel"
    )


# -- the calls -----------------------------------------------------------------------------------------------


def _fused_dropout(weights: Tensor, p: float, _: bool) -> Tensor:
    """Dropout.cpp, `dropout` on CUDA."""
    return _aten.native_dropout(weights, p, True)[0] if 0 < p < 1 else torch.dropout(weights, p, True)


def _padded(tensor: Tensor) -> Tensor:
    """The head size as a multiple of 8 (attention.cpp, `pad_last_dim`)."""
    missing = -tensor.size(-1) % 8
    return F.pad(tensor, (0, missing)) if missing else tensor


def _efficient_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask with strides of multiples of 8, expanded (attention.cpp, `preprocess_mask`, `pad_bias`)."""
    aligned = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
    if not aligned:
        width = mask.size(-1)
        mask = F.pad(mask, (0, 8 - width % 8))[..., :width]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def _attention(
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
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    on_amd = context.vendor == "AMD"
    if on_amd:
        context.note(_AMD_NOTE)
    backend = choose_backend(call, context.compute_capability or (9, 0), has_cudnn=not on_amd)
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


# -- results -------------------------------------------------------------------------------------------------


def _efficient_results(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Seed and offset are in host memory (cuda/attention.cu, Note [Seed and Offset Device]): empty here."""
    output, logsumexp, seed, offset = func(*args, **kwargs)
    return output, logsumexp, seed.new_empty(0), offset.new_empty(0)


def _cudnn_results(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The log-sum-exp is made only for a backward (ATen/native/cudnn/MHA.cpp, `run_cudnn_SDP_fprop`)."""
    results = list(func(*args, **kwargs))
    if not args[4]:
        results[1] = results[1].new_empty(0)
    return tuple(results)


# -- workspaces ----------------------------------------------------------------------------------------------


def _copied(tensor: Tensor) -> int:
    """Bytes of the copy that `transpose(1, 2).contiguous()` makes, if any."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else bytes_of(tensor)


def flash_splits(blocks: int, multiprocessors: int, key_blocks: int) -> int:
    """How many ways the keys are split when heads alone do not fill the device (flash_api.cpp,
    `num_splits_heuristic`).
    """
    slots = multiprocessors * 2
    if not slots or blocks >= 0.8 * slots:
        return 1
    limit = min(128, slots, key_blocks)
    eligible = [
        split for split in range(1, limit + 1) if split == 1 or -(-key_blocks // split) != -(-key_blocks // (split - 1))
    ]
    efficiency = {}
    for split in eligible:
        waves = blocks * split / slots
        efficiency[split] = waves / math.ceil(waves)
    best = max(efficiency.values())
    return next(split for split in eligible if efficiency[split] >= 0.85 * best)


def _flash_forward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Partial outputs of split keys (flash_api.cpp, `set_params_splitkv`)."""
    query, key = args[:2]
    dropout_p = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    if dropout_p:
        return 0
    batch, heads, length, width = query.shape
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    splits = flash_splits(batch * heads * -(-length // 64), context.multiprocessors, -(-key.size(2) // block))
    if splits == 1:
        return 0
    return splits * batch * heads * length * (1 + _flash_width(width)) * _FLOAT_BYTES


def _flash_width(width: int) -> int:
    rounded = _rounded(width, 32)
    return rounded if rounded < 224 else 256


def _flash_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """`softmax_d`, `dq_accum`, and keys and values for every query head (flash_api.cpp, `mha_bwd`).

    attention_backward.cu, `_flash_attention_backward` makes the output and its gradient contiguous first.
    """
    grad, query, key, _, output = args[:5]
    batch, heads, length, width = query.shape
    rows = batch * heads * _rounded(length, 128)
    splits = 1
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        splits = -(-max(1, context.multiprocessors) // (batch * heads))
    held = rows * _FLOAT_BYTES + splits * rows * _flash_width(width) * _FLOAT_BYTES
    if key.size(1) != heads:
        held += 2 * batch * key.size(2) * heads * width * query.element_size()
    return held + _copied(grad) + _copied(output)


def _efficient_forward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Heads over 128 wide accumulate in float32 (mem_eff_attention/kernel_forward.h,
    `kNeedsOutputAccumulatorBuffer`).
    """
    query, value = args[0], args[2]
    if query.dtype not in _LOW or max(query.size(-1), value.size(-1)) <= 128:
        return 0
    return result[0].numel() * _FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One of the compiled backward kernels: tile of queries and keys, and the widest head."""

    queries: int
    keys: int
    width: int


_ANY_WIDTH = 65536
_BIG_SHARED_MEMORY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))
"""Devices with 163 KiB of shared memory a block or more; the others have 99 KiB or less."""


def efficient_kernel(dtype: torch.dtype, width: int, dropout: bool, capability: tuple[int, int]) -> _Kernel:
    """The first compiled kernel that takes these arguments (mem_eff_attention/kernels/cutlassB.h,
    `dispatch_cutlassB`).
    """
    half = dtype in _LOW
    big = capability in _BIG_SHARED_MEMORY
    for limit in (32, 64):
        if width <= limit:
            return _Kernel(64, 64, limit)
    if half and capability in ((8, 6), (8, 9)) and width <= 96 and not dropout:
        return _Kernel(128, 64, 96)
    tall = 128 if big or (half and capability == (7, 0)) else 64
    if width <= 128:
        return _Kernel(tall, 128 if half and big else 64, 128)
    return _Kernel(tall, 64, _ANY_WIDTH)


def _efficient_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """`delta` and accumulators of gradients (mem_eff_attention/kernel_backward.h, `workspace_size`)."""
    grad, query, key, value = args[:4]
    dropout_p = args[9]
    batch, heads, queries, width = query.shape
    value_width, keys = value.size(-1), key.size(2)
    capability: tuple[int, ...] = context.compute_capability or (9, 0)
    half = query.dtype in _LOW
    kernel = efficient_kernel(query.dtype, max(width, value_width), dropout_p > 0, (capability[0], capability[1]))
    in_registers = half and kernel.width <= kernel.queries
    accumulates = half and not in_registers
    splits = -(-keys // kernel.keys)
    if batch * heads >= 256 and keys <= 2 * kernel.keys:
        splits = 1
    if accumulates:
        splits = max(1, min(splits, 200 // (batch * heads)))
    elements = 0
    if accumulates:
        elements += splits * kernel.keys * (_rounded(width, kernel.queries) + _rounded(value_width, kernel.queries))
    if half or capability >= (7, 0):
        tiles = -(-queries // kernel.queries) * -(-width // kernel.keys)
        elements += tiles * (4 + kernel.queries * kernel.keys)
    workspace = batch * heads * _rounded(elements, 4) * _FLOAT_BYTES
    delta = batch * heads * queries * _FLOAT_BYTES
    computed = half and (in_registers or capability[0] != 7 or capability[1] >= 5)
    product = 0 if computed else batch * heads * queries * value_width * _FLOAT_BYTES * (3 if half else 1)
    return max(delta + workspace, product + delta if product else 0) + _copied(grad)


def _cudnn_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """`dQ_accum` and the softmax sum (cudnn-frontend,
    `CompositeSDPABackwardNode::get_fe_workspace_size_node`).

    What the cuDNN engine adds for itself is not public.
    """
    grad, query, key = args[:3]
    batch, heads, length, width = query.shape
    if key.size(1) != heads:
        context.note(_CUDNN_NOTE)
    held = batch * heads * length * (width + 1) * _FLOAT_BYTES
    return held + (0 if grad.stride(-1) == 1 else bytes_of(grad))


FUNCTIONS = {"cuda": {"scaled_dot_product_attention": _attention}}
KERNELS = {
    "cuda": {
        "aten._scaled_dot_product_efficient_attention.default": _efficient_results,
        "aten._scaled_dot_product_cudnn_attention.default": _cudnn_results,
    }
}
WORKSPACES = {
    "cuda": {
        "aten._scaled_dot_product_flash_attention.default": _flash_forward,
        "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
        "aten._scaled_dot_product_efficient_attention.default": _efficient_forward,
        "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
        "aten._scaled_dot_product_cudnn_attention_backward.default": _cudnn_backward,
    }
}
