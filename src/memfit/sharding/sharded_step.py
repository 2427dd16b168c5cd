"""What fully sharded training changes in a step: levels of memory and time of communication, for fixed units.

Each rank keeps a shard of every parameter, gradient and optimizer state: under FSDP2 cut along the first dimension and
padded to whole rows, in memfit's flat layout a part of the flat tensor of its unit. What a unit gathers, reduces and
frees, and when, is in Note [FSDP2's schedule] and Note [The flat schedule].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from memfit.capture import BEFORE_STEP, NO_INDEX, Category, Phase, Trace
from memfit.cost import Group, Runtime
from memfit.errors import InputError
from memfit.hardware import HALF_BYTES, Target
from memfit.memory import Timeline
from memfit.sharding.allocations import Levels
from memfit.sharding.ddp import replicate
from memfit.sharding.flat_schedule import FlatScheduler, FlatUnit, Schedule, UnitOptions, flat_units
from memfit.sharding.fsdp2_schedule import FSDP2Scheduler
from memfit.sharding.gradients import WholeGradient, casts_of, gradients_before, whole_gradients, without_casts
from memfit.sharding.host_step import HostStep, with_host_step
from memfit.sharding.input_gradients import held_input_gradients
from memfit.sharding.joining import JoinableUnit, join_neighbours
from memfit.sharding.options import (
    ShardDtype,
    ShardDtypes,
    ShardOptions,
    elements,
    elements_of_rank,
    item_bytes,
    on_shards,
    padded_elements,
    shard_bytes,
)
from memfit.sharding.result import Sharding
from memfit.sharding.schedule import Scheduler, Transfer, actings, communication, copies_ms, slowed_ms
from memfit.sharding.units import (
    ShardCall,
    ShardUnit,
    find_passes,
    find_units,
    in_order_of_fsdp2,
    join_units,
    members_of,
    repeated_blocks,
)

__all__ = [
    "FlatOptions",
    "ShardCall",
    "ShardDtype",
    "ShardOptions",
    "ShardUnit",
    "Sharding",
    "Transfer",
    "repeated_blocks",
    "shard",
    "shard_bytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOptions:
    """How memfit's own runtime is told to shard: when units gather, and what each does after its forward."""

    schedule: Schedule = field(default_factory=Schedule)
    units: Mapping[str, UnitOptions] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shards:
    """What a rank keeps of each parameter: `kept` elements, of the shards' dtype.

    `trained` of them the optimizer works on: FSDP2 pads the shards of the last ranks, and not their optimizer state.
    """

    trace: Trace
    kept: Sequence[int]
    trained: Sequence[int]
    dtypes: ShardDtypes

    def bytes_of(self, number: int) -> int:
        """Bytes of the shard of a parameter, and of its gradient's."""
        return self.kept[number] * item_bytes(self.dtypes.kept(self.trace.parameters[number]))

    def trained_bytes_of(self, number: int) -> int:
        """Bytes of what the optimizer works on of a parameter."""
        return self.trained[number] * item_bytes(self.dtypes.kept(self.trace.parameters[number]))

    @property
    def trained_bytes(self) -> int:
        """Bytes of what the optimizer works on of all parameters that train."""
        return sum(self.trained_bytes_of(number) for number, each in enumerate(self.trace.parameters) if each.trainable)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state of these shards."""
        return sum(self._state_bytes(number) for number, each in enumerate(self.trace.parameters) if each.trainable)

    def _state_bytes(self, number: int) -> int:
        parameter = self.trace.parameters[number]
        whole = max(1, elements(parameter)) * item_bytes(parameter.dtype)
        return sum(self.trace.storages[each].bytes for each in parameter.state) * self.bytes_of(number) // whole


def shard(
    timeline: Timeline,
    runtime: Runtime,
    target: Target,
    options: ShardOptions | None = None,
    *,
    flat: FlatOptions | None = None,
    on_host: bool = False,
    rank: int = 0,
) -> Sharding:
    """The step as one rank of the target sees it: fully sharded, or replicated where the options say `ddp`.

    `rank` is its number among those that shard. The first holds most, but for gaps that align a flat layout.

    It is sharded as FSDP2 does it, or with `flat`, or the engine "sharded", as memfit's own runtime does. With
    `on_host`, shards, their gradients and the optimizer are in the host's memory, and the device has no part in the
    optimizer's step but its time, which is left as it is; with `ShardOptions.cpu_offload` it is the host's.
    """
    options = options or ShardOptions()
    on_host = on_host or options.cpu_offload
    if options.parallel == "ddp":
        if on_host or flat is not None:
            raise InputError("a replicated step (DDP) has no shards, on the host or in a flat layout; leave these out")
        return replicate(timeline, runtime, target, options)
    if flat is None and options.engine == "sharded":
        ahead = options.prefetch
        flat = FlatOptions(schedule=Schedule(forward_prefetch=ahead, backward_prefetch=ahead))
    ranks, dtypes = options.shard_ranks(target.ranks), ShardDtypes.of(timeline.trace, options)
    casts = casts_of(timeline.trace, dtypes)
    runtime = without_casts(runtime, casts)
    trace = runtime.trace
    passes, members = find_passes(trace), members_of(trace, options)
    reshards = options.reshard_after_forward
    units = find_units(
        trace, members, passes, ranks, dtypes, keep_last=options.keep_last, reshard_after_forward=reshards
    )
    gradients = whole_gradients(trace, casts, passes, dtypes)
    replicas = None if options.replicas == 1 else Group.replicate(target, ranks)
    padding: dict[str, int] = {}
    scheduler: Scheduler
    if flat is None:
        kept = [padded_elements(each, ranks) // ranks for each in trace.parameters]
        trained = [elements_of_rank(each, ranks, rank) for each in trace.parameters]
        parts = in_order_of_fsdp2(trace, members.values())
        scheduler = FSDP2Scheduler(
            trace,
            units,
            parts,
            gradients,
            ranks=ranks,
            dtypes=dtypes,
            on_host=on_host,
            prefetch=options.prefetch,
            replicas=replicas,
            fewer=None if isinstance(reshards, bool) else Group.shard(target, reshards),
        )
    else:
        last = {
            unit.module: UnitOptions(keep=unit.kept, reshard_ranks=unit.reshard_ranks)
            for unit in units
            if unit.reshard_after_forward is not True and unit.module
        }
        each = {**last, **flat.units}
        members, units = _joined(trace, members, units, each, dtypes, flat.schedule.bucket_cap_bytes)
        joined = {module for unit in units for module in unit.joined}
        each = {module: choice for module, choice in each.items() if module not in joined}
        flats = flat_units(trace, members, each, ranks, dtypes)
        units = tuple(_in_flat_layout(unit, own) for unit, own in zip(units, flats, strict=True))
        kept, padding = _kept_of_flat(flats, len(trace.parameters), rank)
        trained = kept
        begun = gradients_before(trace)
        apart = target.device.type == "cpu"
        scheduler = FlatScheduler(
            flats, gradients, begun, flat.schedule, separate_parts=apart, on_host=on_host, replicas=replicas
        )
    if replicas is not None:
        scheduler.group = Group.shard(target, ranks)
    shards = Shards(trace, kept, trained, dtypes)
    runtime = on_shards(runtime, target.device, shards.trained_bytes)
    if options.cpu_offload:
        runtime = with_host_step(runtime, HostStep.of(shards.trained_bytes, shards.state_bytes))
    schedule = scheduler.run(actings((unit.calls for unit in units), passes))
    levels = Levels(timeline)
    for index in casts:
        levels.take(trace.ops[index].outputs[0].storage)
    if on_host:
        _leave_on_host(levels, gradients)
    else:
        home = {number: name for name, numbers in members.items() for number in numbers}
        for number in range(len(trace.parameters)):
            _shard_parameter(levels, shards, number, home[number])
        for name, n_bytes in padding.items():
            levels.make(Category.PARAMETER, n_bytes, BEFORE_STEP, module=name)
        # FSDP2 keeps the gradients of a unit's shards in the flat buffer that they were reduced into
        together = list(members.values()) if flat is None else [[number] for number in range(len(trace.parameters))]
        _shard_gradients(levels, shards, gradients, together)
        _shard_optimizer_temporaries(levels, shards)
    levels.add(schedule)
    if flat is None:
        for held in held_input_gradients(trace, units, gradients):
            made = levels.make(held.category, held.size_bytes, held.begin, module=held.module, by_op=True)
            levels.end(made, held.end)
    levels.replace_zeroed(trace)
    before, during = levels.levels()
    communication_ms, waited_ms = communication(runtime, target, schedule)
    beside_ms = slowed_ms(schedule.transfers, target, communication_ms, waited_ms)
    beside_ms += copies_ms(schedule, target.device)
    half = dtypes.param is not None and item_bytes(dtypes.param) == HALF_BYTES
    measured = target.device.engine("fsdp2" if flat is None else "sharded", half=half)
    if measured is not None:
        beside_ms += (measured.slowdown - 1.0) * (waited_ms + beside_ms)
        beside_ms += measured.collective_ms * len(schedule.transfers) + measured.waiting * runtime.total_ms
    return Sharding(
        runtime=runtime,
        before_by_row=before,
        during_by_row=during,
        units=units,
        removed=levels.removed,
        allocations=levels.allocations,
        schedule=schedule,
        communication_ms=communication_ms,
        exposed_ms=waited_ms + beside_ms,
        beside_ms=beside_ms,
        shard_dtype=dtypes.shard,
        param_dtype=dtypes.param,
        reduce_dtype=dtypes.reduce,
    )


def _joined(
    trace: Trace,
    members: Mapping[str, list[int]],
    units: Sequence[ShardUnit],
    options: Mapping[str, UnitOptions],
    dtypes: ShardDtypes,
    cap_bytes: int,
) -> tuple[dict[str, list[int]], tuple[ShardUnit, ...]]:
    """Join small units as the runtime does, for which those without parameters are no units."""
    inner = [unit for unit in units if unit.module and members[unit.module]]

    def gathered_bytes(number: int) -> int:
        parameter = trace.parameters[number]
        return elements(parameter) * item_bytes(dtypes.gathered(parameter))

    joinable = [
        JoinableUnit(
            unit.module,
            sum(map(gathered_bytes, members[unit.module])),
            options.get(unit.module, UnitOptions()),
        )
        for unit in inner
    ]
    found = [[inner[number] for number in numbers] for numbers in join_neighbours(joinable, cap_bytes)]
    groups = {each[0].module: each for each in found}
    others = {unit.module for each in found for unit in each[1:]}
    kept = [groups.get(unit.module, [unit]) for unit in units if unit.module not in others]
    return (
        {each[0].module: [number for unit in each for number in members[unit.module]] for each in kept},
        tuple(join_units(each, units[0]) for each in kept),
    )


def _kept_of_flat(units: Sequence[FlatUnit], parameters: int, rank: int) -> tuple[list[int], dict[str, int]]:
    """The elements of each parameter that a rank keeps, and the bytes of padding in its shard of each unit."""
    kept, padding = [0] * parameters, {}
    for unit in units:
        for group in unit.groups:
            for number, slot in zip(group.parameters, group.layout.slots, strict=True):
                kept[number] = group.layout.part(slot, rank).elements
            empty = sum(end - begin for begin, end in group.layout.gaps(rank))
            padding[unit.module] = padding.get(unit.module, 0) + empty * group.kept_item_bytes
    return kept, padding


def _in_flat_layout(unit: ShardUnit, flat: FlatUnit) -> ShardUnit:
    return replace(
        unit,
        shard_bytes=sum(group.shard_bytes for group in flat.groups),
        gathered_bytes=sum(group.gathered_bytes for group in flat.groups),
        reduced_bytes=sum(group.layout.ranks * group.part_bytes for group in flat.groups if group.trains),
    )


def _leave_on_host(levels: Levels, gradients: Sequence[WholeGradient]) -> None:
    """Shards of parameters, gradients and state are not on the device, nor is what the optimizer's step makes."""
    trace = levels.timeline.trace
    for parameter in trace.parameters:
        levels.take(parameter.storage)
        if parameter.gradient != NO_INDEX:
            levels.take(parameter.gradient)
    for gradient in gradients:
        for storage in gradient.storages:
            levels.take(storage)
    for number, storage in enumerate(trace.storages):
        made = trace.ops[storage.alloc_at].phase if 0 <= storage.alloc_at < len(trace.ops) else None
        if storage.category is Category.OPTIMIZER_STATE or made is Phase.OPTIMIZER:
            levels.take(number)


