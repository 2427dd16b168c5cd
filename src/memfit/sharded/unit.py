"""A unit: a module, or several, whose parameters are gathered together, and what it is doing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum

import torch
from torch import nn
from torch.profiler import record_function

from memfit.errors import StateError
from memfit.sharded.comm import CollectiveError, ShardComm, Transfer, wait_all
from memfit.sharded.flat_param import FlatShard, UnshardedParams
from memfit.sharded.gradients import Gradients
from memfit.sharded.options import Precision, UnitOptions
from memfit.sharded.streams import Streams
from memfit.torch_private.dispatch import inner_tensors, is_wrapper_subclass
from memfit.torch_private.distributed_tensors import local_tensor

_FIRST_TAG = 1 << 30  # above those that users give to sends and receives of their own on the same group
_KINDS = 2
_FLATS = 64
_TAGS = 1 << 19
_PASSES = 1 << 9


class ShardedUnit:
    """A module, or a group of modules, with its flat shards; the root has the empty name.

    The forward of a group begins with the call of any of its modules and ends when all were called. `uncalled` are
    those that were not, while it is under way, and `run` is what its backward will be of. `in_parts` says whether some
    of them were called without a graph in the last pass, and may have backwards of their own.

    `outermost` says whether its last forward was that of the whole pass. `pending` counts forwards whose backward has
    not come since the last backward ended, `running` the backwards that have begun. `communicates` says whether its
    gradients are summed, `reshard_after_backward` whether its backward frees the gathered parameters,
    `forward_prefetch` and `backward_prefetch` which units are gathered with it where a user says so. `was_root` says
    whether it was the root of a model that was sharded in a call of its own.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        modules: Sequence[nn.Module],
        flats: list[FlatShard],
        gradients: list[Gradients],
        options: UnitOptions,
        precision: Precision,
        streams: Streams,
        reshard_comm: ShardComm | None,
    ) -> None:
        self.number = 0
        self.names = tuple(names)
        self.modules = tuple(modules)
        self.flats = flats
        self.gradients = gradients
        self.options = options
        self.state = State.IDLE
        self.outermost = False
        self.was_root = False
        self.gathered = False
        self.stale = False
        self.pending = 0
        self.running = 0
        self.uncalled: set[nn.Module] = set()
        self.run: Run | None = None
        self.in_parts = False
        self.communicates = True
        self.reshard_after_backward = True
        self.forward_prefetch: tuple[ShardedUnit, ...] | None = None
        self.backward_prefetch: tuple[ShardedUnit, ...] | None = None
        self.pass_number = 0
        """Which pass of the model this is. A rank that skipped one must not meet the others in the next."""
        self.precision = precision
        self._streams = streams
        self._reshard_comm = reshard_comm
        self._resharded = False
        self._unsharded: list[UnshardedParams] = []
        self._unsharded_in_forward: list[UnshardedParams] | None = None
        self._transfers: list[Transfer] | None = None
        self._event: torch.cuda.Event | None = None

    def __repr__(self) -> str:
        return f"ShardedUnit({self.title})"

    @property
    def name(self) -> str:
        """The path of its first module, empty for the root."""
        return self.names[0]

    @property
    def module(self) -> nn.Module:
        """Its first module."""
        return self.modules[0]

    @property
    def title(self) -> str:
        """How messages name it."""
        if len(self.names) > 1:
            return f"unit {self.name!r} to {self.names[-1]!r}"
        return f"unit {self.name!r}" if self.name else "the root unit"

    @property
    def reshard_comm(self) -> ShardComm | None:
        """The smaller group that it is resharded to."""
        return self._reshard_comm

    @property
    def in_flight(self) -> bool:
        """Whether a gather was begun and not waited for."""
        return self._transfers is not None

    @property
    def bytes(self) -> int:
        """What its gathered parameters take."""
        return sum(flat.unsharded(self.gather_dtype(flat)).bytes for flat in self.flats)

    def use_streams(self, streams: Streams) -> None:
        """Use the side streams of a model around its own."""
        self._streams = streams
        for each in (*self.flats, *self.gradients):
            each.use_streams(streams)

    def enter(self, state: State) -> None:
        """Enter the next state, or refuse."""
        check_transition(self.title, self.state, state)
        self.state = state

    def unshard(self, phase: str) -> None:
        """Begin to gather all parameters, unless that is done or under way.

        A forward replaces those of an earlier pass, a backward gathers them as its forward did.
        """
        forward = phase == "forward"
        if self.in_flight or (self.gathered and not (self.stale and forward)):
            return
        about = f"gather of {self.title} in {phase}"
        if forward or self._unsharded_in_forward is None:
            self._unsharded = [flat.unsharded(self.gather_dtype(flat)) for flat in self.flats]
            for flat, unsharded in zip(self.flats, self._unsharded, strict=True):
                unsharded.changes = flat.changes
        else:
            self._unsharded = self._unsharded_in_forward
        begun: list[Transfer] = []
        try:
            for number, (flat, unsharded) in enumerate(zip(self.flats, self._unsharded, strict=True)):
                tag = self._tag(number, 0)
                with record_function("memfit::gather"):
                    if self._resharded and self._reshard_comm is not None and not forward:
                        transfer = flat.begin_regather(unsharded, self._reshard_comm, tag, about)
                    else:
                        transfer = flat.unshard(unsharded, tag, about)
                if transfer is not None:
                    begun.append(transfer)
        except BaseException:  # of an extension or a collective of the user's, say: there is nothing to wait for
            with suppress(CollectiveError):
                wait_all(begun)
            raise
        self._transfers = begun
        self._event = self._streams.event(self._streams.gather)

    def begin_pass(self, pass_number: int) -> None:
        """Prepare for a pass, which gathers again what is gathered, unless it was left for it and is current."""
        self.pass_number = pass_number
        self.in_parts = False
        self.stale = self.gathered and (self.reshard_after_backward or not self._is_current())

    def _is_current(self) -> bool:
        """Return whether the gathered parameters are what a gather for a forward would give now."""
        return all(
            unsharded is flat.unsharded(self.gather_dtype(flat)) and unsharded.changes == flat.changes
            for flat, unsharded in zip(self.flats, self._unsharded, strict=True)
        )

    def wait(self) -> None:
        """Wait for the gather that was begun."""
        if self._transfers is None:
            return
        transfers, self._transfers = self._transfers, None
        wait_all(transfers)
        self._streams.wait(self._event)
        for unsharded in self._unsharded:
            unsharded.reveal()
        self._resharded = False
        self.gathered, self.stale = True, False

    def to_unsharded(self) -> None:
        """Set the gathered parameters on the module."""
        for flat, unsharded in zip(self.flats, self._unsharded, strict=True):
            flat.to_unsharded(unsharded)

    def to_sharded(self) -> None:
        """Set the sharded parameters on the module."""
        for flat in self.flats:
            flat.to_sharded()

    def changes(self) -> tuple[int, ...]:
        """Return how often the parameters of each flat shard were changed in place."""
        return tuple(flat.changes for flat in self.flats)

    def check_unchanged(self, changes: tuple[int, ...]) -> None:
        """Let autograd refuse parameters that were changed since a forward, as it does those of a plain model."""
        for before, flat, unsharded in zip(changes, self.flats, self._unsharded, strict=True):
            if before != flat.changes:
                unsharded.hide()

    def holds_memory_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the memory of gathered parameters, which is going to be freed."""
        if tensor.layout is not torch.strided:
            return False
        tensor = local_tensor(tensor)
        if is_wrapper_subclass(tensor):  # it has no memory of its own
            return any(self.holds_memory_of(each) for each in inner_tensors(tensor))
        address = tensor.data_ptr()
        return any(unsharded.holds(address) for unsharded in self._unsharded)

    def free(self) -> None:
        """Free the gathered parameters."""
        self.wait()
        self.gathered = self._resharded = False
        for flat in self.flats:
            flat.free()

    def end_forward(self, *, backward: bool) -> None:
        """Reshard after the forward what its backward does not need, all of it where there is no backward."""
        if not backward:
            self.free()
            return
        self._unsharded_in_forward = self._unsharded
        if self.options.keep or self.outermost:
            return
        if self._reshard_comm is None:
            self.free()
            return
        for flat, unsharded in zip(self.flats, self._unsharded, strict=True):
            flat.keep_part(unsharded, self._reshard_comm)
        self.gathered, self._resharded = False, True

    def end_backward(self) -> None:
        """Reshard after the backward, unless the gathered parameters are left for the next forward."""
        self.to_sharded()
        if self.reshard_after_backward:
            self.free()

    def reset(self, *, free: bool = True) -> None:
        """Reset to idle from any state: the module holds shards, and nothing is gathered that is to be freed."""
        if self.state is State.SUMMONED:
            return
        self.state = State.IDLE
        self.pending = self.running = 0
        self.uncalled.clear()
        self.run = None
        self._unsharded_in_forward = None
        self.to_sharded()
        if free:
            self.free()

    def begin_reductions(self, *, everything: bool = False) -> bool:
        """Begin to reduce gradients over ranks: of all flat shards that train, or of those that have any.

        Whether there are any.
        """
        begun = False
        for number, gradients in enumerate(self.gradients):
            if gradients.under_way or not (gradients.waiting or (everything and gradients.flat.trains)):
                continue
            gradients.begin(self._tag(number, 1), f"reduction of the gradients of {self.title} in backward")
            begun = True
        return begun

    def advance_reductions(self) -> bool:
        """Advance reductions under way by one stage; return whether all are finished."""
        finished = [gradients.advance() for gradients in self.gradients]
        return all(finished)

    def _tag(self, flat: int, kind: int) -> int:
        within = ((self.number * _FLATS + flat) * _KINDS + kind) % _TAGS
        return _FIRST_TAG + self.pass_number % _PASSES * _TAGS + within

    def gather_dtype(self, flat: FlatShard) -> torch.dtype:
        """Return the dtype that parameters are gathered in."""
        if not flat.dtype.is_floating_point or (self.precision.full_in_eval and not self.module.training):
            return flat.dtype
        return self.precision.param_dtype or flat.model_dtype


class Run:
    """One forward of a unit, whose backward may come. Autograd's graph holds it, so that it goes when the graph does.

    `before` are the units that ended their forward before it in the same pass, `watched` says whether it has outputs
    with a gradient, `counted` whether the unit waits for its backward; a checkpoint's second forward is not counted.
    `passed` is autograd's number of the last backward that went through its inputs before it began. `changes` are the
    writes to its parameters before it: later forwards of the unit, with changed ones, may come before its backward.
    """

    __slots__ = ("before", "began", "changes", "counted", "ended", "passed", "unit", "watched")

    def __init__(self, unit: ShardedUnit) -> None:
        self.unit = unit
        self.before: Sequence[ShardedUnit] = ()
        self.changes = unit.changes()
        self.began = self.ended = self.counted = self.watched = False
        self.passed = -1


class RunHook:
    """A hook on tensors of a run. Holding the run, it keeps it as long as the graph is there."""

    __slots__ = ("_act", "_run")

    def __init__(self, act: Callable[[Run], None], run: Run) -> None:
        self._act, self._run = act, run

    def __call__(self, gradient: torch.Tensor) -> None:
        self._act(self._run)


# -- What a unit is doing ---------------------------------------------------------------------------------------------
#
# One state machine for every unit, whose members say where they may lead.


class State(Enum):
    """The phase of a unit; the value is how errors name it."""

    IDLE = "idle"
    FORWARD = "forward"
    PRE_BACKWARD = "pre-backward"
    BACKWARD = "backward"
    POST_BACKWARD = "post-backward"
    SUMMONED = "summoned"

    def leads_to(self, state: State) -> bool:
        """Return whether a unit in this state may go on to that one."""
        return state in _NEXT[self]


# A unit that runs several times in a step goes from a backward to the next one, or to a forward that backward repeats.
# What never sees its inputs' gradients is idle again when the whole backward ends.
_NEXT = {
    State.IDLE: {State.FORWARD, State.PRE_BACKWARD, State.SUMMONED},
    State.FORWARD: {State.IDLE},
    State.PRE_BACKWARD: {State.BACKWARD, State.IDLE},
    State.BACKWARD: {State.PRE_BACKWARD, State.POST_BACKWARD, State.IDLE},
    State.POST_BACKWARD: {State.PRE_BACKWARD, State.FORWARD, State.IDLE},
    State.SUMMONED: {State.IDLE},
}


def check_transition(unit: str, before: State, after: State) -> None:
    """Refuse what cannot follow, with what to do about it."""
    if before.leads_to(after):
        return
    if State.SUMMONED in (before, after):
        raise StateError(
            f"{unit} is {before.value} and cannot become {after.value}: full parameters are for reading and writing "
            "between steps; leave full_parameters() before you run the model, and enter it after the backward"
        )
    raise StateError(
        f"{unit} is {before.value} and cannot become {after.value}; a module that calls itself, or a backward inside "
        "of a forward, cannot be sharded: give the module around it as the unit"
    )
