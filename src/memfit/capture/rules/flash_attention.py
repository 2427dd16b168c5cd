"""Flash attention: what its kernels allocate inside themselves, forward and backward, on CPU and CUDA.

Covers `aten._scaled_dot_product_flash_attention_for_cpu`, `aten._scaled_dot_product_flash_attention`, `varlen_attn` of
torch.nn.attention.varlen and their backwards. Defined in torch by ATen/native/cpu/FlashAttentionKernel.cpp on CPU, and
on CUDA by ATen/native/transformers/cuda/flash_attn/flash_api.cpp and cuda/attention_backward.cu. When it is
chosen at all, `attention.py` says.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memfit.capture.kernels import filled, measured_once, probe_workspace, real_execution
from memfit.capture.rules.base import LOW_PRECISION, RuleContext, bytes_of, contiguous_copy

_aten = torch.ops.aten
_FLOAT_BYTES = 4

# -- CUDA ----------------------------------------------------------------------------------------------------


def flash_splits(blocks: int, multiprocessors: int, key_blocks: int) -> int:
    """Return how many ways the keys are split when heads alone do not fill the device.

    flash_api.cpp, `num_splits_heuristic`.
    """
    slots = multiprocessors * 2  # thread blocks of 128 threads: two a multiprocessor
    if not slots or blocks >= 0.8 * slots:  # almost full without any split
        return 1
    limit = min(128, slots, key_blocks)
    # as many splits as leave each with fewer blocks than one split less would; otherwise the last would be empty
    eligible = [
        split for split in range(1, limit + 1) if split == 1 or -(-key_blocks // split) != -(-key_blocks // (split - 1))
    ]
    efficiency = {}
    for split in eligible:
        waves = blocks * split / slots
        efficiency[split] = waves / math.ceil(waves)
    best = max(efficiency.values())
    return next(split for split in eligible if efficiency[split] >= 0.85 * best)  # the fewest that are nearly as good


def _cuda_flash_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Partial outputs of split keys (flash_api.cpp, `set_params_splitkv`)."""
    query, key = args[:2]
    dropout_p = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    if dropout_p:
        return 0
    batch, heads, length, width = query.shape
    block = 256 if width <= 64 else 128 if width <= 128 else 64  # keys a block; it has 64 queries
    splits = flash_splits(batch * heads * -(-length // 64), context.multiprocessors, -(-key.size(2) // block))
    if splits == 1:
        return 0
    return splits * batch * heads * length * (1 + _flash_width(width)) * _FLOAT_BYTES


def _flash_width(width: int) -> int:
    """`head_size_rounded` of flash_api.cpp."""
    return round_up(width, 32 if width <= 128 else 64)


def _cuda_flash_backward_workspace(
    context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any
) -> int:
    """`softmax_d`, `dq_accum`, and keys and values for every query head (flash_api.cpp, `mha_bwd`).

    attention_backward.cu, `_flash_attention_backward` makes the output and its gradient contiguous first.
    """
    grad, query, key, _, output = args[:5]
    batch, heads, length, width = query.shape
    rows = batch * heads * round_up(length, 128)
    held = rows * _FLOAT_BYTES + _accumulators(context, batch * heads) * rows * _flash_width(width) * _FLOAT_BYTES
    if key.size(1) != heads:
        held += 2 * batch * key.size(2) * heads * width * query.element_size()
    return held + transposed_copy(grad) + transposed_copy(output)


def _accumulators(context: RuleContext, heads: int) -> int:
    """How many `dq_accum` there are; a deterministic backward has one for each block that adds to the same queries."""
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        return 1
    return -(-max(1, context.multiprocessors) // heads)


# -- packed sequences of any length on CUDA ------------------------------------------------------------------
#
# `torch.nn.attention.varlen` calls `aten._flash_attention_forward` inside a custom op, whose fake kernel makes the
# results. In training no keys are split, so the forward allocates nothing else.


def _varlen_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Nothing, but time: torch counts sequences of unknown length as the longest (flop_counter.py)."""
    offsets = args[3]
    if offsets.is_meta:
        context.note(
            "varlen_attn: the lengths of the sequences are not known, and each is counted as long as the longest; "
            "give a batch with real cu_seq tensors"
        )
    return 0


def _varlen_backward_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """`softmax_d`, `dq_accum`, and keys and values for every query head (flash_api.cpp, `mha_varlen_bwd`).

    Each sequence has 128 rows more than its own in the first two.
    """
    grad, query, key, _, output, _, offsets = args[:7]
    tokens, heads, width = query.shape
    sequences = offsets.size(0) - 1
    rows = (tokens + 128 * sequences) * heads
    held = rows * _FLOAT_BYTES + _accumulators(context, sequences * heads) * rows * _flash_width(width) * _FLOAT_BYTES
    if key.size(1) != heads:
        held += 2 * key.size(0) * heads * width * query.element_size()
    return held + contiguous_copy(grad) + contiguous_copy(output)


def round_up(size: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-size // multiple) * multiple


def transposed_copy(tensor: Tensor) -> int:
    """Return the bytes of the copy that `transpose(1, 2).contiguous()` makes, if any."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else bytes_of(tensor)


# -- CPU -----------------------------------------------------------------------------------------------------


_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default


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


def _flash_buffers(context: RuleContext, func: Any, query: Tensor, key: Tensor) -> int:
    """The kernel's own buffers; products inside it may take more: Note [Scratch of flash attention]."""
    low_bytes = query.element_size() if query.dtype in LOW_PRECISION else 0
    accumulated_bytes = 4 if low_bytes else query.element_size()
    rows, columns = _split(query.size(-2))
    rows, columns = min(rows, query.size(-2)), min(columns, key.size(-2))
    if func is _FLASH:
        per_thread = rows * columns + 2 * rows + rows * query.size(-1)
        return context.threads * (accumulated_bytes * per_thread + low_bytes * rows * columns)
    return context.threads * 2 * rows * columns * (accumulated_bytes + low_bytes) + rows * accumulated_bytes


def _split(length: int) -> tuple[int, int]:
    """Return rows and columns of a block of the score matrix (ATen/native/cpu/FlashAttentionKernel.cpp)."""
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return rows, 512


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
    return measured_once((func, query.dtype, heads, queries, keys, query.size(-1), value.size(-1), strides), probe)


WORKSPACES = {
    "cpu": {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": _cpu_flash_workspace,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _cpu_flash_backward_workspace,
    },
    "cuda": {
        "aten._scaled_dot_product_flash_attention.default": _cuda_flash_workspace,
        "aten._scaled_dot_product_flash_attention_backward.default": _cuda_flash_backward_workspace,
        "torch_attn._varlen_attn.default": _varlen_workspace,
        "torch_attn._varlen_attn_backward.default": _varlen_backward_workspace,
    },
}
