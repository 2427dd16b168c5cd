"""Matrix products: what torch checks and its meta kernels do not, and what the kernels allocate inside.

Covers `F.linear`, `aten.mm`, `aten.addmm`, `aten.bmm`, `aten.baddbmm` and the grouped products of mixtures of experts,
`aten._grouped_mm`. Defined in torch by ATen/native/Linear.cpp, LinearAlgebra.cpp and mkldnn/Matmul.cpp (CPU),
cuda/Blas.cpp and GroupedMMUtils.h.

Note [Scratch of a product]: ATen's own part of a product on CPU is known from its source: an operand that BLAS cannot
read is copied. Whether oneDNN takes the product, and what it allocates then, depends on the dtype, the instruction set
and torch's settings. That is learnt from two small products. Where they show no scratch memory, there is none for any
size. Where they do, each product is measured at its own size when that is cheap. Of a larger one, smaller ones of its
kind are measured first: where they show the accumulator of oneDNN's emulated products, its formula is known. Else the
instruction set has such products, and oneDNN copies blocks of the operands, whose sizes it chooses by rows, columns,
depth, threads and strides in powers of two (oneDNN, cpu/x64/matmul/brgemm_matmul_utils.cpp): the product is run at its
own size where that takes some tenths of a second. A still larger one is taken in part, with as many rows, columns and
depth as blocks have at most, and there is a note.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memfit.capture.kernels import measured_once, probe_workspace, signature
from memfit.capture.rules.base import RuleContext, bytes_of, fills_its_memory
from memfit.torch_private.functorch import transform_active

_aten = torch.ops.aten


_VENDOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHEAP_FLOPS = 1 << 26
_CHEAP_BYTES = 1 << 27
_AFFORDABLE_FLOPS = 1 << 33
_SIDE_PERIOD, _DEPTH_PERIOD = 1024, 4096
"""Rows or columns, and depth, beyond which blocks of operands do not grow."""
_SMALLEST_DEPTH = 32
_SMALLEST_SIDE = 64
_NATIVE_BMM = 400
"""Multiplications below which `bmm` runs ATen's own loop (LinearAlgebra.cpp, `bmm_out_or_baddbmm_`)."""


