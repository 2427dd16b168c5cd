"""The schedule of a sharded step: what each unit unshards, reshards and reduces, when, how many bytes, on which stream.

There are two runtimes, each with a layout of its own, and one description of what they do. A `Scheduler` goes through
the acts of a step, which are the moments at which hooks of a unit run, and notes the events of its runtime in the order
in which the host calls them: `fsdp2_schedule.py` those of FSDP2, which shards every parameter by its rows, and
`flat_schedule.py` those of memfit's own, which shards the flat tensor of a unit. Memory, times and copies of a step
are read from the events, of either.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from memfit.capture import AFTER_STEP, NO_INDEX, Category
from memfit.cost import Collective, CollectiveModel, Group, Runtime
from memfit.hardware import Device, Family, Target
from memfit.memory import Stream
from memfit.sharding.gradients import WholeGradient
from memfit.sharding.units import Pass, ShardCall


class Act(enum.IntEnum):
    """What happens between two ops, in the order in which it does when several meet there."""

    AFTER_BACKWARD = 0
    END_OF_PASS = 1
    AFTER_FORWARD = 2
    BEFORE_FORWARD = 3
    BEFORE_BACKWARD = 4


class Acting(NamedTuple):
    """An act before op `moment`, of the unit with this number; of all units at the end of a pass.

    `has_backward` says whether the run of the unit that it is of has one.
    """

    moment: int
    act: Act
    unit: int
    has_backward: bool = True


def actings(calls: Iterable[Sequence[ShardCall]], passes: Sequence[Pass]) -> list[Acting]:
    """Every act of the step in order, from the runs of each unit.

    Where runs of units lie in one another, the outer one begins first and ends last. The backward of an outer run that
    has ops after the inner one begins first too; if it has none, both wait for the gradient of the same tensor, and the
    inner one asked for it first.
    """
    found: list[tuple[tuple[int, int, int, int], Acting]] = []

    def note(moment: int, act: Act, unit: int, first: int = 0, second: int = 0, has_backward: bool = True) -> None:
        found.append(((moment, act, first, second), Acting(moment, act, unit, has_backward)))

    for number, runs in enumerate(calls):
        for call in runs:
            has_backward = call.backward_begin != NO_INDEX
            note(call.begin, Act.BEFORE_FORWARD, number, call.depth, has_backward=has_backward)
            note(call.end, Act.AFTER_FORWARD, number, -call.depth, has_backward=has_backward)
            if has_backward:
                note(call.backward_begin, Act.BEFORE_BACKWARD, number, -call.end, -call.depth)
                if call.reduces:
                    note(call.backward_end, Act.AFTER_BACKWARD, number, -call.depth)
    for each in passes:
        note(each.end, Act.END_OF_PASS, NO_INDEX)
    return [acting for _, acting in sorted(found, key=lambda pair: pair[0])]


# -- What a schedule consists of --------------------------------------------------------------------------------------


class Role(enum.Enum):
    """What a buffer of the runtime is for, and the category that its bytes count in."""

    GATHER_INPUT = "all-gather input", Category.COMMUNICATION
    GATHER_OUTPUT = "all-gather output", Category.COMMUNICATION
    PARAMETER = "unsharded parameters", Category.GATHERED_PARAMETER
    KEPT_PART = "part kept after the forward", Category.GATHERED_PARAMETER
    WHOLE_GRADIENT = "whole gradient", Category.GRADIENT
    REDUCE_INPUT = "reduce-scatter input", Category.COMMUNICATION
    RECEIVED = "part received from a rank", Category.COMMUNICATION
    REDUCE_OUTPUT = "reduce-scatter output", Category.GRADIENT
    SHARD_GRADIENT = "gradient of the shards", Category.GRADIENT

    def __init__(self, title: str, category: Category) -> None:
        self.title = title
        self.category = category


class Buffer(NamedTuple):
    """An allocation of the runtime for one unit, on a stream."""

    role: Role
    unit: int
    size_bytes: int
    stream: Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective of a unit, begun before op `issued` and waited for before op `needed`.

    With `ahead` it is a gather of the forward that may begin once the gather before it has been copied out: the host
    runs ahead of the device. `size_bytes` is the whole buffer, shards of all ranks together; `host_bytes` are copied
    from the host before it or to the host after it.
    """

    kind: Collective
    module: str
    size_bytes: int
    issued: int
    needed: int
    ahead: bool
    stream: Stream
    host_bytes: int = 0
    group: Group | None = None
    """The ranks that it is of; None for all of the target."""
    pairs: bool = False
    """Whether each rank sends its parts straight to every other, instead of a collective of the library."""

    def collective_ms(self, model: CollectiveModel) -> float:
        """Return how long it takes on the links of a target."""
        if not self.pairs:
            return model.collective_ms(self.kind, self.size_bytes, self.group)
        group = self.group or Group.of(model.target)
        times = group.ranks if self.kind is Collective.ALL_REDUCE else 1  # the whole buffer is sent to every other rank
        return model.collective_ms(Collective.ALL_TO_ALL, times * self.size_bytes, group)


