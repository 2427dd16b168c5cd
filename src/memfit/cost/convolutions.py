"""Convolutions on a GPU: the fastest of Winograd's two forms and the implicit product, as cuDNN would choose.

Backward passes are as many convolutions of the same size as gradients are asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from memfit.capture import Op
from memfit.cost.products import Product, count_waves, product_ms
from memfit.hardware import ConvolutionFigures, TileModel, kernel_figures

_AMPERE = (8, 0)
_WINDOW = 3
_FEWEST_DIMS = 3
_WINOGRAD_4X4_PRODUCTS = 36
_WINOGRAD_2X2_PRODUCTS = 16
_WINOGRAD_2X2_CHANNELS = 32
_WINOGRAD_2X2_SQUARES = 32
_OVERLAP = 3.0
_TENSOR_CHANNELS = 8
"""Tensor cores take channels in groups of eight; others are padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution of images (or sequences) with square or other windows."""

    batch: int
    channels: int
    filters: int
    window: tuple[int, ...]
    size: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    groups: int
    item_bytes: int

    @classmethod
    def of(cls, op: Op, item_bytes: int) -> Convolution | None:
        """The forward convolution whose result or gradient an op computes; None where its shapes do not say."""
        backward = "backward" in op.name
        place = 1 if backward else 0
        if len(op.inputs) < place + 2:
            return None
        image, weight = op.inputs[place].shape, op.inputs[place + 1].shape
        out = op.inputs[0].shape if backward else (op.outputs[0].shape if op.outputs else ())
        if len(image) < _FEWEST_DIMS or len(weight) != len(image) or len(out) != len(image):
            return None
        stride, transposed, groups = _settings(op.arguments, backward, len(image) - 2)
        if transposed:
            image, out = out, image
        return cls(
            batch=image[0], channels=image[1], filters=out[1], window=weight[2:], size=image[2:], out=out[2:],
            stride=stride, groups=groups, item_bytes=item_bytes,
        )  # fmt: skip

    @property
    def winograd(self) -> bool:
        """Whether it has the windows and steps that Winograd's algorithms are for."""
        return self.groups == 1 and len(self.size) == 2 and set(self.window) == {_WINDOW} and set(self.stride) == {1}

    @property
    def moved_bytes(self) -> int:
        """Images read and written, and the weights."""
        inside = self.batch * self.channels * math.prod(self.size)
        result = self.batch * self.filters * math.prod(self.out)
        return self.item_bytes * (inside + result + self.weights)

    @property
    def weights(self) -> int:
        """Elements of the weight."""
        return self.channels // self.groups * self.filters * math.prod(self.window)


@lru_cache(maxsize=1 << 14)
def _settings(arguments: str, backward: bool, dims: int) -> tuple[tuple[int, ...], bool, int]:
    """Stride, whether it is transposed, and groups, as recorded."""
    args, _ = msgspec.json.decode(arguments)
    begin = 4 if backward else 3
    stride = tuple(args[begin]) if len(args) > begin and args[begin] else (1,)
    stride = stride * dims if len(stride) == 1 else stride
    transposed = bool(args[begin + 3]) if len(args) > begin + 3 else False
    groups = args[begin + 5] if len(args) > begin + 5 else 1
    return stride, transposed, groups if isinstance(groups, int) else 1


@lru_cache(maxsize=1 << 14)
def convolution_ms(
    given: Convolution, capability: tuple[int, int] | None, multiprocessors: int, flops_per_s: float,
    bytes_per_s: float, matrix_units: bool,
) -> float:  # fmt: skip
    """Milliseconds of one pass at these rates, the fastest way."""
    figures = kernel_figures()
    if matrix_units:
        return _implicit_ms(
            given, figures.tensor, figures.convolution.tensor, multiprocessors, flops_per_s, bytes_per_s
        )
    old = capability is not None and capability < _AMPERE
    parts = figures.convolution_before_ampere if old else figures.convolution
    model = figures.simt_batched_before_ampere if old else figures.simt_batched
    ways = [_implicit_ms(given, figures.simt, parts.implicit, multiprocessors, flops_per_s, bytes_per_s)]
    if given.winograd:
        ways.append(_winograd_4x4_ms(given, model, parts, multiprocessors, flops_per_s, bytes_per_s))
        ways.append(_winograd_2x2_ms(given, parts, multiprocessors, flops_per_s, bytes_per_s))
    return min(ways)


def _implicit_ms(
    given: Convolution, model: TileModel, part: float, multiprocessors: int, flops_per_s: float, bytes_per_s: float
) -> float:
    channels, filters = given.channels // given.groups, given.filters // given.groups
    if model is kernel_figures().tensor:
        channels = -(-channels // _TENSOR_CHANNELS) * _TENSOR_CHANNELS
    figures = kernel_figures().convolution
    product = Product(given.groups, given.batch * math.prod(given.out), filters, channels * math.prod(given.window))
    compute_ms = product_ms(product, model, multiprocessors, flops_per_s * part, bytes_per_s)
    return _joined(compute_ms, given.moved_bytes / (bytes_per_s * figures.bandwidth) * 1e3)


def _winograd_4x4_ms(
    given: Convolution, model: TileModel, parts: ConvolutionFigures, multiprocessors: int, flops_per_s: float,
    bytes_per_s: float,
) -> float:  # fmt: skip
    """Transforms to and from 6 x 6 squares through memory, and 36 products between them."""
    squares = given.batch * math.prod(-(-each // 4) for each in given.out)
    spread = squares * (given.channels + given.filters) + given.channels * given.filters
    spread_bytes = given.item_bytes * _WINOGRAD_4X4_PRODUCTS * spread
    product = Product(_WINOGRAD_4X4_PRODUCTS, squares, given.filters, given.channels)
    bandwidth = bytes_per_s * parts.transform_bandwidth
    compute_ms = product_ms(product, model, multiprocessors, flops_per_s * parts.winograd_4x4, bytes_per_s)
    inside_ms = _joined(compute_ms, spread_bytes / bandwidth * 1e3)
    return inside_ms + (given.moved_bytes + spread_bytes) / bandwidth * 1e3 + 3 * parts.overhead_ms


def _winograd_2x2_ms(
    given: Convolution, parts: ConvolutionFigures, multiprocessors: int, flops_per_s: float, bytes_per_s: float
) -> float:
    """One kernel; a block has 32 channels of 32 squares, from one image (8 x 16) or from four (8 x 4 each)."""
    height, width = given.out
    narrow = given.batch * -(-height // 8) * -(-width // 16)
    wide = -(-given.batch // 4) * -(-height // 8) * -(-width // 4)
    blocks = -(-given.filters // _WINOGRAD_2X2_CHANNELS) * min(narrow, wide)
    area = _WINOGRAD_2X2_PRODUCTS * _WINOGRAD_2X2_CHANNELS * _WINOGRAD_2X2_SQUARES
    waves = count_waves(blocks, multiprocessors, kernel_figures().simt_batched.tail)
    flops = 2 * area * (given.channels + parts.prologue)
    compute_ms = waves * flops * multiprocessors / (flops_per_s * parts.winograd_2x2) * 1e3
    return _joined(compute_ms, given.moved_bytes / (bytes_per_s * parts.bandwidth) * 1e3)


def _joined(compute_ms: float, memory_ms: float) -> float:
    return (compute_ms**_OVERLAP + memory_ms**_OVERLAP) ** (1 / _OVERLAP)