def _same_dtype(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Operands of a product have one dtype (ATen/native/LinearAlgebra.cpp, `addmm_impl_cpu_`; cuda/Blas.cpp)."""
    first, second = _factors(args)
    if first.dtype != second.dtype:
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {first.dtype} and {second.dtype}")
    return func(*args, **kwargs)


def _factors(args: Any) -> tuple[Tensor, Tensor]:
    """Return the two operands that are multiplied; `addmm` and `baddbmm` have one before them."""
    first, second = [value for value in args if isinstance(value, Tensor)][-2:]
    return first, second


def _readable(matrix: Tensor) -> bool:
    """Return whether BLAS reads a matrix as it is (LinearAlgebra.cpp, `addmm_impl_cpu_`)."""
    (rows, columns), (row_stride, column_stride) = matrix.shape[-2:], matrix.stride()[-2:]
    return (row_stride == 1 and column_stride >= max(1, rows)) or (column_stride == 1 and row_stride >= max(1, columns))


# -- CUDA: copies of what cuBLAS cannot read -------------------------------------------------------------------


def blas_copy(matrix: Tensor) -> int:
    """Return the bytes of the copy made of a matrix that cuBLAS cannot read.

    cuda/Blas.cpp, `prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas`: one of the last two
    dimensions has stride 1 and the other steps over it; the stride of a batch may be 0.
    """
    if matrix.dim() == 2 and fills_its_memory(matrix):
        return 0
    if _readable(matrix) or (matrix.is_contiguous() and 0 not in matrix.stride()[-2:]):
        return 0
    return bytes_of(matrix)


def _cuda_product(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Copies of both factors, where they are needed (cuda/Blas.cpp)."""
    return sum(map(blas_copy, _factors(args)))


# -- CPU: copies for BLAS and oneDNN's scratch memory ----------------------------------------------------------


def _cpu_product(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """Copies of operands that BLAS cannot read, and oneDNN's scratch memory: Note [Scratch of a product]."""
    first, second = _factors(args)
    if first.numel() == 0 or second.numel() == 0:
        return 0
    product = _product_of(func, first, second)
    if not _takes_scratch(product):
        return _copies(first, second)
    emulated = not product.cheap and _emulated(context, product)
    if product.cheap or (product.affordable and not emulated):
        return measured_once(signature(func, args, kwargs), lambda: probe_workspace(func, args, kwargs))
    if first.dim() == 3:
        copies = sum(bytes_of(factor) for factor in (first, second) if not _dense(factor))
    else:
        copies = _copies(first, second)
    return copies + (_accumulator(context, product) if emulated else _scaled_scratch(context, product))


def _copies(first: Tensor, second: Tensor) -> int:
    """Return the bytes of the copies that ATen makes for BLAS, of one matrix of a batch after the other."""
    if first.dim() == 3 and math.prod((*first.shape[1:], second.size(-1))) < _NATIVE_BMM:
        return 0
    matrices = first.size(0) if first.dim() == 3 else 1
    return sum(bytes_of(factor) // max(1, matrices) for factor in (first, second) if not _readable(factor))


def _dense(matrix: Tensor) -> bool:
    """Return whether oneDNN reads a batch as it is (mkldnn/Matmul.cpp, `is_mkldnn_optimized_format`)."""
    return matrix.is_contiguous() or matrix.mT.is_contiguous()


@dataclass(frozen=True, slots=True)
class _Product:
    """The sizes of a product of `batch` matrices, rows x depth times depth x columns, and which are transposed."""

    func: Any
    dtype: torch.dtype
    batch: int
    rows: int
    depth: int
    columns: int
    transposed: tuple[bool, bool]

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.depth * self.columns

    @property
    def bytes(self) -> int:
        elements = self.rows * self.depth + self.depth * self.columns + self.rows * self.columns
        return self.batch * elements * self.dtype.itemsize

    @property
    def cheap(self) -> bool:
        return self.flops <= _CHEAP_FLOPS and self.bytes <= _CHEAP_BYTES

    @property
    def affordable(self) -> bool:
        return self.flops <= _AFFORDABLE_FLOPS and self.bytes <= _CHEAP_BYTES

    def side(self, wide: bool) -> int:
        """Return the columns, or the rows."""
        return self.columns if wide else self.rows

    def with_side(self, wide: bool, size: int) -> _Product:
        """Return the same product with so many columns, or rows."""
        return replace(self, columns=size) if wide else replace(self, rows=size)

    def scratch_bytes(self) -> int:
        """Measure a product of dense operands of these sizes."""
        return measured_once(("product", self), lambda: probe_workspace(self.func, self._arguments(), {}))

    def _arguments(self) -> tuple[Tensor, ...]:
        batched = self.func in (_aten.bmm.default, _aten.baddbmm.default)
        lead = (self.batch,) if batched else ()

        def dense(rows: int, columns: int, transposed: bool = False) -> Tensor:
            shape = (*lead, columns, rows) if transposed else (*lead, rows, columns)
            matrix = torch.empty(shape, dtype=self.dtype, device="meta")
            return matrix.mT if transposed else matrix

        factors = (
            dense(self.rows, self.depth, self.transposed[0]),
            dense(self.depth, self.columns, self.transposed[1]),
        )
        added = self.func in (_aten.addmm.default, _aten.baddbmm.default)
        return (dense(self.rows, self.columns), *factors) if added else factors


def _product_of(func: Any, first: Tensor, second: Tensor) -> _Product:
    (rows, depth), columns = first.shape[-2:], second.size(-1)
    batch = first.size(0) if first.dim() == 3 else 1
    turned = (first.stride(-2) == 1 and rows > 1, second.stride(-2) == 1 and depth > 1)
    return _Product(func, first.dtype, batch, rows, depth, columns, turned)


def _takes_scratch(product: _Product) -> bool:
    """Return whether small products of this op and dtype take more than their result on this machine."""
    if product.dtype not in _VENDOR_DTYPES:
        return False
    batch = 4 if product.batch > 1 else 1
    small = replace(product, batch=batch, rows=48, depth=64, columns=80, transposed=(False, False))
    larger = replace(small, rows=192, depth=128, columns=256)
    return small.scratch_bytes() > 0 or larger.scratch_bytes() > 0


def _scaled_scratch(context: RuleContext, product: _Product) -> int:
    """The scratch memory of a product that is too large to be run here, from a part of it."""
    context.note(f"{product.func}: too large to run once here; its scratch memory is scaled from a smaller product")
    smaller = _part_of(context, product)
    wide = product.columns - smaller.columns >= product.rows - smaller.rows
    # Blocks that have reached their size do not grow with twice the side; half the depth, so that this can be run, too.
    shallower = replace(smaller, depth=max(1, smaller.depth // 2))
    longer = shallower.with_side(wide, 2 * smaller.side(wide))
    grown = (longer.scratch_bytes() - shallower.scratch_bytes()) / smaller.side(wide)
    return smaller.scratch_bytes() + math.ceil(max(0.0, grown) * (product.side(wide) - smaller.side(wide)))


def _emulated(context: RuleContext, product: _Product) -> bool:
    """Return whether small products of this kind take the accumulator of emulated ones, and nothing else."""
    smaller = replace(product, batch=min(product.batch, 2 * context.threads))
    while not smaller.cheap and smaller.depth >= 2 * _SMALLEST_DEPTH:
        smaller = replace(smaller, depth=smaller.depth // 2)
    wide = smaller.columns >= smaller.rows
    while not smaller.cheap and smaller.side(wide) >= 2 * _SMALLEST_SIDE:
        half = smaller.side(wide) // 2
        smaller = smaller.with_side(wide, half - half % _SMALLEST_SIDE)
    fewer = smaller.with_side(wide, max(1, smaller.side(wide) // 2))
    shallower = replace(smaller, depth=max(1, smaller.depth // 2))
    return all(each.scratch_bytes() == _accumulator(context, each) for each in (smaller, fewer, shallower))


def _part_of(context: RuleContext, product: _Product) -> _Product:
    """Return a product that can be run here, with the blocks of this one as far as that goes."""

    def cut(size: int, period: int, rest: bool) -> int:
        return period + size % period * rest if size > period else size

    def part(rest: bool) -> _Product:
        return replace(
            product,
            batch=min(product.batch, 2 * context.threads),
            rows=cut(product.rows, _SIDE_PERIOD, rest),
            depth=cut(product.depth, _DEPTH_PERIOD, rest),
            columns=cut(product.columns, _SIDE_PERIOD, rest),
        )

    smaller = part(rest=True)
    if not smaller.affordable:
        smaller = part(rest=False)
    while not smaller.affordable:  # a batch
        longest = max(("rows", "depth", "columns"), key=lambda name: getattr(smaller, name))
        smaller = replace(smaller, **{longest: getattr(smaller, longest) // 2})
    return smaller


def _accumulator(context: RuleContext, product: _Product) -> int:
    """The float32 results that oneDNN keeps for each thread where products of 16 bits are emulated.

    oneDNN, cpu/matmul/gemm_based_common.hpp, `book_acc_scratchpad`: whole lines of 64 numbers, and 128 bytes to align.
    """
    threads = min(context.threads, product.batch)
    return 4 * threads * (-(-product.rows * product.columns // 64) * 64) + 128


# -- grouped products ----------------------------------------------------------------------------------------


def _grouped_shape(a: Tensor, b: Tensor, groups: int) -> tuple[int, ...]:
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
    shape = _grouped_shape(a, b, offsets.size(0) if offsets is not None else 0)
    return torch.empty(shape, dtype=dtype, device="meta")


def _cuda_grouped_mm(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """CUDA pads rows to 16 bytes and takes every float dtype; torch's meta kernel takes bfloat16 only."""
    dense = _cpu_grouped_mm(context, func, args, kwargs)
    row = -(-dense.size(-1) * dense.element_size() // 16) * 16 // dense.element_size()
    strides = (row, 1) if dense.dim() == 2 else (dense.size(1) * row, row, 1)
    return torch.empty_strided(dense.size(), strides, dtype=dense.dtype, device="meta")


# -- linear layers -------------------------------------------------------------------------------------------


def _linear(context: RuleContext, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A bias is added in place to the product of an input that is not contiguous (ATen/native/Linear.cpp, `linear`).

    Under a dispatch mode torch adds it out of place, as it does under a transform. Attention modules call this on
    transposed batches.
    """
    flattened = bias is None or input.dim() == 2 or input.is_contiguous()
    if flattened or transform_active() or os.environ.get("TORCH_LINEAR_FLATTEN_3D") == "1":
        return NotImplemented
    return torch.matmul(input, weight.t()).add_(bias)


_linear.as_given = True  # type: ignore[attr-defined]

FUNCTIONS = {device: {"linear": _linear} for device in ("cpu", "cuda")}
_NAMES = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
KERNELS = {
    "cpu": {**dict.fromkeys(_NAMES, _same_dtype), "aten._grouped_mm.default": _cpu_grouped_mm},
    "cuda": {**dict.fromkeys(_NAMES, _same_dtype), "aten._grouped_mm.default": _cuda_grouped_mm},
}
WORKSPACES = {"cpu": dict.fromkeys(_NAMES, _cpu_product), "cuda": dict.fromkeys(_NAMES, _cuda_product)}
