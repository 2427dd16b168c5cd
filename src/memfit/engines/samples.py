"""Values of tensors at a few places: whether a recomputation makes what the forward made.

Note [Samples]: a recomputation is put back to the generators, inputs and buffers that the forward had. What else a
forward may read (a generator that no module holds, a counter, a file) cannot be known, and would give wrong gradients
without a word. So some values of each dropped tensor are kept and compared: in every run that is learnt, and in the
1st, 2nd, 4th, 8th... run of a unit. Kernels that sum in any order make results that differ by rounding; other values
differ by more.
"""

from __future__ import annotations

import functools
import math

import torch

from memfit.engines.windows import plain
from memfit.torch_private.dispatch import DisableTorchDispatch

_MOST = 64
_PRIME = 2654435761
"""Larger than any tensor has elements per sample, and no multiple of a row: samples lie in all rows and columns."""


@functools.lru_cache(maxsize=1024)
def _places(shape: torch.Size) -> tuple[list[int], ...]:
    """Return the same places for each tensor of a shape, one list for each dimension."""
    count = shape.numel()
    flat = range(count) if count <= _MOST else sorted({each * _PRIME % count for each in range(_MOST)})
    found: list[list[int]] = []
    for size in reversed(shape):
        found.insert(0, [place % size for place in flat])
        flat = [place // size for place in flat]
    return tuple(found)


def sample(tensor: torch.Tensor) -> list[float] | None:
    """Return some values of a tensor; None where they cannot be read or compared."""
    if not plain(tensor) or tensor.is_complex() or tensor.is_meta or not tensor.numel():
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    guard = DisableTorchDispatch()
    try:
        with torch.no_grad():
            values = tensor.detach()[_places(tensor.shape)] if tensor.dim() else tensor.detach().reshape(1)
            return list(values.to(torch.float64).tolist())
    finally:
        del guard


def difference(
    before: list[float], after: list[float], dtype: torch.dtype, *, exactly: bool = False
) -> tuple[float, float] | None:
    """Return the first two values that differ by more than rounding, or at all, None when there are none."""
    relative = max(4 * torch.finfo(dtype).eps, 1e-3) if dtype.is_floating_point and not exactly else 0.0
    scale = max((abs(each) for each in before if math.isfinite(each)), default=0.0)
    for one, other in zip(before, after, strict=True):
        if one == other or (math.isnan(one) and math.isnan(other)):
            continue
        if not abs(one - other) <= relative * (scale + abs(one)):  # not: NaN is no number to compare with
            return one, other
    return None
