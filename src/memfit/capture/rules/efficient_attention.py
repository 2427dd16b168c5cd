"""Memory-efficient and cuDNN attention on CUDA: their results and what they allocate inside themselves.

Covers `aten._scaled_dot_product_efficient_attention`, `aten._scaled_dot_product_cudnn_attention` and their backwards.
Defined in torch by ATen/native/transformers/cuda/attention.cu, attention_backward.cu and mem_eff_attention/, and by
ATen/native/cudnn/MHA.cpp. CPU has neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.rules.base import LOW_PRECISION, RuleContext, bytes_of
from memfit.capture.rules.flash_attention import round_up, transposed_copy

_FLOAT_BYTES = 4


_CUDNN_NOTE = "attention with grouped heads by cuDNN: what its engine holds beyond dQ in float32 is not counted"
# -- memory-efficient ----------------------------------------------------------------------------------------


def _efficient_results(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Seed and offset are in host memory (cuda/attention.cu, Note [Seed and Offset Device]): empty here."""
    output, logsumexp, seed, offset = func(*args, **kwargs)
    if context.several_ranks:  # DTensor takes scalars only; their bytes are left out when the call is recorded
        return output, logsumexp, seed, offset
    return output, logsumexp, seed.new_empty(0), offset.new_empty(0)


def _efficient_forward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Heads over 128 wide accumulate in float32.

    mem_eff_attention/kernel_forward.h, `kNeedsOutputAccumulatorBuffer`.
    """
    query, value = args[0], args[2]
    if query.dtype not in LOW_PRECISION or max(query.size(-1), value.size(-1)) <= 128:
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
    """Return the first compiled kernel that takes these arguments.

    mem_eff_attention/kernels/cutlassB.h, `dispatch_cutlassB`.
    """
    half = dtype in LOW_PRECISION
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
    half = query.dtype in LOW_PRECISION
    kernel = efficient_kernel(query.dtype, max(width, value_width), dropout_p > 0, (capability[0], capability[1]))
    in_registers = half and kernel.width <= kernel.queries  # `kOutputInRF`
    accumulates = half and not in_registers  # `kNeedsAccumGradK`
    splits = -(-keys // kernel.keys)
    if batch * heads >= 256 and keys <= 2 * kernel.keys:
        splits = 1
    if accumulates:
        splits = max(1, min(splits, 200 // (batch * heads)))
    elements = 0
    if accumulates:
        elements += splits * kernel.keys * (round_up(width, kernel.queries) + round_up(value_width, kernel.queries))
    if half or capability >= (7, 0):
        tiles = -(-queries // kernel.queries) * -(-width // kernel.keys)
        elements += tiles * (4 + kernel.queries * kernel.keys)
    workspace = batch * heads * round_up(elements, 4) * _FLOAT_BYTES
    delta = batch * heads * queries * _FLOAT_BYTES
    computed = half and (in_registers or capability[0] != 7 or capability[1] >= 5)
    product = 0 if computed else batch * heads * queries * value_width * _FLOAT_BYTES * (3 if half else 1)
    return max(delta + workspace, product + delta if product else 0) + transposed_copy(grad)


# -- cuDNN ---------------------------------------------------------------------------------------------------


def _cudnn_results(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The log-sum-exp is made only for a backward (ATen/native/cudnn/MHA.cpp, `run_cudnn_SDP_fprop`)."""
    results = list(func(*args, **kwargs))
    if not args[4]:
        results[1] = results[1].new_empty(0)
    return tuple(results)


def _cudnn_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """`dQ_accum` and the softmax sum.

    cudnn-frontend, `CompositeSDPABackwardNode::get_fe_workspace_size_node`. What the engine adds itself is not public.
    """
    grad, query, key = args[:3]
    batch, heads, length, width = query.shape
    if key.size(1) != heads:
        context.note(_CUDNN_NOTE)
    held = batch * heads * length * (width + 1) * _FLOAT_BYTES
    return held + (0 if grad.stride(-1) == 1 else bytes_of(grad))


KERNELS = {
    "cuda": {
        "aten._scaled_dot_product_efficient_attention.default": _efficient_results,
        "aten._scaled_dot_product_cudnn_attention.default": _cudnn_results,
    }
}
WORKSPACES = {
    "cuda": {
        "aten._scaled_dot_product_efficient_attention.default": _efficient_forward,
        "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
        "aten._scaled_dot_product_cudnn_attention_backward.default": _cudnn_backward,
    }
}
