"""The roofline: an op takes what its FLOPs or its bytes need at the rate that its family reaches, and a fixed time.

On a GPU the needs are those of the blocks a library cuts the work into: `products`, `convolutions`, `attention` and
`rows` have a module each; their constants are data (`hardware/data/kernels.toml`).

Multiply and add are two operations, in the ops and in the devices' rates alike.

Note [Host and device]: on a CPU the host and the kernels take turns, so their times add up. On a GPU the host only
queues kernels and runs ahead. Two clocks follow this: a kernel starts when it is queued and the one before it is
done. An op's time is how far it moves the end of the device's work; waiting for the host counts for the kernel that
waits. Times are whole multiples of 2**-20 ms, so that sums are exact and equal layers have equal times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np
import torch

from memfit.capture import Op, Phase, TensorRef, Trace
from memfit.cost.attention import attention_ms
from memfit.cost.chunked_loss import CHUNKED_LOSS, ChunkedLoss
from memfit.cost.convolutions import Convolution, convolution_ms
from memfit.cost.products import Product, product_ms, tile_model
from memfit.cost.rows import ROW_OPS, row_work
from memfit.cost.runtime import Times
from memfit.errors import InputError
from memfit.hardware import Device, Family, HostTimes, Target, kernel_figures
from memfit.torch_private.dispatch import OpOverload, schema_of

_TICKS_PER_MS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Run times by arithmetic, for the device of the trace or for another of its type; TF32 as torch is set."""

    device: Device | None = None
    precision: Float32Precision | None = None

    @classmethod
    def of(cls, target: str | Device | Target) -> Roofline:
        """The roofline of a target's device."""
        return cls(device=Target.parse(target).device)

    def op_ms(self, trace: Trace) -> Times:
        """Milliseconds of each op."""
        device = self.device or trace.hardware
        if device.type != trace.hardware.type:
            raise InputError(
                f"a step captured for {trace.device} runs other kernels than {device.name} would; "
                f"capture it with target={device.name!r}"
            )
        return with_host(trace, self.kernel_ms(trace.ops, device), device.efficiency.host, device.type != "cpu")

    def kernel_ms(self, ops: Sequence[Op], device: Device) -> Times:
        """Milliseconds of each op's kernels alone; none for views."""
        precision = self.precision or (Float32Precision.of_torch() if device.type == "cuda" else Float32Precision())
        known: dict[tuple[object, ...], float] = {}
        times = np.empty(len(ops))
        for index, op in enumerate(ops):
            key = (op.name, op.phase is Phase.OPTIMIZER, op.flops, op.read_bytes, op.written_bytes, op.arguments)
            key += tuple((ref.shape, ref.dtype) for ref in (*op.inputs[:1], *op.outputs))
            found = known.get(key)
            if found is None:
                found = known[key] = kernel_ms(op, device, precision, in_step=True)
            times[index] = found
        return times


def kernel_ms(op: Op, device: Device, precision: Float32Precision | None = None, *, in_step: bool = False) -> float:
    """The roofline of one op, by itself or in a step that is one of many: see `Sustained.long_run`."""
    if op.view or op.name == "aten._local_scalar_dense.default":
        return 0.0
    work = estimate_work(op, device, precision or Float32Precision())
    item_bytes = item_bytes_of(dtype_of(op))
    factors = device.efficiency.of(work.family, item_bytes)
    compute, bandwidth = factors.compute, factors.bandwidth
    if in_step:
        kept = device.sustained.kept_by(item_bytes)
        compute *= kept
        if device.type == "cpu":
            bandwidth *= kept  # caches are colder in a step, and so is the memory of results
        elif work.family in _BROADCAST:
            bandwidth *= kernel_figures().steps_elementwise
    return work.joined_ms(compute, bandwidth) + factors.overhead_ms


def with_host(trace: Trace, kernel_ms: Times, host: HostTimes, asynchronous: bool) -> Times:
    """Kernel times joined with the host's; see Note [Host and device]."""
    issue = np.rint(issue_ms(trace, host) * _TICKS_PER_MS)
    kernel = np.rint(kernel_ms * _TICKS_PER_MS)
    if not asynchronous:
        return (issue + kernel) / _TICKS_PER_MS
    times = np.zeros(len(kernel))
    queued = done = 0.0
    for index, (host_ticks, kernel_ticks) in enumerate(zip(issue.tolist(), kernel.tolist(), strict=True)):
        queued += host_ticks
        if kernel_ticks:
            wait = max(0.0, queued - done)
            times[index] = wait + kernel_ticks
            done += wait + kernel_ticks
    return times / _TICKS_PER_MS