def _shard_parameter(levels: Levels, shards: Shards, number: int, module: str) -> None:
    """Parameter and optimizer state become shards."""
    parameter = shards.trace.parameters[number]
    levels.replace(parameter.storage, Category.PARAMETER, shards.bytes_of(number), module)
    for storage in parameter.state:
        whole_bytes = levels.timeline.trace.storages[storage].bytes
        if whole_bytes < elements(parameter):  # a step counter, not a state of each element
            continue
        whole = max(1, elements(parameter)) * item_bytes(parameter.dtype)
        n_bytes = -(-whole_bytes * shards.trained_bytes_of(number) // whole)
        levels.replace(storage, Category.OPTIMIZER_STATE, n_bytes, module)


def _shard_gradients(
    levels: Levels, shards: Shards, gradients: Sequence[WholeGradient], together: Sequence[Sequence[int]]
) -> None:
    """Whole gradients leave the step: the runtime has its own. Those that the step began with are shards throughout.

    The shards of parameters that are `together` have one allocation, where they live alike.
    """
    for whole in gradients:
        for storage in whole.storages:
            levels.take(storage)
    alloc_at, free_after = levels.timeline.alloc_at, levels.timeline.free_after
    for numbers in together:
        alike: dict[tuple[int, int], list[int]] = {}
        for number in numbers:
            gradient = shards.trace.parameters[number].gradient
            if gradient != NO_INDEX and not levels.has_taken(gradient):
                alike.setdefault((int(alloc_at[gradient]), int(free_after[gradient])), []).append(number)
        for found in alike.values():
            first, *others = (shards.trace.parameters[number].gradient for number in found)
            for storage in others:
                levels.take(storage)
            levels.replace(first, Category.GRADIENT, sum(map(shards.bytes_of, found)))


def _shard_optimizer_temporaries(levels: Levels, shards: Shards) -> None:
    """What the optimizer's ops make is as large as the shards they work on, in proportion to the whole parameters."""
    trace = levels.timeline.trace
    whole = sum(trace.storages[parameter.storage].bytes for parameter in trace.parameters if parameter.trainable)
    part = shards.trained_bytes / whole if whole else 1.0
    for number, storage in enumerate(trace.storages):
        if storage.category is not Category.TEMPORARY or levels.has_taken(number):
            continue
        if 0 <= storage.alloc_at < len(trace.ops) and trace.ops[storage.alloc_at].phase is Phase.OPTIMIZER:
            levels.replace(number, Category.TEMPORARY, int(np.ceil(storage.bytes * part)))
