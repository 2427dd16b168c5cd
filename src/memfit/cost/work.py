"""What an op asks of a device: a family, and the time its FLOPs and its bytes would need at the device's peaks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import msgspec
import torch

from memfit.capture import Op, TensorRef
from memfit.cost.families import Product, classify_op, executed_flops
from memfit.hardware import Device, Family

_PRODUCTS = (Family.MATRIX_LARGE, Family.MATRIX_SMALL, Family.MATRIX_UNALIGNED)
_SPLIT_DEPTH = 2048
"""cuBLAS splits a product with few results along its depth to fill the multiprocessors; about so much to a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Whether float32 products and convolutions may use TF32."""

    matmul_tf32: bool = False
    convolution_tf32: bool = True

    @classmethod
    def of_torch(cls) -> Precision:
        """As torch is set now."""
        matmul = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
        convolution = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", None)
        if matmul is None or convolution is None:  # before torch 2.9
            return cls(
                matmul_tf32=bool(torch.backends.cuda.matmul.allow_tf32),
                convolution_tf32=bool(torch.backends.cudnn.allow_tf32),
            )
        return cls(matmul_tf32=matmul == "tf32", convolution_tf32=convolution == "tf32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Milliseconds at the device's peaks; a family reaches a part of each."""

    family: Family
    compute_ms: float
    memory_ms: float


def estimate_work(op: Op, device: Device, precision: Precision) -> Work:
    """The work of one op that is not a view."""
    dtype = dtype_of(op)
    family = classify_op(op, multiprocessors=device.multiprocessors, item_bytes=item_bytes_of(dtype))
    rate = device.peak_flops_per_s(dtype, tf32=_uses_tf32(family, precision))
    if family in _PRODUCTS and device.multiprocessors is not None:
        product = Product.of(op)
        parts = max(1, product.tiles) * max(1, product.depth // _SPLIT_DEPTH)
        rate *= min(1.0, parts / device.multiprocessors)
    return Work(
        family=family,
        compute_ms=real_flops(op) / rate * 1e3,
        memory_ms=moved_bytes(op) / device.memory_bandwidth_bytes_per_s * 1e3,
    )


def real_flops(op: Op) -> int:
    """FLOPs on real numbers: a complex multiply and add are four of each."""
    flops = executed_flops(op)
    return 4 * flops if flops and dtype_of(op).startswith("complex") else flops


def peak_ms(op: Op, device: Device, precision: Precision) -> float:
    """The least time an op's FLOPs need on a device with nothing idle."""
    flops = real_flops(op)
    if not flops:
        return 0.0
    dtype = dtype_of(op)
    family = classify_op(op, multiprocessors=device.multiprocessors, item_bytes=item_bytes_of(dtype))
    return flops / device.peak_flops_per_s(dtype, tf32=_uses_tf32(family, precision)) * 1e3


def _uses_tf32(family: Family, precision: Precision) -> bool:
    return precision.convolution_tf32 if family is Family.CONVOLUTION else precision.matmul_tf32


def dtype_of(op: Op) -> str:
    """The number format in which an op computes."""
    for ref in op.inputs:
        if ref.dtype.startswith(("float", "bfloat", "complex")):
            return ref.dtype
    return op.outputs[0].dtype if op.outputs else "float32"


@cache
def item_bytes_of(dtype: str) -> int:
    """Bytes of one element."""
    return getattr(torch, dtype).itemsize


_TAKES = {"embedding", "index_select", "index", "_unsafe_index", "gather", "take", "nll_loss_forward", "masked_select"}
"""Of their first input, a table, these read as many bytes as they give."""
_PUTS = {"index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "index_fill_"}
"""To their first input these write as many bytes as they are given."""
_OVERWRITES = {"copy_", "zero_", "fill_", "bernoulli_", "normal_", "uniform_"}
"""These do not read what they write to."""


def moved_bytes(op: Op) -> int:
    """Bytes that an op reads and writes; of a table only the rows that it takes."""
    packet = op.name.split(".")[1]
    if packet in _TAKES:
        return 2 * op.written_bytes + sum(map(_touched_bytes, op.inputs[1:]))
    if packet in _PUTS:
        return 2 * sum(map(_touched_bytes, op.inputs[1:]))
    if packet == "nll_loss_backward":
        return op.written_bytes
    if packet == "_embedding_bag":
        rows = op.inputs[1].shape[0] if len(op.inputs) > 1 and op.inputs[1].shape else 0
        return rows * op.inputs[0].shape[-1] * item_bytes_of(op.inputs[0].dtype) + op.written_bytes
    if packet in _OVERWRITES and op.inputs:
        return max(op.written_bytes, op.read_bytes + op.written_bytes - _touched_bytes(op.inputs[0]))
    return op.read_bytes + op.written_bytes


def _touched_bytes(ref: TensorRef) -> int:
    n_bytes = item_bytes_of(ref.dtype)
    for size, stride in zip(ref.shape, ref.stride, strict=True):
        n_bytes *= size if stride else 1
    return n_bytes


def index_bound(op: Op, place: int) -> int:
    """The first number that is no valid index for an integer input, 1 where only 0 is known to be valid."""
    packet = op.name.split(".")[1]
    args, _ = msgspec.json.decode(op.arguments)
    first = op.inputs[0].shape if op.inputs else ()
    if packet == "embedding":
        return first[0] if place == 1 else 1
    if packet == "embedding_dense_backward":
        return op.outputs[0].shape[0] if place == 1 else 1
    if packet in ("nll_loss_forward", "nll_loss_backward"):
        classes = op.inputs[0].shape if packet == "nll_loss_forward" else op.inputs[1].shape
        return classes[1] if len(classes) > 1 else 1
    if packet in ("gather", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add_"):
        return first[args[1]] if first else 1
    if packet in ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"):
        for dim, entry in enumerate(args[1]):
            if entry == {"t": place}:
                return first[dim] if dim < len(first) else 1
    return 1
