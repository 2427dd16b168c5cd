"""Indexing, embeddings, embedding bags, sorts and rolls, on CPU and CUDA.

Covers `aten.embedding`, `aten._embedding_bag`, `aten.index_put` and their backwards, `aten.gather`, `aten.sort`,
`aten.roll`, `take_along_dim` and `one_hot`. Defined in torch by ATen/native/Embedding.cpp and cuda/Embedding.cu,
EmbeddingBag.cpp, cuda/Indexing.cu, TensorTransformations.h and Sorting.cpp. On CUDA the gradients of indexing and
embedding sort their indices with cub.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules.base import RuleContext, bytes_of, contiguous_copy, run_unchanged
from memfit.capture.rules.measured_kernels import probed

# -- embeddings ----------------------------------------------------------------------------------------------


_SMALL_EMBEDDING = 3072
_ROWS_PER_THREAD = 10
_INDEX_BYTES = 8
_BITS_A_PASS = 8


def _embedding(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """ATen/native/Embedding.cpp, `embedding_symint`: the indices are flattened."""
    return contiguous_copy(args[1])


def _cpu_embedding_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Gradient and indices are made contiguous (ATen/native/Embedding.cpp, `embedding_dense_backward_cpu`)."""
    return contiguous_copy(args[0]) + contiguous_copy(args[1])


def sort_bytes(items: int, key_bytes: int, value_bytes: int, bits: int = 64) -> int:
    """Temporary storage of a radix sort of pairs: a second copy of keys and values (cub, `DeviceRadixSort`).

    A sort of up to eight bits is one pass, which needs none. Histograms, some hundred KiB at most, are not counted.
    """
    return items * (key_bytes + value_bytes) if bits > _BITS_A_PASS else 0


def _cuda_embedding_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Sorted indices and a float32 row per partial segment.

    cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu.
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


# -- embedding bags on CPU -----------------------------------------------------------------------------------


_SUM, _MAX = 0, 2
_FAST_SUM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BAG_DEFAULTS: tuple[Any, ...] = (None, None, None, False, _SUM, False, None, False, -1)
_BAGS = ("_embedding_bag", "_embedding_bag_forward_only")


