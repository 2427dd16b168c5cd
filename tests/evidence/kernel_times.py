"""Published kernel times as ops of a trace, in groups, and which of them constants were fitted to.

The rows are `kernels.csv.gz` of the evidence: all of them where `MEMFIT_EVIDENCE` names their folder, else the slice
beside this file. A part of the shapes is left out of every fit: whole blocks of them (a weight with all its numbers
of rows, a range of channels), so that a left-out row has no neighbour that was fitted to.
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
from memfit.cost.roofline import Precision, kernel_ms
from memfit.hardware import Device, load_device

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "evidence"
SLICE = HERE / "kernels_slice.csv"
EVENTS_LEAST_MS = 0.05
"""Events below this include the host's time, as the evidence says of `neusight`."""
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
_PRECISION = Precision(matmul_tf32=False, convolution_tf32=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One published time."""

    source: str
    gpu: str
    dtype: str
    op: str
    dims: tuple[int, ...]
    ms: float

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
        """What memfit says of the same kernel."""
        return kernel_ms(self.as_op(), load(self.gpu), _PRECISION)

    def as_op(self) -> Op:
        """The op that was timed."""
        if self.op in ("mm", "addmm"):
            rows, inner, columns = self.dims
            bias = [(columns,)] if self.op == "addmm" else []
            return self._op([*bias, (rows, inner), (inner, columns)], (rows, columns), flops=2 * math.prod(self.dims))
        if self.op == "bmm":
            batch, rows, inner, columns = self.dims
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
            workspace_bytes=0, view=False, random=False, saved=False, mutates=(), mutated_op=-1, forward_op=-1, source=0,
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
        return [row for row in _parsed(csv.DictReader(file)) if row.source == "vidur" or row.ms >= EVENTS_LEAST_MS]


def by_group(rows: Sequence[KernelTime]) -> dict[tuple[str, str], list[KernelTime]]:
    """The rows of each group, in the order of their names."""
    groups: dict[tuple[str, str], list[KernelTime]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    return dict(sorted(groups.items()))


def _parsed(rows: csv.DictReader[str]) -> Iterator[KernelTime]:
    for row in rows:
        dims = tuple(map(int, row.pop("dims").split("x")))
        yield KernelTime(
            source=row["source"], gpu=row["gpu"], dtype=row["dtype"], op=row["op"], dims=dims, ms=float(row["ms"])
        )


def _ref(shape: tuple[int, ...], dtype: str) -> TensorRef:
    stride = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return TensorRef(storage=0, shape=shape, stride=stride, offset=0, dtype=dtype)
