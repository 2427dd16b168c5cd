"""Matrix products on a GPU: which tile and split a library would choose, and how long the waves of its blocks take.

    waves = blocks / multiprocessors, rounded up as far as `tail` does not shrink the last one
    block = 2 x tile x (depth / splits + prologue) x (1 + operand x (1 / rows + 1 / columns)) / rate of a multiprocessor

A split of the depth adds the traffic of its partial results. The time at the device's peak follows; what a library
reaches of it is a family's efficiency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from memfit.capture import Op
from memfit.hardware import Device, TileModel, kernel_figures

_ALIGNMENT_BYTES = 16
_PARTIAL_BYTES = 4
"""Partial results of a split are float32."""
_SPLIT_MS = 0.002
"""The kernel that sums them."""
_LEAST_DEPTH = 64
"""A part of a split depth is no shorter."""
_ENOUGH_WAVES = 8
"""Above so many waves a split of the depth cannot help."""
_AMPERE = (8, 0)


@dataclass(frozen=True, slots=True)
class Product:
    """A (batched) matrix product: `batch` results of `rows` by `columns`, over `depth`."""

    batch: int
    rows: int
    columns: int
    depth: int

    @classmethod
    def of(cls, op: Op) -> Product:
        """The product that an op computes, from its result and its FLOPs."""
        shape = op.outputs[0].shape if op.outputs else ()
        rows, columns = (*(1, 1), *shape)[-2:]
        batch = shape[0] if len(shape) > 2 else 1
        return cls(batch, rows, columns, op.flops // max(1, 2 * batch * rows * columns))

    def aligned(self, item_bytes: int) -> bool:
        """Whether rows and depth are whole multiples of what tensor cores load at once."""
        step = max(1, _ALIGNMENT_BYTES // item_bytes)
        return self.depth % step == 0 and self.columns % step == 0


def tile_model(device: Device, *, matrix_units: bool, batched: bool) -> TileModel:
    """The tiles that a library has for a kind of product."""
    figures = kernel_figures()
    if matrix_units:
        return figures.tensor
    if not batched:
        return figures.simt
    old = device.compute_capability is not None and device.compute_capability < _AMPERE and device.vendor == "NVIDIA"
    return figures.simt_batched_before_ampere if old else figures.simt_batched


@lru_cache(maxsize=1 << 16)
def product_ms(
    product: Product, model: TileModel, multiprocessors: int, flops_per_s: float, bytes_per_s: float
) -> float:
    """Milliseconds of the best tile and split at these rates."""
    rows, columns, depth = product.rows, product.columns, product.depth
    unit_ms = 2e3 * multiprocessors / flops_per_s
    partial_ms = product.batch * rows * columns * _PARTIAL_BYTES / bytes_per_s * 1e3
    least = math.inf
    for tile_rows, tile_columns in model.tiles:
        blocks = product.batch * -(-rows // tile_rows) * -(-columns // tile_columns)
        area = tile_rows * tile_columns
        depth_ms = area * unit_ms * (1 + model.operand * (1 / tile_rows + 1 / tile_columns))
        for splits in model.splits:
            if splits > 1 and (depth < splits * _LEAST_DEPTH or blocks > _ENOUGH_WAVES * multiprocessors):
                break
            waves = count_waves(blocks * splits, multiprocessors, model.tail)
            found = waves * depth_ms * (-(-depth // splits) + model.prologue)
            if splits > 1:
                found += (splits + 1) * partial_ms + _SPLIT_MS
            least = min(least, found)
    return least


def count_waves(blocks: float, multiprocessors: int, tail: float) -> float:
    """Rounds of blocks on all multiprocessors; a last one that is not full takes less time as far as `tail` says."""
    waves = blocks / multiprocessors
    return tail * max(waves, 1.0) + (1.0 - tail) * math.ceil(waves)