def issue_ms(trace: Trace, host: HostTimes) -> Times:
    """What the host needs for each op; entering modules counts for the first op inside."""
    by_phase = {
        Phase.FORWARD: host.forward_ms,
        Phase.LOSS: host.forward_ms,
        Phase.BACKWARD: host.backward_ms,
        Phase.OPTIMIZER: host.optimizer_ms,
    }
    times = np.array([host.view_ms if op.view else by_phase[op.phase] for op in trace.ops])
    if host.convolution_ms:
        times[[_by_name(op.name) is Family.CONVOLUTION for op in trace.ops]] += host.convolution_ms
    for call in trace.calls:
        if call.begin < call.end:
            times[call.begin] += host.call_ms
    return times


# -- What an op asks of a device: a family, and the time its FLOPs and its bytes would need at the device's peaks -----


_MATRIX_UNITS = ("fp16", "bf16", "tf32", "fp8", "int8")
_BANDWIDTH_BOUND = {
    Family.NORM, Family.ELEMENTWISE, Family.TRANSCENDENTAL, Family.COPY, Family.REDUCTION, Family.OPTIMIZER,
    Family.RANDOM,
}  # fmt: skip
"""Families whose tensors the cache may still hold."""
_CONVERTED = {Family.NORM, Family.ELEMENTWISE, Family.TRANSCENDENTAL, Family.REDUCTION, Family.RANDOM}
"""Families that compute 16-bit numbers in float32 on a CPU: an element takes as long as one of float32, or longer."""
_BROADCAST = {Family.ELEMENTWISE, Family.TRANSCENDENTAL}
"""Families that steps run on other layouts than published kernel times are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Precision:
    """Whether float32 products and convolutions may use TF32."""

    matmul_tf32: bool = False
    convolution_tf32: bool = True

    @classmethod
    def of_torch(cls) -> Float32Precision:
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
    """Milliseconds at the device's peaks; a family reaches a part of each.

    The longer of the two counts, or, with a finite `overlap`, the root of the sum of these powers: both limits slow a
    kernel that is near both. `fixed_ms` is beside them whatever a family reaches.
    """

    family: Family
    compute_ms: float
    memory_ms: float
    overlap: float = math.inf
    fixed_ms: float = 0.0

    def joined_ms(self, compute: float, bandwidth: float) -> float:
        """The time with these parts of the peaks."""
        compute_ms, memory_ms = self.compute_ms / compute, self.memory_ms / bandwidth
        longer = max(compute_ms, memory_ms)
        if self.overlap == math.inf or not longer:
            return longer + self.fixed_ms
        shorter = min(compute_ms, memory_ms) / longer
        return longer * (1.0 + shorter**self.overlap) ** (1.0 / self.overlap) + self.fixed_ms


def estimate_work(op: Op, device: Device, precision: Float32Precision) -> Work:
    """The work of one op that is not a view."""
    dtype = dtype_of(op)
    item_bytes = item_bytes_of(dtype)
    tf32 = _uses_tf32(op, precision)
    family = classify_op(op, multiprocessors=device.multiprocessors, item_bytes=item_bytes, tf32=tf32)
    rate = device.peak_flops_per_s(dtype, tf32=tf32)
    matrix_units = device.multiprocessors is not None and device.rate_name(dtype, tf32=tf32) in _MATRIX_UNITS
    rate *= device.sustained.matrix if matrix_units else device.sustained.vector
    bandwidth = device.memory_bandwidth_bytes_per_s * device.sustained.bandwidth
    flops, moved = real_flops(op), moved_bytes(op)
    if device.multiprocessors is None:
        if family in _CONVERTED:
            moved *= max(1, 4 // item_bytes)
        return Work(family=family, compute_ms=flops / rate * 1e3, memory_ms=moved / bandwidth * 1e3)
    packet = op.name.split(".")[1]
    if packet in _MATRIX and flops:
        model = tile_model(device, matrix_units=matrix_units, batched=len(op.outputs[0].shape) > 2)
        times = flops // max(1, op.flops)  # four for complex numbers
        compute_ms = times * product_ms(Product.of(op), model, device.multiprocessors, rate, bandwidth)
        return Work(family=family, compute_ms=compute_ms, memory_ms=moved / bandwidth * 1e3, overlap=model.overlap)
    if packet.startswith(CHUNKED_LOSS) and flops:
        loss, model = ChunkedLoss.of(op), tile_model(device, matrix_units=matrix_units, batched=False)
        once_ms = product_ms(loss.product, model, device.multiprocessors, rate, bandwidth)
        speedup = kernel_figures().cache.speedup(loss.chunk_bytes, device.l2_cache_bytes)
        return Work(
            family=family,
            compute_ms=loss.chunks * loss.products * once_ms,
            memory_ms=loss.chunks * loss.passes * loss.chunk_bytes / (bandwidth * speedup) * 1e3,
            overlap=1.0,  # one after the other
            fixed_ms=loss.chunks * loss.kernels * device.efficiency[Family.ELEMENTWISE].overhead_ms,
        )
    if family is Family.CONVOLUTION:
        given = Convolution.of(op, item_bytes)
        if given is not None and flops:
            forward_flops = 2 * given.batch * math.prod(given.out) * given.weights
            once_ms = convolution_ms(
                given, device.compute_capability, device.multiprocessors, rate, bandwidth, matrix_units
            )
            return Work(family=family, compute_ms=once_ms * max(1.0, flops / forward_flops), memory_ms=0.0)
    if family in (Family.ATTENTION, Family.ATTENTION_BACKWARD):
        compute_ms = attention_ms(op, flops, device, rate, causal=is_causal(op))
        return Work(family=family, compute_ms=compute_ms, memory_ms=moved / bandwidth * 1e3)
    handled_ms, speedup = 0.0, 1.0
    if packet in ROW_OPS and op.inputs:
        rows, figures = row_work(op, packet, moved, item_bytes_of(op.inputs[0].dtype), device), kernel_figures().rows
        limit = device.multiprocessors * figures.bytes_per_s_per_multiprocessor * rows.speed
        handled_ms, moved = rows.handled_bytes / limit * 1e3, rows.memory_bytes
    if family in _BANDWIDTH_BOUND:
        speedup = kernel_figures().cache.speedup(moved, device.l2_cache_bytes)
    memory_ms = moved / (bandwidth * speedup) * 1e3
    if handled_ms:
        return Work(family=family, compute_ms=handled_ms, memory_ms=memory_ms, overlap=kernel_figures().rows.overlap)
    return Work(family=family, compute_ms=flops / rate * 1e3, memory_ms=memory_ms)


def real_flops(op: Op) -> int:
    """FLOPs on real numbers: a complex multiply and add are four of each."""
    flops = executed_flops(op)
    return 4 * flops if flops and dtype_of(op).startswith("complex") else flops


def peak_ms(op: Op, device: Device, precision: Float32Precision) -> float:
    """The least time an op's FLOPs need on a device with nothing idle."""
    flops = real_flops(op)
    if not flops:
        return 0.0
    return flops / device.peak_flops_per_s(dtype_of(op), tf32=_uses_tf32(op, precision)) * 1e3


