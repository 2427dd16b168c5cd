"""How CUDA libraries cut work into blocks, read from data/kernels.toml: tiles, waves, passes over rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from memfit.errors import InputError
from memfit.hardware.schema import Figure, FigureTable, Reader, Source, convert, read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class TileModel:
    """The tiles and splits a library chooses from, and what a block costs beside its multiplications."""

    tiles: tuple[tuple[int, int], ...]
    splits: tuple[int, ...]
    operand: float
    prologue: float
    tail: float
    overlap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionFigures:
    """Parts of the float32 rate that each way to convolve reaches, and of the bandwidth."""

    winograd_4x4: float
    winograd_2x2: float
    implicit: float
    tensor: float
    prologue: float
    transform_bandwidth: float
    bandwidth: float
    overhead_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFigures:
    """Norms and softmax: what a multiprocessor moves, and when a row's second read misses the cache."""

    bytes_per_s_per_multiprocessor: float
    overlap: float
    layer_norm_step: float
    softmax_step: float
    start: float
    cached_from: float
    cached_to: float
    shared_from: float
    shared_to: float
    softmax_before_ampere: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFigures:
    """How much faster tensors are that the last level of cache still holds; sizes are parts of that cache."""

    gain: float
    begin: float
    end: float

    def speedup(self, n_bytes: float, cache_bytes: int | None) -> float:
        """The gain of an op that touches so many bytes."""
        if not cache_bytes:
            return 1.0
        part = (n_bytes / cache_bytes - self.begin) / (self.end - self.begin)
        return 1.0 + (self.gain - 1.0) * (1.0 - min(1.0, max(0.0, part)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFigures:
    """What short sequences, causal masks and other backends make of FlashAttention-2's rate."""

    length: float
    length_backward: float
    causal: float
    causal_backward: float
    efficient: float
    efficient_hopper: float
    cudnn: float
    cudnn_hopper: float
    cudnn_hopper_backward: float
    cudnn_blackwell: float
    flex: float
    flex_backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """All of the file."""

    tensor: TileModel
    simt: TileModel
    simt_batched: TileModel
    simt_batched_before_ampere: TileModel
    convolution: ConvolutionFigures
    convolution_before_ampere: ConvolutionFigures
    rows: RowFigures
    cache: CacheFigures
    attention: AttentionFigures
    steps_elementwise: float


class _Tiles(FigureTable, frozen=True):
    tiles: tuple[tuple[int, int], ...]
    splits: tuple[int, ...]
    operand: Figure
    prologue: Figure
    tail: Figure
    overlap: Figure


class _File(FigureTable, frozen=True):
    products: dict[str, _Tiles]
    convolution: dict[str, dict[str, Figure]]
    rows: dict[str, Figure]
    cache: dict[str, Figure]
    steps: dict[str, Figure]
    attention: dict[str, Figure]
    sources: dict[str, Source]


@cache
def kernel_figures() -> KernelFigures:
    """The shipped figures."""
    with resources.as_file(resources.files("memfit.hardware") / "data" / "kernels.toml") as path:
        return build_kernel_figures(read_toml(path), str(path))


def build_kernel_figures(raw: dict[str, Any], where: str) -> KernelFigures:
    """Figures from a decoded file; one without a source is refused, and so is a missing or an unknown one."""
    file = convert(raw, _File, where)
    reader = Reader(where, file.sources)

    def numbers(key: str, *tables: dict[str, Figure]) -> dict[str, float]:
        return {name: reader.number(f"{key}.{name}", figure) for table in tables for name, figure in table.items()}

    def tiles(name: str) -> TileModel:
        table = file.products[name]
        figures = {field: getattr(table, field) for field in ("operand", "prologue", "tail", "overlap")}
        return TileModel(tiles=table.tiles, splits=table.splits, **numbers(f"products.{name}", figures))

    try:
        common, cache_table = file.convolution["common"], dict(file.cache)
        cache_table = {{"from": "begin", "to": "end"}.get(name, name): each for name, each in cache_table.items()}
        return KernelFigures(
            tensor=tiles("tensor"),
            simt=tiles("simt"),
            simt_batched=tiles("simt_batched"),
            simt_batched_before_ampere=tiles("simt_batched_before_ampere"),
            convolution=ConvolutionFigures(**numbers("convolution.ampere", common, file.convolution["ampere"])),
            convolution_before_ampere=ConvolutionFigures(
                **numbers("convolution.before_ampere", common, file.convolution["before_ampere"])
            ),
            rows=RowFigures(**numbers("rows", file.rows)),
            cache=CacheFigures(**numbers("cache", cache_table)),
            attention=AttentionFigures(**numbers("attention", file.attention)),
            steps_elementwise=numbers("steps", file.steps)["elementwise"],
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{where}: {error}; memfit.hardware.kernels has the layout") from error