class EventKind(enum.Enum):
    """What happens: to a buffer, between buffers, or to a transfer."""

    ALLOCATE = "allocate"
    FREE = "free"
    COPY = "copy"
    BEGIN = "begin"
    WAIT = "wait"


class Event(NamedTuple):
    """Something that happens before op `moment`, or with it (`by_op`), for a unit.

    `number` is that of the buffer that is allocated or freed, or of the transfer that is begun or waited for. `stream`
    is the one that the buffer belongs to, that a copy or a collective runs on, or that waits. `size_bytes` of a copy
    are those that it reads and writes.
    """

    moment: int
    kind: EventKind
    unit: int
    size_bytes: int
    stream: Stream
    number: int = NO_INDEX
    by_op: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSchedule:
    """The events of a step in order. `modules` are the paths of the units, by number."""

    modules: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    transfers: tuple[Transfer, ...]
    events: tuple[Event, ...]


class Scheduler(ABC):
    """Goes through the acts of a step once and notes the events of a runtime.

    `had` are the gradients of shards that are there before the step, by parameter, and the op after which each is
    freed.
    """

    streams: ClassVar[Mapping[Role, Stream]]
    """The stream on which the runtime allocates each of its buffers."""

    def __init__(self, modules: Iterable[str], had: Mapping[int, int]) -> None:
        self.moment = 0
        self.group: Group | None = None
        """The ranks that shard; None for all."""
        self.pairs = False
        """Whether ranks send to each other one by one; see `Transfer.pairs`."""
        self.stream_of = dict(self.streams)
        self._modules = tuple(modules)
        self._buffers: list[Buffer] = []
        self._transfers: list[Transfer] = []
        self._events: list[Event] = []
        self._gradient_end = dict(had)

    def run(self, acts: Sequence[Acting]) -> ShardSchedule:
        """Go through all acts and return what was noted."""
        for self.moment, act, unit, has_backward in acts:
            if act is Act.END_OF_PASS:
                self.end_pass()
            elif act is Act.BEFORE_FORWARD:
                self.before_forward(unit)
            elif act is Act.AFTER_FORWARD:
                self.after_forward(unit, has_backward=has_backward)
            elif act is Act.BEFORE_BACKWARD:
                self.before_backward(unit)
            else:
                self.after_backward(unit)
        return ShardSchedule(
            modules=self._modules,
            buffers=tuple(self._buffers),
            transfers=tuple(self._transfers),
            # What an op makes and frees itself was noted out of turn: it comes after what is done before the op.
            events=tuple(sorted(self._events, key=lambda event: (event.moment, event.by_op))),
        )

    @abstractmethod
    def before_forward(self, unit: int) -> None: ...

    @abstractmethod
    def after_forward(self, unit: int, *, has_backward: bool) -> None: ...

    @abstractmethod
    def before_backward(self, unit: int) -> None: ...

    @abstractmethod
    def after_backward(self, unit: int) -> None: ...

    @abstractmethod
    def end_pass(self) -> None: ...

    def is_root(self, unit: int) -> bool:
        """Whether a unit is the model itself."""
        return not self._modules[unit]

    def allocate(self, role: Role, unit: int, n_bytes: int) -> int:
        """Allocate a buffer, and return its number; it stays until it is freed."""
        return self._buffer(role, unit, n_bytes, self.moment, by_op=False)

    def receive_gradient(self, gradient: WholeGradient, unit: int, n_bytes: int) -> int:
        """Note that the backward makes a whole gradient, and return the number of its buffer."""
        return self._buffer(Role.WHOLE_GRADIENT, unit, n_bytes, gradient.alloc_at, by_op=True)

    def free(self, buffer: int) -> None:
        """Free a buffer."""
        self._note(EventKind.FREE, self.moment, buffer)

    def copy(self, unit: int, n_bytes: int, stream: Stream) -> None:
        """Copy between buffers, so many bytes read and written."""
        self._events.append(Event(self.moment, EventKind.COPY, unit, n_bytes, stream))

    def begin(
        self,
        kind: Collective,
        unit: int,
        n_bytes: int,
        stream: Stream,
        *,
        ahead: bool = False,
        host_bytes: int = 0,
        group: Group | None = None,
    ) -> int:
        """Begin a collective of some ranks, or of all that shard, and return its number."""
        self._events.append(Event(self.moment, EventKind.BEGIN, unit, n_bytes, stream, len(self._transfers)))
        self._transfers.append(
            Transfer(
                kind=kind,
                module=self._modules[unit],
                size_bytes=n_bytes,
                issued=self.moment,
                needed=self.moment,
                ahead=ahead,
                host_bytes=host_bytes,
                stream=stream,
                group=group or self.group,
                pairs=self.pairs,
            )
        )
        return len(self._transfers) - 1

    def wait(self, transfer: int, unit: int) -> None:
        """Make the compute stream wait for a collective."""
        begun = self._transfers[transfer]
        self._transfers[transfer] = replace(begun, needed=self.moment)
        self._events.append(
            Event(self.moment, EventKind.WAIT, unit, begun.size_bytes, Stream.COMPUTE, transfer),
        )

    def keep_gradient(self, buffer: int, gradients: Iterable[WholeGradient]) -> None:
        """Let a reduced buffer stay while it is the gradient of any shard; one that is added to others goes."""
        if self.note_gradient(buffer, gradients):
            self.free(buffer)

    def note_gradient(self, buffer: int, gradients: Iterable[WholeGradient]) -> bool:
        """Note until when a reduced buffer is the gradient of any shard; return whether it is that no longer."""
        new = [gradient for gradient in gradients if not self._has_gradient(gradient.parameter)]
        self._gradient_end.update((gradient.parameter, gradient.free_after) for gradient in new)
        ends = [gradient.free_after for gradient in new]
        if AFTER_STEP in ends:
            return False
        last = max(ends, default=NO_INDEX)
        if last >= self.moment:
            self._note(EventKind.FREE, last, buffer, by_op=True)
        return last < self.moment

    def _has_gradient(self, parameter: int) -> bool:
        free_after = self._gradient_end.get(parameter)
        return free_after is not None and (free_after == AFTER_STEP or free_after >= self.moment)

    def _buffer(self, role: Role, unit: int, n_bytes: int, moment: int, *, by_op: bool) -> int:
        self._buffers.append(Buffer(role, unit, n_bytes, self.stream_of[role]))
        self._note(EventKind.ALLOCATE, moment, len(self._buffers) - 1, by_op=by_op)
        return len(self._buffers) - 1

    def _note(self, kind: EventKind, moment: int, number: int, *, by_op: bool = False) -> None:
        _, unit, n_bytes, stream = self._buffers[number]
        self._events.append(Event(moment, kind, unit, n_bytes, stream, number, by_op))