def _uses_tf32(op: Op, precision: Float32Precision) -> bool:
    if op.name.split(".")[1] not in _MATRIX and _by_name(op.name) is Family.CONVOLUTION:
        return precision.convolution_tf32
    return precision.matmul_tf32


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


def index_ends(op: Op, place: int) -> tuple[int, int] | None:
    """The first and the last number of an input that says where groups of rows end, None for any other input."""
    packet, shapes = op.name.split(".")[1], [ref.shape for ref in op.inputs]
    if packet == "_grouped_mm" and place == 2:
        first, second = shapes[:2]
        rows = first[0] if len(second) == 3 else first[-1] if len(first) == 2 else second[1]
        return rows // shapes[2][0], rows
    if packet == "_varlen_attn" and place in (3, 4):
        return 0, shapes[min(place - 3, 1)][0]
    return None


# -- Which family of kernels an op belongs to, and the size of a matrix product ---------------------------------------


_NAMES: dict[Family, str] = {
    Family.NORM: (
        "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm"
        " native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm _fused_rms_norm"
        " _fused_rms_norm_backward _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data"
        " _weight_norm_interface _weight_norm_interface_backward nll_loss_forward nll_loss_backward"
        " batch_norm_with_update batch_norm_backward"
    ),
    Family.RECURRENT: (
        "_cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward _thnn_fused_lstm_cell"
        " _thnn_fused_gru_cell lstm gru"
    ),
    Family.EMBEDDING: "embedding embedding_dense_backward _embedding_bag index_select",
    Family.INDEXING: (
        "index index_put index_put_ _index_put_impl_ _unsafe_index gather scatter scatter_ scatter_add scatter_add_"
        " index_add index_add_ sort topk masked_select nonzero cumsum histc bincount tril triu roll unique"
        " max_pool2d_with_indices max_pool2d_with_indices_backward upsample_nearest2d upsample_nearest2d_backward"
        " avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward im2col col2im"
    ),
    Family.COPY: (
        "clone copy_ _to_copy cat stack constant_pad_nd repeat select_backward slice_backward contiguous zeros"
        " zeros_like ones ones_like full full_like new_zeros new_ones new_full fill_ zero_ empty empty_like arange"
        " scalar_tensor slice_scatter select_scatter as_strided_scatter _reshape_copy split_with_sizes_copy unfold_copy"
    ),
    Family.RANDOM: (
        "bernoulli_ bernoulli native_dropout rand randn rand_like randn_like randint normal_ uniform_ multinomial"
        " exponential_ randperm"
    ),
    Family.TRANSCENDENTAL: (
        "exp exp_ log log_ log1p tanh tanh_ sigmoid sigmoid_ silu silu_ silu_backward gelu gelu_backward erf softplus"
        " softplus_backward sin cos tan pow pow_ mish mish_backward elu elu_backward logsigmoid expm1 sinh cosh atan"
        " log_sigmoid_forward log_sigmoid_backward logaddexp _safe_softmax"
    ),
}
_FAMILY_OF = {name: family for family, names in _NAMES.items() for name in names.split()}
_MATRIX = {
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "baddbmm",
    "baddbmm_",
    "_grouped_mm",
    "_scaled_mm",
    "addbmm",
    "mv",
    "addmv",
    "_int_mm",
}
_SMALL_CPU_FLOPS = 1 << 21
"""Below two million operations a CPU product is mostly packing and the call itself."""
_VECTOR_BYTES = 4
"""Elements of this size and above have no matrix units, but for TF32."""
_FULL_TILE = 128


