"""The schedule of memfit's runtime: the parameters of a unit lie in one flat tensor, which is gathered in place.

Note [The flat schedule]: this follows `memfit/sharded` act by act.

- before forward: a flat buffer, which is the parameters themselves, is gathered, and so are those of the next
  `forward_prefetch` units; then its gather is waited for.
- after forward: the buffer is freed, unless there is a backward and the unit keeps it or is the root. With
  `reshard_ranks` this rank's part among so many ranks is copied first and kept.
- before backward: the buffer is gathered again, and those of the `backward_prefetch` units that ran before this one,
  now or when its backward has ended.
- when a gradient comes: a part of the reduction's input, which goes to one rank, is allocated when all its gradients
  have come; they are copied into it, and those that no other part waits for are freed (Note [Parts] of
  `sharded/gradients.py`). Where all parts are one tensor, that is when the last gradient of the unit has come.
- after backward: the parameters are freed, the reduction is begun, and that of the unit before is waited for: its parts
  are freed, and what it leaves becomes the gradient of the shards or is added to it. A unit that has another run to
  come waits for its backward.
- on a hybrid mesh a reduction has two stages: the parts are freed and the sum over the replicas is begun, in place,
  where without one it would be finished, and it is finished one unit later.
- at the end of a pass: the same for the root and for every unit whose backward was not seen to end.

Note [Streams of the flat schedule]: every buffer is allocated on the compute stream, whatever stream fills it, but for
the output of a reduction, which is allocated on the stream that it runs on (Note [Streams] of `sharded/streams.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from memfit.capture import NO_INDEX, Trace
from memfit.cost import Collective, Group
from memfit.errors import InputError
from memfit.memory import Stream
from memfit.sharding.flat_layout import FlatLayout, PartTable, group_alike
from memfit.sharding.gradients import WholeGradient
from memfit.sharding.joining import BUCKET_CAP_BYTES
from memfit.sharding.options import ShardDtypes, item_bytes
from memfit.sharding.schedule import Act, Acting, Role, Scheduler, ShardSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When units gather.

    `forward_prefetch` and `backward_prefetch` units are gathered ahead of the one that runs; `backward_prefetch_at`
    says whether that begins before a unit's gradients are worked out or after. `in_flight_bytes` bounds what is
    gathered ahead. `order` names units in the order of the forward where the recorded one should not be used.
    `bucket_cap_bytes` bounds what neighbouring small units are joined to, which are then gathered and reduced together;
    0 leaves every unit alone.
    """

    forward_prefetch: int = 1
    backward_prefetch: int = 1
    backward_prefetch_at: Literal["before", "after"] = "before"
    in_flight_bytes: int | None = None
    order: tuple[str, ...] | None = None
    bucket_cap_bytes: int = BUCKET_CAP_BYTES

    def __post_init__(self) -> None:
        for name in ("forward_prefetch", "backward_prefetch"):
            units = getattr(self, name)
            if not isinstance(units, int) or units < 0:
                raise InputError(f"{name} is {units!r}; give the number of units to gather ahead, 0 for none")
        if self.backward_prefetch_at not in ("before", "after"):
            raise InputError(f"backward_prefetch_at is {self.backward_prefetch_at!r}; give 'before' or 'after'")
        if self.in_flight_bytes is not None and self.in_flight_bytes < 0:
            raise InputError(f"in_flight_bytes is {self.in_flight_bytes}; give bytes, or None for no bound")
        cap = self.bucket_cap_bytes
        if isinstance(cap, bool) or not isinstance(cap, int) or cap < 0:
            raise InputError(f"bucket_cap_bytes is {cap!r}; give bytes, or 0 to join no units")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOptions:
    """What one unit does after its forward.

    `keep` leaves its parameters gathered until its backward. `reshard_ranks` keeps one part in that many instead, so
    that the backward gathers from fewer ranks. `backward_gather=False` is for a unit whose backward does not read its
    parameters, such as an embedding.
    """

    keep: bool = False
    reshard_ranks: int | None = None
    backward_gather: bool = True

    def __post_init__(self) -> None:
        if self.reshard_ranks is not None and self.reshard_ranks < 2:
            raise InputError(f"reshard_ranks is {self.reshard_ranks}; give 2 or more, or keep=True for 1")
        if self.keep and self.reshard_ranks is not None:
            raise InputError("keep and reshard_ranks exclude each other: what is kept is not resharded")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroup:
    """The parameters of a unit that lie in one flat tensor, and the bytes of an element of each thing made of it.

    `parameters` are the numbers of those in the layout's slots. They are of one dtype and train or not together. One
    rank alone computes on its shard, `in_place`, where that has the dtype and is on the device that it computes with.
    """

    layout: FlatLayout
    parameters: tuple[int, ...]
    trains: bool
    kept_item_bytes: int
    gathered_item_bytes: int
    reduced_item_bytes: int
    gradient_item_bytes: int
    in_place: bool = False

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffer."""
        return 0 if self.in_place else self.layout.elements * self.gathered_item_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard."""
        return self.layout.shard_elements * self.kept_item_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of what one rank gets of a reduction's input."""
        return self.layout.shard_elements * self.reduced_item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnit:
    """A unit of memfit's runtime: its module, its flat tensors, and what it does after its forward."""

    module: str
    groups: tuple[FlatGroup, ...]
    options: UnitOptions = UnitOptions()


