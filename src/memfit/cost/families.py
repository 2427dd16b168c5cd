"""Which family of kernels an op belongs to, and the size of a matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import msgspec
import torch

from memfit.capture import Op, Phase
from memfit.hardware import Family
from memfit.torch_private.dispatch import OpOverload, schema_of

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
_MATRIX = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "addbmm", "mv", "addmv", "_int_mm"}
_SMALL_CPU_FLOPS = 1 << 21
"""Below two million operations a CPU product is mostly packing and the call itself."""
_TILE = 128
_ALIGNMENT_BYTES = 16


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

    @property
    def tiles(self) -> int:
        """How many blocks of cuBLAS's usual tile cover the results."""
        return self.batch * -(-self.rows // _TILE) * -(-self.columns // _TILE)

    def aligned(self, item_bytes: int) -> bool:
        """Whether rows and depth are whole multiples of what tensor cores load at once."""
        step = max(1, _ALIGNMENT_BYTES // item_bytes)
        return self.depth % step == 0 and self.columns % step == 0


def classify_op(op: Op, *, multiprocessors: int | None, item_bytes: int) -> Family:
    """The family whose efficiency an op has on a device; without multiprocessors, on a CPU."""
    packet = op.name.split(".")[1]
    if packet in _MATRIX:
        product = Product.of(op)
        if multiprocessors is None:
            return Family.MATRIX_SMALL if op.flops < _SMALL_CPU_FLOPS * product.batch else Family.MATRIX_LARGE
        if item_bytes < 4 and not product.aligned(item_bytes):
            return Family.MATRIX_UNALIGNED
        return Family.MATRIX_SMALL if product.tiles < multiprocessors else Family.MATRIX_LARGE
    family = _by_name(op.name)
    if op.phase is Phase.OPTIMIZER and family in (Family.ELEMENTWISE, Family.TRANSCENDENTAL, Family.OTHER):
        return Family.OPTIMIZER
    return family


@cache
def _by_name(name: str) -> Family:
    packet = name.split(".")[1]
    if packet in _FAMILY_OF:
        return _FAMILY_OF[packet]
    if "attention" in packet:
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
