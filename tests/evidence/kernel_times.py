"""Published kernel times as ops of a trace, in groups, and which of them constants were fitted to.

The rows are `kernels.csv.gz` of the evidence: all of them where `MEMFIT_EVIDENCE` names their folder, else the slice
beside this file. A part of the shapes is left out of every fit: whole blocks of them (a weight with all its numbers
of rows, a range of channels), so that a left-out row has no neighbour that was fitted to.

Note [Order of dimensions]: the evidence says rows x inner x columns for all products. Those of `neusight` are rows x
columns x inner: its own files (scripts/asplos/data/dataset/test/bmm.csv, linear.csv) have the grid of every kernel, and
122.05 ms on an L4 is 1,024 products of 2,048 x 64 by 64 x 2,048 there.

Note [Convolutions' host time]: `neusight` times single calls between events, with the host inside. Its convolutions
were timed in one process, and what the host took grew with every shape: the time beyond that of the kernel (Winograd,
known from kernel name and grid) goes with the place in the file (correlation 0.91 on A100, 0.90 on V100), from 0.05 ms
to 0.3 ms, on both GPUs alike. `convolution_order.txt.gz` has these places in the order of the evidence's rows.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from memfit.capture import Op, Phase, TensorRef
from memfit.cost.roofline import Float32Precision, kernel_ms
from memfit.hardware import Device, load_device

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "evidence"
SLICE = HERE / "kernels_slice.csv"
ORDER = HERE / "convolution_order.txt.gz"
EVENTS_LEAST_MS = 0.05
"""Events below this include the host's time, as the evidence says of `neusight`."""
CONVOLUTION_HOST_MS, CONVOLUTION_HOST_GROWTH_MS = 0.045, 0.27 / 4958
"""Of the first call, and of each shape that was timed before; see Note [Convolutions' host time]."""
_FIT_PARTS, _PARTS = 3, 5
_ITEM = {"float16": 2, "float32": 4}
_ATEN = {
    "mm": "mm.default", "addmm": "addmm.default", "bmm": "bmm.default", "add": "add.Tensor", "addu": "add.Scalar",
    "mul": "mul.Tensor", "mulu": "mul.Scalar", "div": "div.Tensor", "divu": "div.Scalar", "pow": "pow.Tensor_Tensor",
    "powu": "pow.Tensor_Scalar", "relu": "relu.default", "gelu": "gelu.default", "tanh": "tanh.default",
    "layer_norm": "native_layer_norm.default", "softmax": "_softmax.default", "embedding": "embedding.default",
    "conv2d": "convolution.default",
}  # fmt: skip
_KINDS = {"mm": "products", "addmm": "products", "bmm": "batched products", "conv2d": "convolutions"}
_KINDS |= {name: name.replace("_", " ") for name in ("layer_norm", "softmax", "embedding")}
_PRECISION = Float32Precision(matmul_tf32=False, convolution_tf32=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One published time."""

    source: str
    gpu: str
    dtype: str
    op: str
    dims: tuple[int, ...]
    ms: float
    order: int | None = None

    @property
    def group(self) -> tuple[str, str]:
        """The kind of kernel and dtype, and the family of GPUs."""
        kind = _KINDS.get(self.op, "elementwise")
        return f"{kind}, {self.dtype}", self.gpu.split("-")[0].upper()

    @property
    def block(self) -> str:
        """What is fitted to, or left out, as a whole."""
        if self.op in ("mm", "addmm", "bmm"):
            shape = self.dims[1:]
        elif self.op == "conv2d":
            shape = tuple(int(math.log2(each)) for each in self.dims[1:3])
        elif self.op == "embedding" or self.source == "vidur":
            shape = (*self.dims[:-1], int(math.log2(self.dims[-1])))
            if self.op == "add":
                shape = (int(math.log2(self.dims[0])), *self.dims[1:])
        else:
            shape = self.dims[1:]
        return f"{_KINDS.get(self.op, 'elementwise')} {shape}"

    @property
    def fitted(self) -> bool:
        """Whether constants were fitted to it; the rest is left out, to judge by."""
        return zlib.crc32(self.block.encode()) % _PARTS < _FIT_PARTS

    def predicted_ms(self) -> float:
        """What memfit says of the same kernel, with the host's part where the measurement has it."""
        host_ms = 0.0 if self.order is None else CONVOLUTION_HOST_MS + CONVOLUTION_HOST_GROWTH_MS * self.order
        return kernel_ms(self.as_op(), load(self.gpu), _PRECISION) + host_ms

    def as_op(self) -> Op:
        """The op that was timed."""
        if self.op in ("mm", "addmm"):
            rows, inner, columns = self.dims
            if self.source == "neusight":  # see Note [Order of dimensions]
                inner, columns = columns, inner
            bias = [(columns,)] if self.op == "addmm" else []
            return self._op([*bias, (rows, inner), (inner, columns)], (rows, columns), flops=2 * math.prod(self.dims))
        if self.op == "bmm":
            batch, rows, columns, inner = self.dims  # see Note [Order of dimensions]
            inputs = [(batch, rows, inner), (batch, inner, columns)]
            return self._op(inputs, (batch, rows, columns), flops=2 * math.prod(self.dims))
        if self.op == "conv2d":
            batch, channels, filters, kernel, size, stride, padding = self.dims
            out = (size + 2 * padding - kernel) // stride + 1
            inputs = [(batch, channels, size, size), (filters, channels, kernel, kernel), (filters,)]
            arguments = [[{"t": 0}, {"t": 1}, {"t": 2}, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1], {}]
            flops = 2 * batch * filters * out * out * channels * kernel * kernel
            return self._op(inputs, (batch, filters, out, out), flops=flops, arguments=json.dumps(arguments))
        if self.op == "embedding":
            vocabulary, width, tokens = self.dims
            return self._op([(vocabulary, width), (tokens,)], (tokens, width), index=1)
        columns = self.dims[-1]
        more = {"layer_norm": [(columns,), (columns,)]}.get(self.op, [])
        if self.op in ("add", "mul", "div", "pow"):
            more = [self.dims]
        return self._op([self.dims, *more], self.dims)

    def _op(
        self, inputs: Sequence[tuple[int, ...]], out: tuple[int, ...], *, flops: int = 0, index: int | None = None,
        arguments: str = "[[],{}]",
    ) -> Op:  # fmt: skip
        refs = tuple(_ref(shape, "int64" if place == index else self.dtype) for place, shape in enumerate(inputs))
        n_bytes = [math.prod(ref.shape) * (8 if ref.dtype == "int64" else _ITEM[self.dtype]) for ref in refs]
        return Op(
            name=f"aten.{_ATEN[self.op]}", phase=Phase.FORWARD, call=-1, inputs=refs, outputs=(_ref(out, self.dtype),),
            arguments=arguments, flops=flops, read_bytes=sum(n_bytes), written_bytes=math.prod(out) * _ITEM[self.dtype],
            workspace_bytes=0, view=False, random=False, saved=False, mutates=(), mutated_op=-1, forward_op=-1,
            source=0,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far predictions of a group are off: predicted over measured, and the errors' median and 90th percentile."""

    count: int
    ratio: float
    median: float
    ninetieth: float

    @classmethod
    def of(cls, rows: Sequence[KernelTime]) -> Errors | None:
        """Of the rows of a group; None where there are none."""
        if not rows:
            return None
        ratios = np.array([row.predicted_ms() / row.ms for row in rows])
        errors = np.abs(ratios - 1)
        return cls(
            count=len(rows),
            ratio=float(np.median(ratios)),
            median=float(np.median(errors)),
            ninetieth=float(np.percentile(errors, 90)),
        )


@cache
def load(gpu: str) -> Device:
    """The device of a row."""
    return load_device(gpu)


def evidence_folder() -> Path | None:
    """Where the whole evidence is, if it is here."""
    given = os.environ.get("MEMFIT_EVIDENCE")
    folder = Path(given) if given else SHARED
    return folder if folder.is_dir() else None


def read_rows(path: Path | None = None) -> list[KernelTime]:
    """Every row that is a kernel's own time."""
    folder = evidence_folder()
    path = path or (folder / "kernels.csv.gz" if folder else SLICE)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = list(_parsed(csv.DictReader(file)))
    return [row for row in rows if row.source == "vidur" or row.ms >= EVENTS_LEAST_MS]


def by_group(rows: Sequence[KernelTime]) -> dict[tuple[str, str], list[KernelTime]]:
    """The rows of each group, in the order of their names."""
    groups: dict[tuple[str, str], list[KernelTime]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    return dict(sorted(groups.items()))


def _parsed(rows: csv.DictReader[str]) -> Iterator[KernelTime]:
    orders = map(int, gzip.decompress(ORDER.read_bytes()).split())
    for row in rows:
        order = row.get("order")
        if order is None and row["op"] == "conv2d":
            order = next(orders)
        yield KernelTime(
            source=row["source"],
            gpu=row["gpu"],
            dtype=row["dtype"],
            op=row["op"],
            dims=tuple(map(int, row["dims"].split("x"))),
            ms=float(row["ms"]),
            order=int(order) if order not in (None, "") else None,
        )


def _ref(shape: tuple[int, ...], dtype: str) -> TensorRef:
    stride = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return TensorRef(storage=0, shape=shape, stride=stride, offset=0, dtype=dtype)
