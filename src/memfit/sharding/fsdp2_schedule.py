"""The schedule of FSDP2: every parameter is sharded by its rows, gathered with the others of its unit, and copied out.

Note [FSDP2's schedule]: this follows FSDP2 (`torch/distributed/fsdp/_fully_shard`, torch 2.13) act by act, since what
is there at once depends on the order.

- before forward: a flat buffer is gathered and copied out into the parameters. Only then is the buffer of the unit
  before it freed; its own stays until the next unit has copied out, or the forward ends.
- after forward: the parameters are freed, except the root's and those of units that are kept. Where these reshard to
  fewer ranks, this rank's part of each parameter is copied first, and kept until it is copied out again.
- before backward: the buffer, which was gathered ahead, is copied out and freed; then the buffer of the unit that ran
  before this one in the forward is gathered ahead.
- after backward: the parameters are freed, then the last reduction's input; the whole gradients are copied into a new
  input, freed, and reduced into a flat output, which becomes the gradient of the shards or is added to it. The whole
  gradient of the last parameter is freed after that: a variable of a loop in `foreach_reduce` refers to it until then.
- at the end of a pass: the same for the root and for every unit whose backward was not seen to end.

On a hybrid mesh the output is then summed over the replicas, in place, and is held until the pass ends, also where it
is cast (`_all_reduce_state`). Another `prefetch` than 1 is done with lists, after a unit's copy-out and in the order of
the plan's units (`engines/fsdp2.py`).

With `on_host`, as FSDP2's `CPUOffloadPolicy` does it, shards are copied to the device before each gather, and what
is reduced is copied to the host and freed.

Gradients that several runs of a pass have in common are complete after the last backward of these: autograd sums
them before it gives them to the parameter. They are reduced there, once for each pass.

Note [FSDP2's streams]: `foreach_all_gather` allocates the input, where shards are cast, and the output under
`all_gather_copy_in_stream`, in the forward and in the backward; the collective runs on `all_gather_stream`. Copy-out
is on the current stream, and so are the parameters that it fills. `foreach_reduce` allocates its input on the current
stream too, and its output, with the cast of that, on `reduce_scatter_stream`; on a hybrid mesh the cast is on
`all_reduce_stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from memfit.capture import NO_INDEX, Parameter, Trace
from memfit.cost import Collective, Group
from memfit.memory import Stream
from memfit.sharding.gradients import WholeGradient, gradients_before
from memfit.sharding.options import ShardDtypes, elements, item_bytes, padded_elements
from memfit.sharding.schedule import Role, Scheduler
from memfit.sharding.units import ShardUnit


@dataclass(slots=True)
class _Group:
    """The parameters of a unit, where they are, and its whole gradients that wait for a reduction.

    `input_bytes` are those of shards that are cast or come from the host before they are gathered. What is `kept` is
    not resharded after the forward.
    """

    parameter_bytes: list[int]
    gathered_bytes: int
    kept_bytes: int
    input_bytes: int
    kept: bool
    reshard_ranks: int | None = None
    waiting: list[tuple[WholeGradient, int]] = field(default_factory=list)
    unsharded: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    all_reduce: tuple[int, int | None] | None = None
    """The sum over the replicas, and its buffer where nothing else keeps that."""
    buffer: int | None = None
    gather: int = NO_INDEX
    in_backward: bool = False
    after_backward: bool = False
    places: list[int] = field(default_factory=list)


class FSDP2Scheduler(Scheduler):
    """Notes what FSDP2 does for units of a trace; `members` are the numbers of each unit's parameters."""

    streams: ClassVar = {
        Role.GATHER_INPUT: Stream.COPY,
        Role.GATHER_OUTPUT: Stream.COPY,
        Role.PARAMETER: Stream.COMPUTE,
        Role.KEPT_PART: Stream.COMPUTE,
        Role.WHOLE_GRADIENT: Stream.COMPUTE,
        Role.REDUCE_INPUT: Stream.COMPUTE,
        Role.REDUCE_OUTPUT: Stream.REDUCE,
        Role.SHARD_GRADIENT: Stream.REDUCE,
    }

    def __init__(
        self,
        trace: Trace,
        units: Sequence[ShardUnit],
        members: Sequence[Sequence[int]],
        gradients: Iterable[WholeGradient],
        *,
        ranks: int,
        dtypes: ShardDtypes,
        on_host: bool = False,
        prefetch: int = 1,
        replicas: Group | None = None,
        fewer: Group | None = None,
    ) -> None:
        self._ranks, self._dtypes, self._on_host = ranks, dtypes, on_host
        self._prefetch, self._replicas, self._fewer = prefetch, replicas, fewer
        self._parameters = trace.parameters
        self._forward_buffer: int | None = None
        self._input: tuple[int, int, int] | None = None
        """The input of the last reduction, its transfer and its unit."""
        self._forward: list[int] = []
        self._groups = [
            self._group(unit, [trace.parameters[number] for number in held])
            for unit, held in zip(units, members, strict=True)
        ]
        super().__init__((unit.module for unit in units), gradients_before(trace))
        if replicas is not None:
            self.stream_of[Role.SHARD_GRADIENT] = Stream.ALL_REDUCE
        self._place = {number: place for held in members for place, number in enumerate(held)}
        home = {number: unit for unit, held in enumerate(members) for number in held}
        for gradient in gradients:
            unit = home[gradient.parameter]
            made = self.receive_gradient(gradient, unit, self._gradient_bytes(gradient))
            self._groups[unit].waiting.append((gradient, made))

    def before_forward(self, unit: int) -> None:
        self._unshard(unit, ahead=self._forward_buffer is not None)
        previous = self._forward_buffer
        buffer = self._copy_out(unit)
        if buffer is not None:
            if previous is not None:
                self.free(previous)
            self._forward_buffer = buffer
        if self._prefetch != 1:
            for other in range(unit + 1, min(len(self._groups), unit + 1 + self._prefetch)):
                self._unshard(other)

    def after_forward(self, unit: int, *, has_backward: bool) -> None:
        group = self._groups[unit]
        if group.reshard_ranks is not None:
            self._reshard_to_part(unit, group, group.reshard_ranks)
        elif not group.kept:
            self._reshard(group)
        if group.parameter_bytes:
            group.places.append(len(self._forward))
            self._forward.append(unit)
        if self.is_root(unit) and self._forward_buffer is not None:
            self.free(self._forward_buffer)
            self._forward_buffer = None

    def before_backward(self, unit: int) -> None:
        group = self._groups[unit]
        if group.in_backward:
            return
        group.in_backward, group.after_backward = True, False
        self._unshard(unit)
        buffer = self._copy_out(unit)
        if buffer is not None:
            self.free(buffer)
        if self._prefetch != 1:
            first = unit if unit else len(self._groups)
            for other in range(first - 1, max(0, first - 1 - self._prefetch), -1):
                self._unshard(other)
        elif group.places and (place := group.places.pop()) > 0:
            self._unshard(self._forward[place - 1])

    def after_backward(self, unit: int) -> None:
        group = self._groups[unit]
        group.in_backward, group.after_backward = False, True
        ready = [each for each in group.waiting if each[0].ready < self.moment]
        self._reshard(group)
        self._free_input()
        if ready:
            group.waiting = [each for each in group.waiting if each[0].ready >= self.moment]
            self._reduce(unit, ready)

    def end_pass(self) -> None:
        for unit, group in enumerate(self._groups):
            late = any(gradient.ready < self.moment for gradient, _ in group.waiting)
            if not group.after_backward or late:
                self.after_backward(unit)
            if group.all_reduce is not None:
                self._free_all_reduced(unit, group)
            if group.buffer is not None:  # gathered ahead for a run that had no backward
                self.free(group.buffer)
                self.wait(group.gather, unit)
                group.buffer = None
            group.in_backward = group.after_backward = False
            group.places.clear()
        self._free_input()
        self._forward.clear()

    def _unshard(self, unit: int, *, ahead: bool = False) -> None:
        """Begin to gather, unless it is gathered or has begun. Shards that are cast or on the host are copied first."""
        group = self._groups[unit]
        if group.buffer is not None or group.unsharded or not group.parameter_bytes:
            return
        ranks, from_parts = self._ranks, bool(group.parts)
        if from_parts and group.reshard_ranks is not None:
            ranks = group.reshard_ranks
        input_bytes = group.input_bytes * self._ranks // ranks
        copy = self.allocate(Role.GATHER_INPUT, unit, input_bytes) if input_bytes else None
        group.buffer = self.allocate(Role.GATHER_OUTPUT, unit, group.gathered_bytes)
        read_bytes = group.gathered_bytes // ranks if from_parts else group.kept_bytes
        self.copy(unit, read_bytes + group.gathered_bytes // ranks, Stream.COPY)
        group.gather = self.begin(
            Collective.ALL_GATHER,
            unit,
            group.gathered_bytes,
            Stream.GATHER,
            ahead=ahead,
            host_bytes=group.kept_bytes if self._on_host and not from_parts else 0,
            group=self._fewer if from_parts else None,
        )
        if copy is not None:  # `foreach_all_gather` refers to it until it returns
            self.free(copy)

    def _copy_out(self, unit: int) -> int | None:
        """Wait for a gather and copy it into the parameters; return the buffer, which is not needed any more."""
        group = self._groups[unit]
        if group.buffer is None:
            return None
        self.wait(group.gather, unit)
        group.unsharded += [self.allocate(Role.PARAMETER, unit, n_bytes) for n_bytes in group.parameter_bytes]
        self.copy(unit, 2 * group.gathered_bytes, Stream.COMPUTE)
        for part in group.parts:
            self.free(part)
        group.parts.clear()
        buffer, group.buffer = group.buffer, None
        return buffer

    def _reshard(self, group: _Group) -> None:
        for buffer in group.unsharded:
            self.free(buffer)
        group.unsharded.clear()

    def _reshard_to_part(self, unit: int, group: _Group, ranks: int) -> None:
        """Keep this rank's part of each parameter among fewer ranks, and free the parameter."""
        for buffer, n_bytes in zip(group.unsharded, group.parameter_bytes, strict=bool(group.unsharded)):
            group.parts.append(self.allocate(Role.KEPT_PART, unit, n_bytes // ranks))
            self.copy(unit, 2 * n_bytes // ranks, Stream.COMPUTE)
            self.free(buffer)
        group.unsharded.clear()

    def _reduce(self, unit: int, ready: Sequence[tuple[WholeGradient, int]]) -> None:
        held = [self._parameters[number] for number in dict.fromkeys(gradient.parameter for gradient, _ in ready)]
        n_bytes = self._flat_bytes(held, self._dtypes.reduced)
        given = self.allocate(Role.REDUCE_INPUT, unit, n_bytes)
        self.copy(unit, sum(self._gradient_bytes(each) for each, _ in ready) + n_bytes, Stream.COMPUTE)
        last = max((gradient.parameter for gradient, _ in ready), key=self._place.__getitem__)
        for gradient, buffer in ready:
            if gradient.parameter != last:
                self.free(buffer)
        output = self.allocate(Role.REDUCE_OUTPUT, unit, n_bytes // self._ranks)
        kept = self._flat_bytes(held, self._dtypes.kept) // self._ranks
        host_bytes = kept if self._on_host else 0
        transfer = self.begin(Collective.REDUCE_SCATTER, unit, n_bytes, Stream.REDUCE, host_bytes=host_bytes)
        self._input = given, transfer, unit
        group, summed = self._groups[unit], None
        if self._replicas is not None:
            self._free_all_reduced(unit, group)
            n_bytes //= self._ranks
            summed = self.begin(Collective.ALL_REDUCE, unit, n_bytes, Stream.ALL_REDUCE, group=self._replicas)
        if any(self._dtypes.reduced(each) != self._dtypes.kept(each) for each in held):
            reduced = output
            output = self.allocate(Role.SHARD_GRADIENT, unit, kept)
            if summed is None:
                self.free(reduced)
            else:
                group.all_reduce = summed, reduced
        gradients = [gradient for gradient, _ in ready]
        if self._on_host or self.note_gradient(output, gradients):
            if summed is None or group.all_reduce is not None:
                self.free(output)
            else:
                group.all_reduce = summed, output
        elif summed is not None and group.all_reduce is None:
            group.all_reduce = summed, None
        for gradient, buffer in ready:
            if gradient.parameter == last:
                self.free(buffer)

    def _free_all_reduced(self, unit: int, group: _Group) -> None:
        """Wait for the sum over the replicas, and free its buffer where nothing else keeps it."""
        if group.all_reduce is None:
            return
        transfer, buffer = group.all_reduce
        self.wait(transfer, unit)
        if buffer is not None:
            self.free(buffer)
        group.all_reduce = None

    def _free_input(self) -> None:
        """Wait for the last reduction and free its input."""
        if self._input is not None:
            buffer, transfer, unit = self._input
            self.wait(transfer, unit)
            self.free(buffer)
            self._input = None

    def _group(self, unit: ShardUnit, parameters: Sequence[Parameter]) -> _Group:
        dtypes = self._dtypes
        other = [each for each in parameters if self._on_host or dtypes.gathered(each) != dtypes.kept(each)]
        return _Group(
            parameter_bytes=[self._flat_bytes([each], dtypes.gathered) for each in parameters],
            gathered_bytes=unit.gathered_bytes,
            kept_bytes=self._flat_bytes(parameters, dtypes.kept) // self._ranks,
            input_bytes=self._flat_bytes(other, dtypes.gathered) // self._ranks,
            kept=unit.kept,
            reshard_ranks=unit.reshard_ranks,
        )

    def _gradient_bytes(self, gradient: WholeGradient) -> int:
        parameter = self._parameters[gradient.parameter]
        return elements(parameter) * item_bytes(self._dtypes.gathered(parameter))

    def _flat_bytes(self, parameters: Iterable[Parameter], dtype_of: Callable[[Parameter], str]) -> int:
        """Bytes of whole, padded parameters one after another."""
        return sum(padded_elements(each, self._ranks) * item_bytes(dtype_of(each)) for each in parameters)
