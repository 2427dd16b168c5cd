"""What a plan document is made of. These types are its only definition; the JSON Schema is generated from them."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta

from memfit.capture import Category, ChunkedLoss
from memfit.solve import Decided
from memfit.tradeoff import LOSS
from memfit.units import display_bytes

SCHEMA = 1

Status = Literal["optimal", "feasible", "infeasible"]
Engine = Literal["local", "fsdp2", "sharded"]
"""What runs a plan: one device, PyTorch's `fully_shard`, or memfit's own sharded runtime."""
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Count = Annotated[int, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]
Ms = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    pass


class UnitOp(_Row, frozen=True):
    """An op of a unit's forward: its offset from the unit's first op, its name, and the bytes that its results take."""

    offset: Count
    name: str
    bytes: Bytes


class Checkpoint(_Part, frozen=True):
    """A unit that is checkpointed, and its policy.

    `call` says which call of the module it is, of `calls` in the step's forward. Its forward is ops `begin` up to (not
    including) `end` of the step. Ops up to offset `stop` run again, but those that are saved. `dropped` are what is
    not held for backward, each as the op that makes it and its place among the new storages of that op. The
    region of the loss begins after call `after_call` of the module `after`; after the whole model when that is None.
    After `stop` only ops whose results are held, and those that write to these in place, are in `saved_ops`; `numbers`
    says of each how many ops of its name come before it in the unit.

    Results of the ops in `offload` leave for the host: begun at the end of the unit's forward, freed at the end of the
    forward of the next unit, brought back when that one's backward begins. `offload_next` is the path of the module
    whose next call is that unit, None for a unit that has none after it; without it, it is the next in the plan. A unit
    of which nothing is dropped only offloads, and has -1 as its `stop`. They take `offloaded_bytes`, and `exposed_ms`
    of their copies are not hidden by compute.
    """

    unit: str
    module: str
    call: Count
    calls: Annotated[int, Meta(ge=1)]
    kind: str
    begin: Count
    end: Count
    stop: Annotated[int, Meta(ge=-1)]
    discard_ratio: Ratio
    discarded_bytes: Bytes
    cached_bytes: Bytes
    recompute_ms: Ms
    recompute_peak_bytes: Bytes
    saved_ops: tuple[UnitOp, ...]
    recomputed_ops: tuple[UnitOp, ...]
    dropped: tuple[tuple[Count, Count], ...]
    after: str | None = None
    after_call: Count = 0
    offload: tuple[UnitOp, ...] | msgspec.UnsetType = msgspec.UNSET
    offload_next: str | msgspec.UnsetType | None = msgspec.UNSET
    offloaded_bytes: Bytes | msgspec.UnsetType = msgspec.UNSET
    exposed_ms: Ms | msgspec.UnsetType = msgspec.UNSET
    numbers: tuple[Count, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_loss(self) -> bool:
        """Whether this is the region of the loss, which is no module."""
        return self.unit.partition("#")[0] == LOSS


class OffloadLinkRecord(_Part, frozen=True):
    """The link over which a plan assumes that units offload, and its bytes a second each way.

    `compute_s_per_byte` is how much longer ops are taken to be beside copies, for a byte that goes there and back.
    """

    name: str
    to_host_bytes_per_s: Annotated[float, Meta(gt=0)]
    to_device_bytes_per_s: Annotated[float, Meta(gt=0)]
    compute_s_per_byte: Annotated[float, Meta(ge=0)] = 0.0


class ChunkedLossRecord(_Part, frozen=True):
    """Cross entropies over so many `classes` are computed in `chunks` of rows: equal up to the order of their sums.

    `inside` says that the model computes them in its forward; others go through `Plan.loss`. With `casts` each chunk
    casts its own logits to float32, and the loss's own cast is left out.
    """

    classes: Annotated[int, Meta(ge=1)]
    chunks: Annotated[int, Meta(ge=2)]
    inside: bool
    casts: bool

    @property
    def setting(self) -> ChunkedLoss:
        """What the capture and the engines take."""
        return ChunkedLoss(classes=self.classes, chunks=self.chunks, inside=self.inside, casts=self.casts)


class Decision(_Part, frozen=True):
    """A kind of decision that the plan took: what it saves of the peak, and what it adds to the step.

    Units that are checkpointed or offload save what they drop or move; for other kinds it is the difference to the same
    step without this decision, nothing checkpointed: either may be negative. `ms_per_gib` is its price, where it has
    one. `without_ms` is the step time of the best plan without this decision and with all others, None where none
    fits.
    """

    kind: Literal["checkpoint"] | Decided
    setting: str
    saves_bytes: int
    costs_ms: float
    ms_per_gib: Ms | msgspec.UnsetType = msgspec.UNSET
    without_ms: Ms | msgspec.UnsetType | None = msgspec.UNSET


class MicroBatchRecord(_Part, frozen=True):
    """A batch that the training loop divides: `rows` of it at a time, `accumulation_steps` times in a step."""

    rows: Annotated[int, Meta(ge=1)]
    accumulation_steps: Annotated[int, Meta(ge=2)]


class RecomputedCollective(_Row, frozen=True):
    """A collective that runs again with a unit: the op's offset, what it does, along which dimensions of the mesh."""

    unit: str
    offset: Count
    kind: str
    dims: tuple[str, ...]


