"""CUDA's reduction kernel: how many bytes it stages when several thread blocks share one result.

Defined in torch by ATen/native/cuda/Reduce.cuh (`ReduceConfig`, `setReduceConfig`, `gpu_reduce_kernel`), and the order
of dimensions by ATen/TensorIterator.cpp (`reorder_dimensions`, `coalesce_dimensions`, `with_32bit_indexing`). Which op
reduces how is in `reductions.py`; norms and convolutions, which reduce inside themselves, ask here too.

Note [Staging]: each block writes the partial result of every one of its threads, and `global_memory_size` multiplies by
a block's width for every result. A sum of many rows to few columns therefore stages the same 132 MiB on an H100
whatever its width: bytes of an accumulator x target blocks x 128 x 128.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memfit.capture.rules.base import LOW_PRECISION, RuleContext

_INT_MAX = 2**31 - 1
_MAX_THREADS = 512
_MAX_VALUES_PER_THREAD = 256
_LEAST_ROW = 128
"""From how many elements on a contiguous row is read several elements at a time."""

THREADS_PER_MULTIPROCESSOR = {(7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536}
"""`maxThreadsPerMultiProcessor` by capability (CUDA programming guide); later ones in `_threads`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One of the kernel's instances: its accumulator, how many elements it reads at once, and its results."""

    accumulator_bytes: int
    element_bytes: int
    input_vector: int = 4
    accumulates_in_output: bool = True
    complex_double: bool = False


def sum_kernel(dtype: torch.dtype, output: torch.dtype) -> Reduction:
    """Return the kernel of sums and means: float32 inside for 16 bits, which it reads eight at a time.

    cuda/ReduceSumProdKernel.cu, `sum_functor`; cuda/ReduceMomentKernel.cu, `mean_kernel_impl`.
    """
    return replace(plain_kernel(dtype, output), input_vector=8 if dtype.itemsize == 2 else 4)


def plain_kernel(dtype: torch.dtype, output: torch.dtype) -> Reduction:
    """Return a kernel that accumulates in the dtype itself, or in float32 for 16 bits."""
    low = dtype in LOW_PRECISION
    return Reduction(
        accumulator_bytes=4 if low else dtype.itemsize,
        element_bytes=dtype.itemsize,
        accumulates_in_output=not (low and output == dtype),
        complex_double=dtype == torch.complex128,
    )


# -- the order of dimensions -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Loops:
    """What TensorIterator makes of a reduction: sizes, and strides in bytes of the result and of the input."""

    sizes: tuple[int, ...]
    output: tuple[int, ...]
    input: tuple[int, ...]

    @property
    def reduced_dims(self) -> int:
        """How many dimensions are reduced; they come first."""
        return sum(stride == 0 for stride in self.output)

    @property
    def outputs(self) -> int:
        return math.prod(size for size, stride in zip(self.sizes, self.output, strict=True) if stride != 0 or size == 0)

    def fits_32_bits(self) -> bool:
        """TensorIterator.cpp, `can_use_32bit_indexing`."""
        if math.prod(self.sizes) > _INT_MAX:
            return False
        return all(
            1 + sum((size - 1) * stride for size, stride in zip(self.sizes, strides, strict=True)) <= _INT_MAX
            for strides in (self.output, self.input)
        )

    def parts(self) -> Iterator[_Loops]:
        """Halve the dimension that reaches farthest until every part fits (`with_32bit_indexing`)."""
        if self.fits_32_bits():
            yield self
            return
        reach = [
            ((size - 1) * max(out, each), dim)
            for dim, (size, out, each) in enumerate(zip(self.sizes, self.output, self.input, strict=True))
        ]
        split = max(reach)[1]
        half = self.sizes[split] // 2
        for size in (half, self.sizes[split] - half):
            yield from replace(self, sizes=(*self.sizes[:split], size, *self.sizes[split + 1 :])).parts()


def _loops(source: Tensor, reduced: Sequence[bool], element_bytes: int, output_bytes: int) -> _Loops:
    """Order the dimensions by stride, reduced ones first, and join those that lie together."""
    sizes = tuple(source.shape)
    strides = tuple(stride * element_bytes for stride in source.stride())
    out = [0] * len(sizes)
    step = output_bytes
    for dim in reversed(range(len(sizes))):  # the result is contiguous
        if not reduced[dim]:
            out[dim] = step
            step *= sizes[dim]
    order = list(reversed(range(len(sizes))))
    for position in range(1, len(order)):  # insertion sort: a comparison may say nothing
        at = position
        for before in reversed(range(position)):
            comes_after = _compare(order[before], order[at], sizes, out, strides)
            if comes_after > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif comes_after < 0:
                break
    joined: list[tuple[int, int, int]] = []
    for dim in order:
        size, out_stride, in_stride = sizes[dim], out[dim], strides[dim]
        if joined:
            last, last_out, last_in = joined[-1]
            together = last * last_out == out_stride and last * last_in == in_stride
            if last == 1 or size == 1 or together:
                kept = (out_stride, in_stride) if last == 1 else (last_out, last_in)
                joined[-1] = (last * size, *kept)
                continue
        joined.append((size, out_stride, in_stride))
    return _Loops(tuple(each[0] for each in joined), tuple(each[1] for each in joined), tuple(e[2] for e in joined))


