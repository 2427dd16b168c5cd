"""Grouped matrix products, as mixtures of experts use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext


def _result_shape(a: Tensor, b: Tensor, groups: int) -> tuple[int, ...]:
    """ATen/native/GroupedMMUtils.h, `create_grouped_gemm_output_tensor`."""
    if a.dim() == 2 and b.dim() == 2:
        return (groups, a.size(0), b.size(1))
    if a.dim() == 2:
        return (a.size(0), b.size(-1))
    if b.dim() == 2:
        return (a.size(1), b.size(1))
    return (a.size(0), a.size(1), b.size(-1))


def _cpu_grouped_mm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """CPU takes every float dtype and pads nothing; torch's meta kernel knows CUDA's rules only."""
    a, b = args[:2]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = kwargs.get("out_dtype") or a.dtype
    shape = _result_shape(a, b, offsets.size(0) if offsets is not None else 0)
    return torch.empty(shape, dtype=dtype, device="meta")


def _cuda_grouped_mm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """CUDA pads rows to 16 bytes and takes every float dtype; torch's meta kernel takes bfloat16 only."""
    dense = _cpu_grouped_mm(context, func, args, kwargs)
    row = -(-dense.size(-1) * dense.element_size() // 16) * 16 // dense.element_size()
    strides = (row, 1) if dense.dim() == 2 else (dense.size(1) * row, row, 1)
    return torch.empty_strided(dense.size(), strides, dtype=dense.dtype, device="meta")


KERNELS = {
    "cpu": {"aten._grouped_mm.default": _cpu_grouped_mm},
    "cuda": {"aten._grouped_mm.default": _cuda_grouped_mm},
}