def flat_units(
    trace: Trace,
    members: Mapping[str, Sequence[int]],
    options: Mapping[str, UnitOptions],
    ranks: int,
    dtypes: ShardDtypes,
) -> list[FlatUnit]:
    """The units of a trace in the flat layout; `members` are the numbers of each unit's parameters."""
    for module, choice in options.items():
        if module not in members:
            raise InputError(f"there are options for {module!r}, which is no unit; the units are {sorted(members)}")
        if choice.reshard_ranks is not None and (ranks % choice.reshard_ranks or choice.reshard_ranks >= ranks):
            raise InputError(
                f"reshard_ranks of {module!r} is {choice.reshard_ranks}; give a divisor of the {ranks} ranks, smaller "
                "than it"
            )

    def kind(number: int) -> tuple[str, bool]:
        return dtypes.kept(trace.parameters[number]), trace.parameters[number].trainable

    return [
        FlatUnit(
            module=module,
            groups=tuple(_flat_group(trace, alike, ranks, dtypes) for alike in group_alike(numbers, kind)),
            options=options.get(module, UnitOptions()),
        )
        for module, numbers in members.items()
    ]


def _flat_group(trace: Trace, numbers: Sequence[int], ranks: int, dtypes: ShardDtypes) -> FlatGroup:
    held = [trace.parameters[number] for number in numbers]
    first = held[0]
    return FlatGroup(
        layout=FlatLayout.of(((each.names, each.shape) for each in held), ranks),
        parameters=tuple(numbers),
        trains=first.trainable,
        kept_item_bytes=item_bytes(dtypes.kept(first)),
        gathered_item_bytes=item_bytes(dtypes.gathered(first)),
        reduced_item_bytes=item_bytes(dtypes.reduced(first)),
        gradient_item_bytes=item_bytes(dtypes.kept(first)),
        in_place=ranks == 1 and dtypes.gathered(first) == dtypes.kept(first),
    )


@dataclass(slots=True)
class _Sum:
    """The gradients of a flat group: which came, the parts of the reduction's input, and the reduction under way."""

    group: FlatGroup
    table: PartTable
    held: dict[int, int] = field(default_factory=dict)
    come: dict[int, WholeGradient] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    filled: set[int] = field(default_factory=set)
    received: list[int] = field(default_factory=list)
    output: int = NO_INDEX
    transfer: int | None = None
    all_reduce: int | None = None
    under_way: bool = False


@dataclass(slots=True)
class _State:
    """What a unit is doing: where its parameters are, and its runs whose backward has not ended."""

    groups: Sequence[FlatGroup]
    options: UnitOptions
    sums: list[_Sum]
    buffers: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    gathers: list[int] = field(default_factory=list)
    gathered: bool = False
    in_flight: bool = False
    before: list[list[int]] = field(default_factory=list)
    """For each run whose backward has not begun, the units that ended their forward before it, nearest first."""
    ahead: list[int] = field(default_factory=list)
    running: int = 0
    owes: bool = False
    """Whether its backward began in this pass and its gradients are not being reduced."""

    @property
    def gathered_bytes(self) -> int:
        return sum(group.gathered_bytes for group in self.groups)