def _compare(first: int, second: int, sizes: Sequence[int], out: Sequence[int], strides: Sequence[int]) -> int:
    """Return 1 where `first` belongs after `second`, -1 before it, 0 where strides do not say."""
    if (out[first] == 0) != (out[second] == 0):
        return 1 if out[second] == 0 else -1
    for each in (out, strides):
        if each[first] == 0 or each[second] == 0:
            continue
        if each[first] != each[second]:
            return -1 if each[first] < each[second] else 1
        if sizes[first] > sizes[second]:
            return 1
    return 0


# -- the launch --------------------------------------------------------------------------------------------------------


def staging_bytes(
    context: RuleContext, source: Tensor, dims: Sequence[int] | None, kernel: Reduction, output_bytes: int
) -> int:
    """Return what the kernel allocates to reduce `source` over `dims` (all where there are none).

    The staging buffer and a semaphore for each column of blocks; and, where the input is too large for 32-bit offsets,
    accumulators that the parts share.
    """
    if source.numel() == 0 or source.dim() == 0 or not context.multiprocessors:
        return 0
    chosen = {dim % source.dim() for dim in dims} if dims else set(range(source.dim()))
    reduced = [dim in chosen for dim in range(source.dim())]
    loops = _loops(source, reduced, kernel.element_bytes, output_bytes)
    shared = 0
    if not loops.fits_32_bits() and not kernel.accumulates_in_output and output_bytes < kernel.accumulator_bytes:
        shared = loops.outputs * kernel.accumulator_bytes
    offset = int(source.storage_offset())
    return shared + max(_staged(context, part, kernel, offset) for part in loops.parts())


def _staged(context: RuleContext, loops: _Loops, kernel: Reduction, offset: int) -> int:
    """Reduce.cuh, `setReduceConfig`, `global_memory_size` and `semaphore_size`."""
    on_amd = context.vendor == "AMD"
    outputs = loops.outputs
    inputs = math.prod(loops.sizes) // outputs
    dims = loops.reduced_dims
    along_rows = dims == len(loops.sizes) or loops.input[0] < loops.input[dims]
    width, height = (inputs, outputs) if along_rows else (outputs, inputs)
    fastest = loops.input[0] if along_rows else loops.input[dims]
    vector = 1
    if fastest == kernel.element_bytes:
        if along_rows and width >= _LEAST_ROW and dims == 1:
            width //= kernel.input_vector
        elif not along_rows:
            vector = _output_vector(loops, kernel.element_bytes, offset)
            width //= vector

    threads = (_MAX_THREADS // 2 if kernel.complex_double else _MAX_THREADS) // vector
    wide, high = (_power_of_two(size) if size < threads else threads for size in (width, height))
    block_height = min(high, threads // min(wide, 64 if on_amd else 32))
    block_width = min(wide, threads // block_height)

    step_input, step_output = (block_width, 1) if along_rows else (1, block_width)
    values = _ceil(inputs, step_input)
    if values < min(block_height * 16, _MAX_VALUES_PER_THREAD):  # each warp has a result of its own
        return 0
    step_input *= block_height
    values = _ceil(inputs, step_input)
    grid = _ceil(outputs // vector, step_output)
    target = context.multiprocessors * (_threads(context) // (block_width * block_height))
    if values < _MAX_VALUES_PER_THREAD or grid > target:
        return 0
    least = _ceil(values, 128 if on_amd else 16)
    blocks = max(min(_ceil(target, grid), least), _ceil(values, _MAX_VALUES_PER_THREAD))
    if blocks <= 1:
        return 0
    if on_amd:
        blocks = max(blocks, 64)
    staged = kernel.accumulator_bytes * outputs * blocks
    return (staged if along_rows else staged * block_width * vector) + 4 * grid


def _output_vector(loops: _Loops, element_bytes: int, offset: int) -> int:
    """Return how many results one load serves, 4, 2 or 1 (Reduce.cuh, `get_output_vec_size`)."""
    kept = loops.reduced_dims
    others = (stride // element_bytes for dim, stride in enumerate(loops.input) if dim != kept)
    vector = 4
    for number in (offset, loops.sizes[kept], *others):
        while number % vector:
            vector //= 2
    return vector


def _threads(context: RuleContext) -> int:
    """Return the threads that one multiprocessor holds."""
    if context.vendor == "AMD" or context.compute_capability is None:
        return 2048
    known = THREADS_PER_MULTIPROCESSOR.get(context.compute_capability)
    return known or (1536 if context.compute_capability[0] >= 11 else 2048)


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above a number, 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