class PeakAt(_Part, frozen=True):
    """The op at the highest point of a step; where that is a view, the next op that does something.

    `module` is None outside any module. `second_run_of` is the unit that runs again when that is the highest point;
    the op is then one of its forward.
    """

    op: int
    name: str
    phase: str
    module: str | None
    second_run_of: str | None = None


class Estimate(_Part, frozen=True, kw_only=True):
    """Memory and time of a step. `peak_by_category` adds up to `peak_bytes`, or is empty.

    Where cuDNN chooses the workspaces of convolutions, `peak_reserved_bytes` is the middle of a range, from
    `peak_reserved_low_bytes` to `peak_reserved_high_bytes`; these are None elsewhere.
    """

    peak_bytes: Bytes
    peak_reserved_bytes: Bytes
    step_ms: Ms
    peak_by_category: dict[Category, Bytes]
    peak_at: PeakAt
    peak_reserved_low_bytes: Bytes | None = None
    peak_reserved_high_bytes: Bytes | None = None

    @property
    def reserved(self) -> str:
        """What the allocator reserves, in words: one figure, or a range."""
        if self.peak_reserved_low_bytes is None or self.peak_reserved_high_bytes is None:
            return display_bytes(self.peak_reserved_bytes)
        return f"{display_bytes(self.peak_reserved_low_bytes)} to {display_bytes(self.peak_reserved_high_bytes)}"


class Prediction(Estimate, frozen=True, kw_only=True):
    """Memory and time of a step under a plan, and the part of its time that the plan adds.

    `room` says whether the caching allocator has room: enough; only without the margin; tight, when it must empty its
    cache in every step; or too little, when it runs out. It is None in plans of earlier versions.
    `exposed_offload_ms` is how long compute waits for what units offload; plans that offload nothing have none.
    """

    recompute_ms: Ms
    exposed_communication_ms: Ms
    exposed_offload_ms: Ms | msgspec.UnsetType = msgspec.UNSET
    room: Literal["enough", "margin", "tight", "too little"] | None = None


class Blocker(_Part, frozen=True):
    """Why nothing fits: the highest point of the plan with the lowest peak, and what fills it.

    `peak_by_category` adds up to `peak_bytes`, or is empty.
    """

    peak_bytes: Bytes
    peak_by_category: dict[Category, Bytes]
    peak_at: PeakAt


class ShardedUnit(_Part, frozen=True):
    """A module whose parameters are gathered together; the model itself has the empty path."""

    module: str
    reshard_after_forward: bool | int


