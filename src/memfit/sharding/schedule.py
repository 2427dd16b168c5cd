"""When the units of a sharded step act, in the order of FSDP2's hooks."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from memfit.capture import NEVER, Category, Parameter, Trace
from memfit.cost import Collective, CollectiveModel, Runtime
from memfit.hardware import Device, Target
from memfit.hardware.efficiency import Family
from memfit.sharding.allocations import Levels
from memfit.sharding.gradients import WholeGradient
from memfit.sharding.options import ShardDtypes, elements, item_bytes, padded_elements
from memfit.sharding.units import Pass, ShardUnit


class Act(enum.IntEnum):
    """What happens between two ops, in the order in which it does when several meet there."""

    AFTER_BACKWARD = 0
    END_OF_PASS = 1
    AFTER_FORWARD = 2
    BEFORE_FORWARD = 3
    BEFORE_BACKWARD = 4


class Acting(NamedTuple):
    """An act before op `moment`, of the unit with this number; of all units at the end of a pass."""

    moment: int
    act: Act
    unit: int


def actings(units: Sequence[ShardUnit], passes: Sequence[Pass]) -> list[Acting]:
    """Every act of the step in order.

    Where runs of units lie in one another, the outer one begins first and ends last. The backward of an outer run that
    has ops after the inner one begins first too; if it has none, both wait for the gradient of the same tensor, and the
    inner one asked for it first.
    """
    found: list[tuple[tuple[int, int, int, int], Acting]] = []

    def note(moment: int, act: Act, unit: int, first: int = 0, second: int = 0) -> None:
        found.append(((moment, act, first, second), Acting(moment, act, unit)))

    for number, unit in enumerate(units):
        for call in unit.calls:
            note(call.begin, Act.BEFORE_FORWARD, number, call.depth)
            note(call.end, Act.AFTER_FORWARD, number, -call.depth)
            if call.backward_begin != NEVER:
                note(call.backward_begin, Act.BEFORE_BACKWARD, number, -call.end, -call.depth)
                if call.reduces:
                    note(call.backward_end, Act.AFTER_BACKWARD, number, -call.depth)
    for each in passes:
        note(each.end, Act.END_OF_PASS, NEVER)
    return [acting for _, acting in sorted(found, key=lambda pair: pair[0])]


# -- What fully sharded training makes, moves and frees between the ops of a step -------------------------------------
#
# Note [Sharded runtime]: this follows FSDP2 (`torch/distributed/fsdp/_fully_shard`, torch 2.13) act by act, since
# what is there at once depends on the order.
#
# - before forward: a flat buffer is gathered and copied out into the parameters. Only then is the buffer of the unit
#   before it freed; its own stays until the next unit has copied out, or the forward ends.
# - after forward: the parameters are freed, except the root's.
# - before backward: the buffer, which was gathered ahead, is copied out and freed; then the buffer of the unit that ran
#   before this one in the forward is gathered ahead.
# - after backward: the parameters are freed, then the last reduction's input; the whole gradients are copied into a new
#   input, freed, and reduced into a flat output, which becomes the gradient of the shards or is added to it.
# - at the end of a pass: the same for the root and for every unit whose backward was not seen to end.
#
# With `on_host`, as FSDP2's `CPUOffloadPolicy` does it, shards are copied to the device before each gather, and what
# is reduced is copied to the host and freed.
#
# Gradients that several runs of a pass have in common are complete after the last backward of these: autograd sums
# them before it gives them to the parameter. They are reduced there, once for each pass.


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
    host_bytes: int = 0


@dataclass(slots=True)
class _Group:
    """A unit, where its parameters are, and its whole gradients that wait for a reduction."""

    unit: ShardUnit
    parameters: list[Parameter]
    waiting: list[tuple[WholeGradient, int]]
    copied: list[int] = field(default_factory=list)
    buffer: int | None = None
    gather: int = NEVER
    in_backward: bool = False
    after_backward: bool = False
    places: list[int] = field(default_factory=list)

    @property
    def is_root(self) -> bool:
        return not self.unit.module


class ShardedRuntime:
    """Goes through the acts of a step once; levels get what it makes, `transfers` what it moves.

    `program` has every beginning of a transfer (False) and every wait for one (True), in order.
    """

    def __init__(
        self,
        trace: Trace,
        levels: Levels,
        ranks: int,
        dtypes: ShardDtypes,
        units: Sequence[ShardUnit],
        members: Sequence[list[int]],
        gradients: Iterable[WholeGradient],
        on_host: bool = False,
    ) -> None:
        self.transfers: list[Transfer] = []
        self.program: list[tuple[bool, int]] = []
        self._levels, self._ranks, self._dtypes, self._on_host = levels, ranks, dtypes, on_host
        self._parameters = trace.parameters
        self._moment = 0
        self._last_buffer: int | None = None
        self._input: tuple[int, int] | None = None
        self._forward: list[_Group] = []
        self._gradient_death: dict[int, int] = {
            number: trace.storages[parameter.gradient].free_after
            for number, parameter in enumerate(trace.parameters)
            if parameter.gradient != NEVER and trace.storages[parameter.gradient].alloc_at == NEVER
        }
        self._groups = [
            _Group(unit, [trace.parameters[number] for number in held], [])
            for unit, held in zip(units, members, strict=True)
        ]
        home = {number: group for group, held in zip(self._groups, members, strict=True) for number in held}
        for gradient in gradients:
            parameter, group = trace.parameters[gradient.parameter], home[gradient.parameter]
            n_bytes = elements(parameter) * item_bytes(dtypes.gathered(parameter))
            made = levels.make(Category.GRADIENT, n_bytes, gradient.alloc_at, module=group.unit.module, by_op=True)
            group.waiting.append((gradient, made))

    def run(self, actings: Iterable[Acting]) -> None:
        """Act by act."""
        for moment, act, number in actings:
            self._moment = moment
            if act is Act.END_OF_PASS:
                self._end_of_pass()
            elif act is Act.BEFORE_FORWARD:
                self._before_forward(self._groups[number])
            elif act is Act.AFTER_FORWARD:
                self._after_forward(self._groups[number])
            elif act is Act.BEFORE_BACKWARD:
                self._before_backward(self._groups[number])
            else:
                self._after_backward(self._groups[number])

    def _before_forward(self, group: _Group) -> None:
        self._gather(group, ahead=self._last_buffer is not None)
        previous = self._last_buffer
        buffer = self._copy_out(group)
        if buffer is not None:
            if previous is not None:
                self._levels.end(previous, self._moment)
            self._last_buffer = buffer

    def _after_forward(self, group: _Group) -> None:
        if not group.is_root:
            self._reshard(group)
        if group.parameters:
            group.places.append(len(self._forward))
            self._forward.append(group)
        if group.is_root and self._last_buffer is not None:
            self._levels.end(self._last_buffer, self._moment)
            self._last_buffer = None

    def _before_backward(self, group: _Group) -> None:
        if group.in_backward:
            return
        group.in_backward, group.after_backward = True, False
        self._gather(group)
        buffer = self._copy_out(group)
        if buffer is not None:
            self._levels.end(buffer, self._moment)
        if group.places and (place := group.places.pop()) > 0:
            self._gather(self._forward[place - 1])

    def _after_backward(self, group: _Group) -> None:
        group.in_backward, group.after_backward = False, True
        ready = [each for each in group.waiting if each[0].ready < self._moment]
        self._reshard(group)
        self._free_input()
        if ready:
            group.waiting = [each for each in group.waiting if each[0].ready >= self._moment]
            self._reduce(group, ready)

    def _end_of_pass(self) -> None:
        for group in self._groups:
            late = any(gradient.ready < self._moment for gradient, _ in group.waiting)
            if not group.after_backward or late:
                self._after_backward(group)
            if group.buffer is not None:  # gathered ahead for a run that had no backward
                self._levels.end(group.buffer, self._moment)
                self._wait(group.gather)
                group.buffer = None
            group.in_backward = group.after_backward = False
            group.places.clear()
        self._free_input()
        self._forward.clear()

    def _gather(self, group: _Group, *, ahead: bool = False) -> None:
        """Begin to gather, unless it is gathered or has begun. Shards that are cast or on the host are copied first."""
        if group.buffer is not None or group.copied or not group.parameters:
            return
        other = [
            each for each in group.parameters if self._on_host or self._dtypes.gathered(each) != self._dtypes.kept(each)
        ]
        copied = self._flat_bytes(other, self._dtypes.gathered) // self._ranks
        copy = self._make(group, Category.COMMUNICATION, copied) if other else None
        group.buffer = self._make(group, Category.COMMUNICATION, group.unit.gathered_bytes)
        if copy is not None:
            self._levels.end(copy, self._moment)
        kept = self._flat_bytes(group.parameters, self._dtypes.kept) // self._ranks
        group.gather = self._begin(Collective.ALL_GATHER, group, group.unit.gathered_bytes, kept, ahead=ahead)

    def _copy_out(self, group: _Group) -> int | None:
        """Wait for a gather and copy it into the parameters; gives the buffer, which is not needed any more."""
        if group.buffer is None:
            return None
        self._wait(group.gather)
        for parameter in group.parameters:
            n_bytes = self._flat_bytes([parameter], self._dtypes.gathered)
            group.copied.append(self._make(group, Category.GATHERED_PARAMETER, n_bytes))
        buffer, group.buffer = group.buffer, None
        return buffer

    def _reshard(self, group: _Group) -> None:
        for allocation in group.copied:
            self._levels.end(allocation, self._moment)
        group.copied.clear()

    def _reduce(self, group: _Group, ready: Sequence[tuple[WholeGradient, int]]) -> None:
        held = [self._parameters[number] for number in dict.fromkeys(gradient.parameter for gradient, _ in ready)]
        n_bytes = self._flat_bytes(held, self._dtypes.reduced)
        given = self._make(group, Category.COMMUNICATION, n_bytes)
        for _, allocation in ready:
            self._levels.end(allocation, self._moment)
        output = self._make(group, Category.GRADIENT, n_bytes // self._ranks)
        kept = self._flat_bytes(held, self._dtypes.kept) // self._ranks
        self._input = given, self._begin(Collective.REDUCE_SCATTER, group, n_bytes, kept)
        if any(self._dtypes.reduced(each) != self._dtypes.kept(each) for each in held):
            reduced = output
            output = self._make(group, Category.GRADIENT, kept)
            self._levels.end(reduced, self._moment)
        if self._on_host:
            self._levels.end(output, self._moment)
        else:
            self._keep(output, [gradient for gradient, _ in ready])

    def _keep(self, output: int, gradients: Sequence[WholeGradient]) -> None:
        """The output stays while it is the gradient of any shard; what is added to another or used up here goes."""
        new = [gradient for gradient in gradients if not self._has_gradient(gradient.parameter)]
        self._gradient_death.update((gradient.parameter, gradient.free_after) for gradient in new)
        deaths = [gradient.free_after for gradient in new]
        if NEVER in deaths:
            return
        last = max(deaths, default=NEVER)
        if last < self._moment:
            self._levels.end(output, self._moment)
        else:
            self._levels.end_with(output, last)

    def _has_gradient(self, parameter: int) -> bool:
        free_after = self._gradient_death.get(parameter)
        return free_after is not None and (free_after == NEVER or free_after >= self._moment)

    def _free_input(self) -> None:
        if self._input is not None:
            allocation, transfer = self._input
            self._wait(transfer)
            self._levels.end(allocation, self._moment)
            self._input = None

    def _begin(self, kind: Collective, group: _Group, n_bytes: int, shard_bytes: int, *, ahead: bool = False) -> int:
        at = self._moment
        self.transfers.append(
            Transfer(
                kind=kind,
                module=group.unit.module,
                size_bytes=n_bytes,
                issued=at,
                needed=at,
                ahead=ahead,
                host_bytes=shard_bytes if self._on_host else 0,
            )
        )
        self.program.append((False, len(self.transfers) - 1))
        return len(self.transfers) - 1

    def _wait(self, transfer: int) -> None:
        self.transfers[transfer] = replace(self.transfers[transfer], needed=self._moment)
        self.program.append((True, transfer))

    def _make(self, group: _Group, category: Category, n_bytes: int) -> int:
        return self._levels.make(category, n_bytes, self._moment, module=group.unit.module)

    def _flat_bytes(self, parameters: Iterable[Parameter], dtype_of: Callable[[Parameter], str]) -> int:
        """Bytes of whole, padded parameters one after another."""
        return sum(padded_elements(each, self._ranks) * item_bytes(dtype_of(each)) for each in parameters)


# -- The time of a sharded step's collectives, and how much of it compute does not hide -------------------------------


def communication(
    runtime: Runtime, target: Target, transfers: Sequence[Transfer], program: Sequence[tuple[bool, int]]
) -> tuple[float, float]:
    """Milliseconds of all collectives, and those for which the device waits.

    Collectives run one after another, beside the ops. A gather of the forward begins when the unit before it has its
    parameters, one of the backward when the backward of the unit before it begins, and both are waited for where the
    unit's own run begins: each hides behind the compute of its neighbour. A reduction begins when its unit's backward
    ends and is waited for when that of the next unit ends, or the pass does. What is copied from the host goes before
    its gather and what is copied to it after its reduction, in the same line.
    """
    model, link = CollectiveModel(target), target.device.host_link
    cost: dict[tuple[Collective, int, int], float] = {}
    times = runtime.cumulative_ms
    total = waited = free = copied_out = 0.0
    done = [0.0] * len(transfers)
    for waits, number in program:
        transfer = transfers[number]
        if waits:
            now = float(times[transfer.needed]) + waited
            waited += max(0.0, done[number] - now)
            copied_out = max(now, done[number])
            continue
        key = transfer.kind, transfer.size_bytes, transfer.host_bytes
        if key not in cost:
            host_ms = link.transfer_ms(transfer.host_bytes) if transfer.host_bytes else 0.0
            cost[key] = host_ms + model.collective_ms(transfer.kind, transfer.size_bytes)
        now = float(times[transfer.issued]) + waited
        done[number] = free = max(free, copied_out if transfer.ahead else now) + cost[key]
        total += cost[key]
    return total, waited


def slowed_ms(transfers: Sequence[Transfer], target: Target, communication_ms: float, waited_ms: float) -> float:
    """What kernels lose while collectives move data beside them; a collective's latency slows none."""
    model = CollectiveModel(target)
    slowdown = model.backend.slowdown
    if not slowdown or not communication_ms:
        return 0.0
    sizes = Counter((each.kind, each.size_bytes) for each in transfers)
    moving_ms = sum(times * model.estimate(kind, size).transfer_ms for (kind, size), times in sizes.items())
    return slowdown * moving_ms * (1.0 - waited_ms / communication_ms)


def copies_ms(transfers: Sequence[Transfer], units: Sequence[ShardUnit], device: Device) -> float:
    """What FSDP2 copies between its buffers and whole tensors while nothing else computes, at the device's bandwidth.

    A gathered buffer is read and written once to become parameters, whole gradients to become a reduction's input.
    It is not part of `communication`, but of a sharding's `beside_ms`.
    """
    gradients = {unit.module: unit.gradient_bytes for unit in units}
    moved = sum(
        2 * each.size_bytes if each.kind is Collective.ALL_GATHER else gradients[each.module] + each.size_bytes
        for each in transfers
        if each.kind is not Collective.ALL_REDUCE  # DDP's copies are part of its communication
    )
    reached = device.memory_bandwidth_bytes_per_s * device.efficiency[Family.COPY].bandwidth
    return moved / reached * 1e3