class FlatScheduler(Scheduler):
    """Notes what memfit's runtime does for units.

    `separate_parts` says whether the parts of a reduction's input may be tensors of their own, as they are where ranks
    send them to each other one by one (Note [Pairs] of `sharded/comm.py`), and are received so, too. `replicas` are
    the ranks with the same shard on a hybrid mesh.
    """

    streams: ClassVar = {
        Role.PARAMETER: Stream.COMPUTE,
        Role.KEPT_PART: Stream.COMPUTE,
        Role.WHOLE_GRADIENT: Stream.COMPUTE,
        Role.REDUCE_INPUT: Stream.COMPUTE,
        Role.RECEIVED: Stream.REDUCE,
        Role.REDUCE_OUTPUT: Stream.REDUCE,
        Role.SHARD_GRADIENT: Stream.COMPUTE,
    }

    def __init__(
        self,
        units: Sequence[FlatUnit],
        gradients: Iterable[WholeGradient],
        had: Mapping[int, int],
        schedule: Schedule,
        *,
        separate_parts: bool,
        on_host: bool = False,
        replicas: Group | None = None,
    ) -> None:
        self._schedule, self._on_host = schedule, on_host
        self._separate_parts, self._replicas = separate_parts, replicas
        self._units = [
            _State(
                unit.groups,
                unit.options,
                [_Sum(group, PartTable(group.layout, separate=separate_parts)) for group in unit.groups],
            )
            for unit in units
        ]
        self._home = {
            parameter: (number, place, slot)
            for number, unit in enumerate(units)
            for place, group in enumerate(unit.groups)
            for slot, parameter in enumerate(group.parameters)
        }
        self._orders: list[list[int]] = []
        """The units of each pass in the order in which their forwards begin, as the runtime recorded it."""
        self._begun = 0
        self._ended: list[int] = []
        self._summing: list[int] = []
        super().__init__((unit.module for unit in units), had)
        self.pairs = separate_parts
        self._coming: list[tuple[WholeGradient, int]] = []
        """Whole gradients that have not come, and their buffers; the next is the last."""
        for gradient in sorted(gradients, key=lambda each: each.arrived, reverse=True):
            unit, place, slot = self._home[gradient.parameter]
            group = units[unit].groups[place]
            n_bytes = group.layout.slots[slot].elements * group.gathered_item_bytes
            self._coming.append((gradient, self.receive_gradient(gradient, unit, n_bytes)))

    def run(self, acts: Sequence[Acting]) -> ShardSchedule:
        """Go through all acts and return what was noted."""
        order: list[int] = []
        self._orders = []
        for acting in acts:
            if acting.act is Act.BEFORE_FORWARD:
                order.append(acting.unit)
            elif acting.act is Act.END_OF_PASS:
                self._orders.append(order)
                order = []
        self._orders.append(order)
        return super().run(acts)

    def before_forward(self, unit: int) -> None:
        self._collect()
        self._begun += 1
        self._unshard(unit)
        self._unshard_ahead(unit, self._orders[0][self._begun : self._begun + self._schedule.forward_prefetch])
        self._wait_gather(unit)

    def after_forward(self, unit: int, *, has_backward: bool) -> None:
        state = self._units[unit]
        if has_backward:
            state.before.append(self._ended[: -1 - self._schedule.backward_prefetch : -1])
            self._ended.append(unit)
        if self.is_root(unit):
            for other, each in enumerate(self._units):
                if each.in_flight:  # it was gathered ahead, and did not run
                    self._reshard(other)
        if not has_backward:
            self._reshard(unit)
        elif self.is_root(unit):
            return
        elif state.options.reshard_ranks is not None:
            self._keep_parts(unit, state.options.reshard_ranks)
        elif not state.options.keep:
            self._reshard(unit)

    def before_backward(self, unit: int) -> None:
        self._collect()
        state = self._units[unit]
        state.running += 1
        state.owes = True
        before = state.before.pop() if state.before else []
        state.ahead = [each for each in before if self._units[each].options.backward_gather]
        if state.options.backward_gather:
            self._unshard(unit)
        if self._schedule.backward_prefetch_at == "before":
            self._unshard_ahead(unit, state.ahead)
        self._wait_gather(unit)

    def after_backward(self, unit: int) -> None:
        self._collect(unit)
        state = self._units[unit]
        state.running = max(0, state.running - 1)
        if state.running:  # another run of it, side by side with this one, still reads them
            return
        self._reshard(unit)
        if not state.before:
            state.owes = False
            if self._begin_sums(unit, everything=True):
                self._advance_sums()
                self._summing.append(unit)
        if self._schedule.backward_prefetch_at == "after":
            self._unshard_ahead(unit, state.ahead)

    def end_pass(self) -> None:
        self._collect()
        for unit in reversed(range(len(self._units))):
            if self._begin_sums(unit, everything=self._units[unit].owes) and unit not in self._summing:
                self._summing.append(unit)
        while self._summing:
            self._advance_sums()
        for unit, state in enumerate(self._units):
            self._reshard(unit)
            state.running, state.owes = 0, False
            state.before.clear()
        self._ended.clear()
        self._begun = 0
        self._orders.pop(0)

    # Gathers

    def _unshard(self, unit: int) -> None:
        """Begin to gather, unless it is gathered or has begun."""
        state = self._units[unit]
        if state.gathered or state.in_flight:
            return
        state.in_flight = True
        resharded = bool(state.kept)
        for group in state.groups:
            n_bytes = group.gathered_bytes
            if not n_bytes:
                continue
            state.buffers.append(self.allocate(Role.PARAMETER, unit, n_bytes))
            if resharded:  # it is gathered from the ranks among which the forward left it
                self.copy(unit, 2 * n_bytes // (state.options.reshard_ranks or 1), Stream.COMPUTE)
            else:
                self.copy(unit, group.shard_bytes + n_bytes // group.layout.ranks, Stream.COPY)
            host_bytes = group.shard_bytes if self._on_host and not resharded else 0
            state.gathers.append(self.begin(Collective.ALL_GATHER, unit, n_bytes, Stream.GATHER, host_bytes=host_bytes))
            if resharded:
                self.free(state.kept.pop(0))

    def _unshard_ahead(self, now: int, units: Iterable[int]) -> None:
        """Begin to gather units that come after the one that runs now, as far as the bound allows."""
        limit = self._schedule.in_flight_bytes
        taken = sum(each.gathered_bytes for number, each in enumerate(self._units) if each.in_flight and number != now)
        for unit in units:
            state = self._units[unit]
            if state.gathered or state.in_flight:
                continue
            taken += state.gathered_bytes
            if limit is not None and taken > limit:
                return
            self._unshard(unit)

    def _wait_gather(self, unit: int) -> None:
        state = self._units[unit]
        if state.in_flight:
            for transfer in state.gathers:
                self.wait(transfer, unit)
            state.gathers.clear()
            state.in_flight, state.gathered = False, True

    def _keep_parts(self, unit: int, ranks: int) -> None:
        """Keep this rank's part among so many ranks of each buffer, and free the buffer."""
        state = self._units[unit]
        for buffer, group in zip(state.buffers, (each for each in state.groups if each.gathered_bytes), strict=True):
            state.kept.append(self.allocate(Role.KEPT_PART, unit, group.gathered_bytes // ranks))
            self.copy(unit, 2 * group.gathered_bytes // ranks, Stream.COMPUTE)
            self.free(buffer)
        state.buffers.clear()
        state.gathered = False

    def _reshard(self, unit: int) -> None:
        """Free the parameters, and what was kept of them."""
        self._wait_gather(unit)
        state = self._units[unit]
        for buffer in (*state.buffers, *state.kept):
            self.free(buffer)
        state.buffers.clear()
        state.kept.clear()
        state.gathered = False

    # Gradients and their reduction

    def _collect(self, ended: int | None = None) -> None:
        """Take the gradients that have come by now, each when it came, and all of a unit whose backward has ended.

        A pass after the first adds them to those that are there, which the trace has after the backward of the unit.
        """
        now = self.moment
        while self._coming and self._coming[-1][0].arrived < now:
            gradient, buffer = self._coming.pop()
            self.moment = gradient.arrived + 1
            self._take(gradient, buffer)
        self.moment = now
        for pair in [*reversed(self._coming)] if ended is not None else ():
            if pair[0].ready < now and self._home[pair[0].parameter][0] == ended:
                self._coming.remove(pair)
                self._take(*pair)

    def _take(self, gradient: WholeGradient, buffer: int) -> None:
        """Hold a gradient that has come, and fill the parts that it completes."""
        unit, place, slot = self._home[gradient.parameter]
        own = self._units[unit].sums[place]
        if own.under_way:  # it came late, and is reduced at the end of the pass
            self._finish_sum(own)
        if slot in own.come:  # it is added to what is there
            self.free(buffer)
            return
        own.come[slot] = gradient
        own.held[slot] = buffer
        for rank in own.table.completed_by(slot, own.come.__contains__):
            self._fill(unit, own, rank)

    def _fill(self, unit: int, own: _Sum, rank: int) -> None:
        """Copy the gradients that are held for a part into it, and free those that no other part waits for."""
        if rank in own.filled:
            return
        own.filled.add(rank)
        self._allocate_part(unit, own, rank)
        group, layout = own.group, own.group.layout
        held = [slot for slot in own.table.slots_of[rank] if slot in own.held]
        elements = sum(layout.part(layout.slots[slot], rank).elements for slot in held)
        self.copy(unit, elements * (group.gathered_item_bytes + group.reduced_item_bytes), Stream.COMPUTE)
        for slot in held:
            if own.filled.issuperset(own.table.ranks_of[slot]):
                self.free(own.held.pop(slot))

    def _allocate_part(self, unit: int, own: _Sum, rank: int) -> None:
        """Allocate the part of a rank, or all where they are one tensor."""
        key, parts = (rank, 1) if own.table.separate else (0, own.group.layout.ranks)
        if key not in own.parts:
            own.parts[key] = self.allocate(Role.REDUCE_INPUT, unit, parts * own.group.part_bytes)

    def _begin_sums(self, unit: int, *, everything: bool) -> bool:
        """Begin to reduce gradients: of all groups that train, or of those that have any. Return whether there are."""
        begun = False
        for own in self._units[unit].sums:
            if not own.under_way and (own.come or (everything and own.group.trains)):
                self._begin_sum(unit, own)
                begun = True
        return begun

    def _begin_sum(self, unit: int, own: _Sum) -> None:
        """Begin a reduction; a gradient that never came counts as zeros."""
        ranks, part_bytes = own.group.layout.ranks, own.group.part_bytes
        for rank in range(ranks):
            self._fill(unit, own, rank)
        own.under_way = True
        if ranks == 1:  # the only part is the sum
            own.output = own.parts.pop(0)
            return
        received = ranks - 2 if own.table.separate else 0  # the first that is received becomes the sum
        own.output = self.allocate(Role.REDUCE_OUTPUT, unit, part_bytes)
        own.received = [self.allocate(Role.RECEIVED, unit, part_bytes) for _ in range(received)]
        host_bytes = own.group.layout.shard_elements * own.group.gradient_item_bytes if self._on_host else 0
        own.transfer = self.begin(
            Collective.REDUCE_SCATTER, unit, ranks * part_bytes, Stream.REDUCE, host_bytes=host_bytes
        )

    def _advance_sums(self) -> None:
        """Go on with the reductions of earlier units: to the sum over the replicas, or to the end."""
        unfinished: list[int] = []
        for unit in self._summing:
            for own in self._units[unit].sums:
                if self._replicas is not None and own.under_way and own.all_reduce is None:
                    self._begin_all_reduce(own, self._replicas)
                    unfinished.append(unit)
                else:
                    self._finish_sum(own)
        self._summing = list(dict.fromkeys(unfinished))

    def _begin_all_reduce(self, own: _Sum, replicas: Group) -> None:
        """Wait for a reduction among the ranks that shard, free its parts, and begin to sum it over the replicas."""
        unit = self._home[own.group.parameters[0]][0]
        self._take_output(unit, own)
        part_bytes = own.group.part_bytes
        if self._separate_parts:
            own.received = [self.allocate(Role.RECEIVED, unit, part_bytes) for _ in range(replicas.ranks - 1)]
        own.all_reduce = self.begin(Collective.ALL_REDUCE, unit, part_bytes, Stream.ALL_REDUCE, group=replicas)

    def _take_output(self, unit: int, own: _Sum) -> None:
        """Wait for a reduction among the ranks that shard, and free its parts."""
        if own.transfer is not None:
            self.wait(own.transfer, unit)
            if self._separate_parts:  # what every other rank has sent is added
                others = own.group.layout.ranks - 1
                self.copy(unit, 3 * others * own.group.part_bytes, Stream.COMPUTE)
        for buffer in (*own.received, *own.parts.values()):
            self.free(buffer)
        own.transfer, own.received, own.parts = None, [], {}

    def _finish_sum(self, own: _Sum) -> None:
        """Wait for a reduction, free its parts, and make what it leaves the gradients of the shards."""
        if not own.under_way:
            return
        unit = self._home[own.group.parameters[0]][0]
        if self._replicas is not None and own.all_reduce is None:
            self._begin_all_reduce(own, self._replicas)
        if own.all_reduce is not None:
            self.wait(own.all_reduce, unit)
            own.all_reduce = None
        self._take_output(unit, own)
        output = own.output
        if own.group.gradient_item_bytes != own.group.reduced_item_bytes and not self._on_host:
            n_bytes = own.group.layout.shard_elements * own.group.gradient_item_bytes
            reduced, output = output, self.allocate(Role.SHARD_GRADIENT, unit, n_bytes)
            self.free(reduced)
        if self._on_host:
            self.free(output)
        else:
            self.keep_gradient(output, own.come.values())
        own.come, own.filled, own.output, own.under_way = {}, set(), NO_INDEX, False
