"""Which kernels torch would choose: oneDNN on the CPU, attention on any device, FlexAttention's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

has_onednn: bool = torch._C._has_mkldnn
"""Whether torch was built with oneDNN (torch/csrc/Module.cpp)."""

onednn_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
"""Whether oneDNN is turned on (torch/csrc/Module.cpp; `torch.backends.mkldnn.enabled` can only be set as a flag)."""

onednn_deterministic: Callable[[], bool] = torch._C._get_mkldnn_deterministic
"""Whether oneDNN must be deterministic (torch/csrc/Module.cpp)."""

attention_priority: Callable[[], list[int]] = torch._C._get_sdp_priority_order
"""The order in which attention backends are tried (torch/csrc/Module.cpp), as `sdpa_kernel(set_priority=)` sets it."""

fused_sdp_choice: Any = torch._fused_sdp_choice
"""Ask which attention kernel the CPU would run (aten/src/ATen/native/transformers/attention.cpp)."""

ATTENTION_SWITCHES: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = tuple(
    (getattr(torch._C, f"_get_{kind}_enabled"), getattr(torch._C, f"_set_sdp_use_{kind.removesuffix('_sdp')}"))
    for kind in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
)
"""Read and set which kernels attention may use, as `sdpa_kernel` sets it (torch/csrc/Module.cpp)."""


def fp32_precisions(*ops: str) -> tuple[Any, ...]:
    """Return oneDNN's precision of float32 products for each op (`_get_fp32_precision_getter`, torch/csrc/Module.cpp).

    A torch without it (before 2.9) has one precision only, and None is returned.
    """
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    return tuple(getter("mkldnn", op) if getter else None for op in ops)


def onednn_has_bfloat16() -> bool:
    """Return whether oneDNN takes bfloat16 on this machine (aten/src/ATen/native/mkldnn/Utils.h)."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_has_float16() -> bool:
    """Return whether oneDNN takes float16 on this machine (aten/src/ATen/native/mkldnn/Utils.h)."""
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


_CUDNN_OF_WHEELS = {12: 91002, 13: 91501}
"""cuDNN of torch's wheels, or an older one, by the major version of their CUDA: what nvidia-cudnn-cu12 and -cu13 were
pinned to when torch 2.10 came out (.github/scripts/generate_binary_build_matrix.py)."""
_CUDA_13_BY_DEFAULT = (2, 11)


def cudnn_version() -> int:
    """Return cuDNN's version as it counts itself: this torch's own, or, without CUDA, that of the default wheels.

    These are made for CUDA 13 since torch 2.11 and for CUDA 12 before.
    """
    if torch.version.cuda is None:
        release = tuple(int(number) for number in torch.__version__.split(".")[:2])
        return _CUDNN_OF_WHEELS[13 if release >= _CUDA_13_BY_DEFAULT else 12]
    return torch.backends.cudnn.version() or _CUDNN_OF_WHEELS.get(int(torch.version.cuda.split(".")[0]), 0)


FLEX_ATTENTION_RUNS_EAGERLY = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""A flag of torch/nn/attention/flex_attention.py: run the op itself, and not through Dynamo. Where it is gone, the
capture of `flex_attention` sees what Dynamo makes of it."""


def flex_attention_forward() -> Any:
    """Return the function that eager `flex_attention` runs (torch/_higher_order_ops/flex_attention.py)."""
    from torch._higher_order_ops.flex_attention import sdpa_dense

    return sdpa_dense


def flex_attention_backward() -> Any:
    """Return the function that its backward runs (torch/_higher_order_ops/flex_attention.py)."""
    from torch._higher_order_ops.flex_attention import sdpa_dense_backward

    return sdpa_dense_backward


def chunked_cross_entropy() -> Any:
    """Return the loop of a chunked `F.linear_cross_entropy` (torch/nn/modules/linear_cross_entropy.py, since 2.13)."""
    from torch.nn.modules.linear_cross_entropy import _linear_cross_entropy_batch_chunked_accumulator

    return _linear_cross_entropy_batch_chunked_accumulator