def _embedding_bag(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Sums, the bag of each index, the size of each bag and where maxima were (ATen/native/EmbeddingBag.cpp).

    The second has room for one more (`make_offset2bag_out`).
    """
    weight, indices, offsets, _, mode, _, scales, ends, padding = (*args, *_BAG_DEFAULTS[len(args) :])
    bags = offsets.size(0) - ends
    width = weight.size(1)
    quick = mode == _SUM and weight.dtype in _FAST_SUM_DTYPES and weight.stride(1) == 1 and padding < 0
    quick = quick and (scales is None or scales.stride(0) == 1)
    return (
        weight.new_empty((bags, width)),
        offsets.new_empty((0,)) if quick else offsets.new_empty((indices.size(0) + 1,))[:-1],
        offsets.new_empty((bags if mode == _MAX else offsets.size(0),)),
        offsets.new_empty((bags, width) if mode == _MAX else (offsets.size(0),)),
    )


def _embedding_bag_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Measured on bags that are not empty: those are left out."""
    sizes = torch.ones(args[4].shape, dtype=args[4].dtype)
    return probed(context, func, (*args[:4], sizes, *args[5:]), kwargs, result)


# -- indexing ------------------------------------------------------------------------------------------------


def _index_put(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Accumulation sorts linear indices (cuda/Indexing.cu, `index_put_with_sort_kernel`), as does determinism.

    Otherwise indices are only laid out alike (TensorAdvancedIndexing.cpp, `_index_put_impl_`).
    """
    target, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return 0
    if accumulate or (torch.are_deterministic_algorithms_enabled() and values.numel() > 1):
        return _sorted_index_put(target, indices, given, values)
    return _alike_indices(given)


def _sorted_index_put(target: Tensor, indices: Any, given: list[Tensor], values: Tensor) -> int:
    """Return the bytes of six buffers: the linear index, its order, the sorted index, a range, and cub's two.

    Before them, `computeLinearIndex` holds the sum so far beside an index and its product with a stride. Indices that
    are not next to each other are brought to the front, which copies the target; so is a target that has gaps.
    """
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    count = math.prod(shape)
    places = [place for place, index in enumerate(indices) if index is not None]
    adjacent = places[-1] - places[0] + 1 == len(places)
    others = [size for place, size in enumerate(target.shape) if place not in places]
    slices = math.prod(target.shape[places[-1] + 1 :]) if adjacent else math.prod(others)
    gathered = count * math.prod(others)
    laid_out = values.is_contiguous() and values.numel() == gathered
    copies = contiguous_copy(target) + (0 if laid_out else gathered * values.element_size())
    if not adjacent:
        copies += bytes_of(target)
    converted = sum(index.numel() * _INDEX_BYTES for index in given if index.dtype == torch.int32)
    building = converted + (2 if len(given) == 1 else 3) * count * _INDEX_BYTES
    bits = max(1, (max(0, target.numel() - 1) // max(1, slices)).bit_length())  # cub.h, `get_num_bits`
    return max(
        contiguous_copy(target) + building,
        copies + 4 * count * _INDEX_BYTES + sort_bytes(count, _INDEX_BYTES, _INDEX_BYTES, bits),
    )


def _index(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    return _alike_indices([index for index in args[1] if index is not None])


def _alike_indices(given: list[Tensor]) -> int:
    """Return the bytes of copies: of int32 indices, and of several whose strides differ once they are expanded.

    TensorAdvancedIndexing.cpp, `make_info`; TensorAdvancedIndexingUtils.h, `AdvancedIndex`.
    """
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return 0
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    converted = sum(index.numel() * _INDEX_BYTES for index in given if index.dtype == torch.int32)
    expanded = [index.expand(shape) for index in given]
    if len({index.stride() for index in expanded}) <= 1:
        return converted
    return converted + sum(math.prod(shape) * _INDEX_BYTES for index in expanded if not index.is_contiguous())


def _gather(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """An int32 index is converted first, on every device (TensorAdvancedIndexing.cpp, `gather_out`)."""
    return args[2].numel() * _INDEX_BYTES if args[2].dtype == torch.int32 else 0


def _roll(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Several dimensions are rolled one after the other (TensorTransformations.h, `roll_common`)."""
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    return bytes_of(result) if len(dims) > 1 else 0


# -- one-hot vectors -----------------------------------------------------------------------------------------


def _one_hot(context: RuleContext, tensor: Tensor, num_classes: int = -1) -> Any:
    """Zeros with a one scattered into each row, after a check of the smallest and largest class on CPU.

    ATen/native/Onehot.cpp, `one_hot`, which computes something else for tensors on meta. What the check reads decides
    nothing where the number of classes is given; where it is not, the values must be known, and torch's code runs.
    Earlier versions of torch ask for the two one after the other, eight bytes each.
    """
    if num_classes == -1 or not tensor.numel() or type(tensor) is not Tensor or tensor.dtype is not torch.int64:
        return NotImplemented
    if context.device_type == "cpu":
        torch.aminmax(tensor)
    result = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device="meta")
    return result.scatter_(-1, tensor.unsqueeze(-1), 1)


_one_hot.as_given = True  # type: ignore[attr-defined]

FUNCTIONS = {device: {"take_along_dim": run_unchanged, "one_hot": _one_hot} for device in ("cpu", "cuda")}
KERNELS = {"cpu": {f"aten.{name}.default": _embedding_bag for name in _BAGS}}
WORKSPACES = {
    "cpu": {
        "aten.embedding.default": _embedding,
        "aten.gather.default": _gather,
        "aten.embedding_dense_backward.default": _cpu_embedding_backward,
        **{f"aten.{name}.default": probed for name in _BAGS},
        "aten._embedding_bag_backward.default": _embedding_bag_backward,
        "aten.roll.default": _roll,
        "aten.sort.default": probed,
        "aten.sort.stable": probed,
    },
    "cuda": {
        "aten.embedding_dense_backward.default": _cuda_embedding_backward,
        "aten.gather.default": _gather,
        "aten.index_put.default": _index_put,
        "aten.index_put_.default": _index_put,
        "aten._index_put_impl_.default": _index_put,
        "aten._unsafe_index_put.default": _index_put,
        "aten.index.Tensor": _index,
        "aten._unsafe_index.Tensor": _index,
        "aten.roll.default": _roll,
    },
}