# -- The time of a sharded step's collectives, and how much of it compute does not hide -------------------------------


def communication(runtime: Runtime, target: Target, schedule: ShardSchedule) -> tuple[float, float]:
    """Milliseconds of all collectives, and those for which the device waits."""
    took, waited = transfer_times(runtime, target, schedule)
    return sum(took), sum(waited)


def collective_waits(runtime: Runtime, target: Target, schedule: ShardSchedule) -> tuple[float, dict[int, float]]:
    """Milliseconds of all collectives, and those for which the device waits, by the op before which it does."""
    took, waited = transfer_times(runtime, target, schedule)
    waits: dict[int, float] = {}
    for transfer, wait in zip(schedule.transfers, waited, strict=True):
        waits[transfer.needed] = waits.get(transfer.needed, 0.0) + wait
    return sum(took), waits


def transfer_times(runtime: Runtime, target: Target, schedule: ShardSchedule) -> tuple[list[float], list[float]]:
    """Milliseconds of each collective, and for how many of them the device waits.

    Collectives of the same ranks run one after another, beside the ops and beside those of other ranks, which have
    communicators of their own. A gather of the forward begins when the unit before it has its
    parameters, one of the backward when the backward of the unit before it begins, and both are waited for where the
    unit's own run begins: each hides behind the compute of its neighbour. A reduction begins when its unit's backward
    ends and is waited for when that of the next unit ends, or the pass does. What is copied from the host goes before
    its gather and what is copied to it after its reduction, in the same line. On a CPU nothing runs beside the ops: the
    cores that would compute send and receive.
    """
    model, link = CollectiveModel(target), target.device.host_link
    cost: dict[tuple[Collective, int, int, Group | None], float] = {}
    times = runtime.cumulative_ms
    waited = 0.0
    free: dict[Group | None, float] = {}
    copied_out: dict[Group | None, float] = {}
    count = len(schedule.transfers)
    done, took, waits = [0.0] * count, [0.0] * count, [0.0] * count
    for event in schedule.events:
        if event.kind not in (EventKind.BEGIN, EventKind.WAIT):
            continue
        number, transfer = event.number, schedule.transfers[event.number]
        if event.kind is EventKind.WAIT:
            now = float(times[transfer.needed]) + waited
            waits[number] += max(0.0, done[number] - now)
            waited += max(0.0, done[number] - now)
            copied_out[transfer.group] = max(now, done[number])
            continue
        key = transfer.kind, transfer.size_bytes, transfer.host_bytes, transfer.group
        if key not in cost:
            host_ms = link.copy_ms(transfer.host_bytes) if transfer.host_bytes else 0.0
            cost[key] = host_ms + transfer.collective_ms(model)
        now = float(times[transfer.issued]) + waited
        begins = max(free.get(transfer.group, 0.0), copied_out.get(transfer.group, 0.0) if transfer.ahead else now)
        done[number] = free[transfer.group] = begins + cost[key]
        took[number] = cost[key]
    return took, took if target.device.type == "cpu" else waits


