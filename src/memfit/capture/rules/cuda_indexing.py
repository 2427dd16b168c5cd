"""Gradients of indexing and embedding on CUDA, which sort their indices, and other sorts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.capture.rules.layout import bytes_of, contiguous_copy

_SMALL_EMBEDDING = 3072
_ROWS_PER_THREAD = 10
_INDEX_BYTES = 8


def sort_bytes(items: int, key_bytes: int, value_bytes: int) -> int:
    """Temporary storage of a radix sort of pairs: a second copy of keys and values (cub, `DeviceRadixSort`).

    Its histograms, some hundred KiB at most, are not counted.
    """
    return items * (key_bytes + value_bytes)


def _embedding_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Sorted indices and a float32 row per partial segment (cuda/Embedding.cu,
    cuda/EmbeddingBackwardKernel.cu).
    """
    grad, indices, rows, _, by_frequency = args
    count = indices.numel()
    copies = contiguous_copy(grad) + contiguous_copy(indices)
    if count <= _SMALL_EMBEDDING and not by_frequency:
        return copies
    size = indices.element_size()
    ordered = 2 * count * size
    sorting = ordered + count * size + sort_bytes(count, size, size) - bytes_of(result)
    segments = min(count, rows)
    partial = count // _ROWS_PER_THREAD + segments
    numbers = 2 * 8
    kept = ordered + (count + 2 * segments + partial) * size + numbers
    if by_frequency:
        kept += count * size
    accumulator = max(4, grad.element_size())
    return copies + max(sorting, kept + partial * grad.size(-1) * accumulator)


def _index_put(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Accumulation sorts linear indices (cuda/Indexing.cu, `index_put_with_sort_kernel`).

    The linear index, its order, the sorted index and a range are int64; then cub's storage.
    """
    target, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return 0
    if not (accumulate or torch.are_deterministic_algorithms_enabled()):
        return 0
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    count = 1
    for size in shape:
        count *= size
    gathered = count
    for position, size in enumerate(target.shape):
        if position >= len(indices) or indices[position] is None:
            gathered *= size
    expanded = gathered * values.element_size()
    copies = 0 if values.is_contiguous() and values.numel() == gathered else expanded
    copies += contiguous_copy(target)
    return copies + 4 * count * _INDEX_BYTES + sort_bytes(count, _INDEX_BYTES, _INDEX_BYTES)


WORKSPACES = {
    "cuda": {
        "aten.embedding_dense_backward.default": _embedding_backward,
        "aten.index_put.default": _index_put,
        "aten.index_put_.default": _index_put,
        "aten._index_put_impl_.default": _index_put,
        "aten._unsafe_index_put.default": _index_put,
    }
}
