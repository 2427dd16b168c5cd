"""The types of a trace: an immutable record of one training step, the same for every budget."""

from __future__ import annotations

import enum
import hashlib
from functools import cached_property
from typing import TypedDict

import msgspec

from memfit.capture.parameter_cast import ParameterCast
from memfit.hardware import Device

SCHEMA = 3
BEFORE_STEP = -1
"""The `alloc_at` of a storage that is there before the step."""
AFTER_STEP = -1
"""The `free_after` of a storage that the step does not free."""
NO_INDEX = -1
"""Marks an index that does not apply: no call, no storage, no op."""


class Phase(str, enum.Enum):
    """The part of the step in which an op runs."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Category(str, enum.Enum):
    """What a storage is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"
    GATHERED_PARAMETER = "gathered parameter"
    COMMUNICATION = "communication"
    WORKSPACE = "workspace"


class _Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    pass


class TensorRef(_Record, frozen=True):
    """A tensor as an op saw it: a strided view of a storage (`NO_INDEX` for one that is not on the device)."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str


class Op(_Record, frozen=True):
    """One aten-level call.

    `arguments` is JSON in which `{"t": i}` stands for the i-th input tensor, so that the call can be made again.
    `forward_op` is, for a backward op, the forward op whose gradient it computes. A custom autograd function is known
    by its first op; when it saves tensors, `forward_op` of all its forward ops is that first one. `mutates` lists the
    storages an in-place op writes to and `mutated_op` the op that made the value it overwrites. `workspace_bytes` is
    what the kernel allocates and frees inside itself while its inputs and outputs are alive.
    """

    name: str
    phase: Phase
    call: int
    inputs: tuple[TensorRef, ...]
    outputs: tuple[TensorRef, ...]
    arguments: str
    flops: int
    read_bytes: int
    written_bytes: int
    workspace_bytes: int
    view: bool
    random: bool
    saved: bool
    mutates: tuple[int, ...]
    mutated_op: int
    forward_op: int
    source: int


class Storage(_Record, frozen=True):
    """One allocation, made by op `alloc_at` and freed after op `free_after` has run and before the next one does.

    After op `released` nothing but autograd holds it; that is `free_after` where autograd holds it no longer than
    others do.
    """

    bytes: int
    category: Category
    alloc_at: int
    free_after: int
    released: int
    call: int
    module: str
    name: str
    saved_by: tuple[int, ...]


class ModuleCall(_Record, frozen=True):
    """One execution of one module: forward ops `begin` up to (not including) `end`, and its backward counterpart.

    `inputs` are the storages of the tensors that it is called with, read or not.
    """

    module: str
    kind: str
    index: int
    parent: int
    phase: Phase
    begin: int
    end: int
    backward_begin: int
    backward_end: int
    inputs: tuple[int, ...] = ()


class ModelCall(_Record, frozen=True):
    """A call of the whole model: shape and dtype of the tensors in its arguments, storages of those in its result.

    A storage is `NO_INDEX` for a tensor that is not on the device.
    """

    inputs: tuple[tuple[tuple[int, ...], str], ...]
    outputs: tuple[int, ...]


class CollectiveCall(_Record, frozen=True):
    """What a group of `ranks` does together in op `op`: bytes as `memfit.cost.Collective` counts them, and a stream.

    The ranks lie `stride` apart: 1 in the last dimension of a mesh. `dims` are the dimensions of the mesh that the
    group runs along; none for a group that is no part of the mesh.
    """

    op: int
    kind: str
    ranks: int
    bytes: int
    stream: str
    stride: int = 1
    dims: tuple[str, ...] = ()


class PipelineAction(_Record, frozen=True):
    """What a stage computes for a micro-batch in ops `begin` up to (not including) `end`.

    `kind` is the letter that schedules use: F forward, B backward, or its parts I (inputs) and W (weights).
    """

    kind: str
    stage: int
    microbatch: int
    begin: int
    end: int


class PipelineRun(_Record, frozen=True):
    """One `step` of a pipeline's schedule, as rank `rank` of the pipeline's `ranks` runs it.

    `order` has what each of them computes, as in `1F0` for the forward of stage 1, micro-batch 0; none where the
    schedule does not say.
    """

    schedule: str
    stages: int
    microbatches: int
    rank: int
    ranks: int
    order: tuple[tuple[str, ...], ...]
    actions: tuple[PipelineAction, ...]


class CapturedOn(TypedDict, total=False):
    """How a step is captured: on which mesh, as which of its ranks, with which cast of its parameters."""

    mesh: dict[str, int]
    rank: int
    cast: ParameterCast | None


class Module(_Record, frozen=True):
    """A module of the model with the storages that it owns itself, not through its children."""

    path: str
    kind: str
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]


class Parameter(_Record, frozen=True):
    """A parameter, every name it goes by, and the storages of its gradient and optimizer state."""

    names: tuple[str, ...]
    storage: int
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    gradient: int
    state: tuple[int, ...]


class Trace(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One step, as the target would run it."""

    schema: int
    memfit: str
    torch: str
    device: str
    device_type: str
    hardware: Device
    threads: int
    autocast: str | None
    optimizer: str
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    calls: tuple[ModuleCall, ...]
    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...]
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    model_calls: tuple[ModelCall, ...] = ()
    """In order, those of the forward. Not part of the fingerprint: ops and storages tell the same."""
    shared: dict[str, str] = {}
    """For each path of a module that has several, the first of them."""
    in_eval: tuple[str, ...] = ()
    """Paths of the modules that the forward calls in eval mode, all modules around them in eval mode too. Not part of
    the fingerprint."""
    no_grad_calls: dict[str, tuple[int, ...]] = {}
    """The calls with gradients disabled of modules that are called with gradients too, by path. Not part of the
    fingerprint."""
    warm_up: str = "none"
    """What the process runs before its first step (`Step.warm_up`). Not part of the fingerprint."""
    cudnn_benchmark: bool = False
    """Whether `torch.backends.cudnn.benchmark` was on when the step ended. Not part of the fingerprint."""
    mesh: dict[str, int] = {}
    """The ranks that the step was captured on as it is, by dimension; none for a step that is not parallel itself."""
    streams: dict[int, str] = {}
    """The streams of storages that are not allocated on the compute stream, by number; only with a mesh."""
    op_streams: dict[int, str] = {}
    """The streams of ops that do not run on the compute stream, by index; only with a mesh. Not part of the
    fingerprint."""
    collectives: tuple[CollectiveCall, ...] = ()
    """What the ranks of the mesh do together, in the order in which it is called."""
    rank: int = 0
    """The rank of the mesh that the step was captured as. Not part of the fingerprint."""
    pipelines: tuple[PipelineRun, ...] = ()
    """The schedules of micro-batches that the step runs, where the rank holds stages of a pipeline."""
    wrappers: tuple[str, ...] = ()
    """What the step's own code has wrapped or sharded the model with, as `apply` names it; only with a mesh. Not
    part of the fingerprint."""

    @property
    def captured_on(self) -> CapturedOn:
        """What a trace that is captured as this one was is given beside its target."""
        return {"mesh": self.mesh, "rank": self.rank} if self.mesh else {"cast": self.cast}

    @property
    def coordinate(self) -> dict[str, int]:
        """Where the captured rank is in the mesh, by dimension."""
        found, left = {}, self.rank
        for name, size in reversed(self.mesh.items()):
            left, found[name] = divmod(left, size)
        return dict(reversed(found.items()))

    cast: ParameterCast | None = None
    """How parameters were cast for the capture, whose dtypes here are those of the cast; None where they were not. Not
    part of the fingerprint: ops and parameters tell the same."""

    def instance_of(self, path: str) -> str:
        """Return the first path of the module that this path leads to."""
        return self.shared.get(path, path)

    def __repr__(self) -> str:
        return (
            f"Trace({len(self.ops)} ops, {len(self.storages)} storages and {len(self.calls)} module calls "
            f"for {self.device}, fingerprint {self.fingerprint[:12]})"
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything the step does.

        Where its source lines are does not count, nor do the numbers that an optimizer computes with, which change
        from step to step.
        """
        content: tuple[object, ...] = (
            self.device,
            self.autocast,
            self.optimizer,
            [
                msgspec.structs.replace(op, source=0, arguments="" if op.phase is Phase.OPTIMIZER else op.arguments)
                for op in self.ops
            ],
            self.storages,
            self.calls,
            self.modules,
            self.parameters,
        )
        if self.mesh:
            content = (*content, self.mesh, self.streams, self.collectives)
        if self.pipelines:
            content = (*content, self.pipelines)
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()

    def ancestors(self, call: int) -> tuple[int, ...]:
        """Return the module call and those that enclose it, innermost first."""
        chain = []
        while call != NO_INDEX:
            chain.append(call)
            call = self.calls[call].parent
        return tuple(chain)

    def source_of(self, op: int) -> str:
        """Return the user's line that made this op, as `file:line`."""
        return self.sources[self.ops[op].source]


# -- Names of ops as people read them ---------------------------------------------------------------------------------


def short(name: str) -> str:
    """Return an op's name without what all of them have: `aten.mm.default` is `mm`."""
    return name.removeprefix("aten.").removesuffix(".default")