def slowed_ms(transfers: Sequence[Transfer], target: Target, communication_ms: float, waited_ms: float) -> float:
    """Return what kernels lose while collectives move data beside them; a collective's latency slows none."""
    model = CollectiveModel(target)
    slowdown = model.backend.slowdown
    if not slowdown or not communication_ms:
        return 0.0
    sizes = Counter((each.kind, each.size_bytes, each.group) for each in transfers)
    moving_ms = sum(times * model.estimate(*sent).transfer_ms for sent, times in sizes.items())
    return slowdown * moving_ms * (1.0 - waited_ms / communication_ms)


def copies_ms(schedule: ShardSchedule, device: Device) -> float:
    """Return what is copied between buffers and whole tensors while nothing else computes, at the device's bandwidth.

    A buffer that FSDP2 gathers is read and written once to become parameters, whole gradients to become a reduction's
    input. It is not part of `communication`, but of a sharding's `beside_ms`. A CPU has no other streams.
    """
    copies = (event for event in schedule.events if event.kind is EventKind.COPY)
    moved = sum(event.size_bytes for event in copies if event.stream is Stream.COMPUTE or device.type == "cpu")
    reached = device.memory_bandwidth_bytes_per_s * device.efficiency[Family.COPY].bandwidth
    return moved / reached * 1e3