class ShardPlan(_Part, frozen=True):
    """How parameters are sharded. `prefetch` units are gathered ahead; a dtype of None is the parameter's own.

    Each of `replicas` groups of `ranks` ranks holds all shards. `reshard_after_forward` of a unit may be a number of
    ranks, over which it stays sharded until its backward. `peak_by_engine` is what the step is predicted to take on
    each engine under the plan's policies, which are found for one of them; it is empty in plans of earlier versions.
    """

    ranks: Annotated[int, Meta(ge=1)]
    units: tuple[ShardedUnit, ...]
    prefetch: Count
    shard_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    replicas: Annotated[int, Meta(ge=1)] = 1
    peak_by_engine: dict[Literal["fsdp2", "sharded"], Bytes] = {}
    cpu_offload: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether shards, their gradients and the optimizer's state are in the host's memory."""


class DdpPlan(_Part, frozen=True):
    """How a model is replicated with DistributedDataParallel; `buckets` are bytes, the first to be reduced first."""

    ranks: Annotated[int, Meta(ge=2)]
    buckets: tuple[Bytes, ...]
    bucket_cap_bytes: Annotated[int, Meta(ge=1)]
    gradient_as_bucket_view: bool


class RankSettings(TypedDict):
    """How much of a rank's device is not for tensors, and how its allocator's segments are."""

    context: int | None
    nccl: int | None
    margin: float | None
    expandable_segments: bool
    host_memory: int | None


class TargetRecord(_Part, frozen=True):
    """The hardware that a plan is for, by name.

    Of the memory of one rank's device, `context_bytes` and `nccl_bytes` are counted for what a process holds outside
    the caching allocator, and `margin_bytes` are left free, which is `margin` of what may be reserved. They are None in
    plans of earlier versions. With `expandable_segments` the allocator's segments grow. Units may take
    `host_memory_bytes` of the host for what they offload, where that was said.
    """

    device: str
    title: str
    memory_total_bytes: Bytes
    ranks_per_node: Annotated[int, Meta(ge=1)]
    intra_node_link: str
    inter_node_link: str
    context_bytes: Bytes | None = None
    nccl_bytes: Bytes | None = None
    margin_bytes: Bytes | None = None
    margin: Ratio | None = None
    expandable_segments: bool = False
    host_memory_bytes: Bytes | msgspec.UnsetType = msgspec.UNSET

    @property
    def settings(self) -> RankSettings:
        """What `Target.parse` takes to have a rank's memory as it was for this plan."""
        return RankSettings(
            context=self.context_bytes,
            nccl=self.nccl_bytes,
            margin=self.margin,
            expandable_segments=self.expandable_segments,
            host_memory=None if self.host_memory_bytes is msgspec.UNSET else self.host_memory_bytes,
        )

    @property
    def usable_bytes(self) -> int | None:
        """What one rank may reserve; None in plans of earlier versions."""
        taken = (self.context_bytes, self.nccl_bytes, self.margin_bytes)
        return None if None in taken else self.memory_total_bytes - sum(each or 0 for each in taken)


class ParameterRecord(_Row, frozen=True):
    """A parameter with every name it goes by."""

    names: Annotated[tuple[str, ...], Meta(min_length=1)]
    shape: tuple[Count, ...]
    dtype: str
    trainable: bool


class InputRecord(_Row, frozen=True):
    """A tensor of the batch; shape and dtype are unknown when no op reads it."""

    shape: tuple[Count, ...] | None
    dtype: str | None
    bytes: Bytes


class TensorRecord(_Row, frozen=True):
    """A tensor that the model is called with."""

    shape: tuple[Count, ...]
    dtype: str


class OutputRecord(_Row, frozen=True):
    """A tensor in the model's output, and what holds its memory while backward runs.

    The step itself, in a variable; something else, such as autograd; or nothing.
    """

    bytes: Bytes
    held: Literal["step", "other", "nothing"]


class ModelCallRecord(_Part, frozen=True):
    """One call of the whole model in the step's forward."""

    inputs: tuple[TensorRecord, ...]
    outputs: tuple[OutputRecord, ...]


class LoopRecord(_Part, frozen=True):
    """How a step goes through its model.

    `gradients_in_forward_bytes` are gradients of the step before that are there while the first forward runs;
    `recomputes` says whether modules run again in backward, as with `torch.utils.checkpoint`.
    """

    calls: tuple[ModelCallRecord, ...]
    gradients_in_forward_bytes: Bytes
    recomputes: bool


class CastRecord(_Part, frozen=True):
    """The dtype that parameters, and inputs of these modules, are cast to for the step; the model's path is empty."""

    dtype: Dtype
    units: tuple[str, ...]


class TraceRecord(_Part, frozen=True):
    """What a plan keeps of its trace, to say what differs when it is used for another step.

    `torch` is the release without the part that names a build. `threads` is 0 where they change nothing.
    `micro_batches` is how many passes of forward and backward the step has, all alike; None when they are not.
    `loop` is None in plans of earlier versions. `in_eval` are the paths of modules that the step calls in eval mode.
    """

    torch: str
    device: str
    device_type: str
    threads: Count
    autocast: str | None
    optimizer: str
    ops: Count
    inputs: tuple[InputRecord, ...]
    parameters: tuple[ParameterRecord, ...]
    micro_batches: Annotated[int, Meta(ge=1)] | None = None
    loop: LoopRecord | None = None
    in_eval: tuple[str, ...] = ()
    cast: CastRecord | msgspec.UnsetType = msgspec.UNSET
    """What an engine casts that gathers parameters in another dtype; none for most steps."""