def classify_op(op: Op, *, multiprocessors: int | None, item_bytes: int, tf32: bool = False) -> Family:
    """The family whose efficiency an op has on a device; without multiprocessors, on a CPU."""
    packet = op.name.split(".")[1]
    if packet in _MATRIX:
        product = Product.of(op)
        if multiprocessors is None:
            return Family.MATRIX_SMALL if op.flops < _SMALL_CPU_FLOPS * product.batch else Family.MATRIX_LARGE
        if item_bytes >= _VECTOR_BYTES and not tf32:
            return Family.MATRIX_SIMT
        if item_bytes < _VECTOR_BYTES and not product.aligned(item_bytes):
            return Family.MATRIX_UNALIGNED
        tiles = product.batch * -(-product.rows // _FULL_TILE) * -(-product.columns // _FULL_TILE)
        return Family.MATRIX_SMALL if tiles < multiprocessors else Family.MATRIX_LARGE
    family = _by_name(op.name)
    if op.phase is Phase.OPTIMIZER and family in (Family.ELEMENTWISE, Family.TRANSCENDENTAL, Family.OTHER):
        return Family.OPTIMIZER
    return family


@cache
def _by_name(name: str) -> Family:
    packet = name.split(".")[1]
    if packet in _FAMILY_OF:
        return _FAMILY_OF[packet]
    if packet.startswith(CHUNKED_LOSS):
        return Family.MATRIX_LARGE
    if "attention" in packet or "_attn" in packet:  # `_varlen_attn` of torch.nn.attention.varlen
        return Family.ATTENTION_BACKWARD if packet.endswith("backward") else Family.ATTENTION
    if "convolution" in packet or "conv2d" in packet or "conv1d" in packet or "conv3d" in packet:
        return Family.CONVOLUTION
    if packet.startswith(("_foreach_", "_fused_ad", "_fused_sgd")):
        return Family.OPTIMIZER
    tags = tags_of(name)
    if torch.Tag.nondeterministic_seeded in tags:
        return Family.RANDOM
    if torch.Tag.reduction in tags:
        return Family.REDUCTION
    return Family.ELEMENTWISE if torch.Tag.pointwise in tags else Family.OTHER


def tags_of(name: str) -> tuple[torch.Tag, ...]:
    """The tags torch gives to an op; none where the op is not known here."""
    overload = _overload(name)
    return tuple(overload.tags) if overload is not None else ()


def executed_flops(op: Op) -> int:
    """The FLOPs that a kernel really does: of causal attention, half of what is counted for all positions."""
    return op.flops // 2 if op.flops and is_causal(op) else op.flops


def is_causal(op: Op) -> bool:
    """Whether an attention op leaves out the upper half of its scores."""
    place = _place_of_causal(op.name)
    if place is None or ('"is_causal"' not in op.arguments and "true" not in op.arguments):
        return False
    args, kwargs = msgspec.json.decode(op.arguments)
    return bool(kwargs.get("is_causal", args[place] if place < len(args) else False))


@cache
def _place_of_causal(name: str) -> int | None:
    overload = _overload(name)
    names = [argument.name for argument in schema_of(overload).arguments] if overload is not None else []
    return names.index("is_causal") if "is_causal" in names else None


@cache
def _overload(name: str) -> OpOverload | None:
    namespace, packet, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):
        return None
