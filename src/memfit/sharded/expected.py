"""The runtime's own memory in a step, read from its schedule (`sharding/flat_schedule.py`) without running anything.

The model's activations come on top. Units run once, in the order that was given or in which they are listed; gradients
of a unit come in the reverse order of its parameters, those of the root after all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

from torch import nn

from memfit.capture import AFTER_STEP, NEVER, Category
from memfit.sharded.fully_shard import get_runtime
from memfit.sharded.runtime import Runtime
from memfit.sharding.flat_schedule import FlatGroup, FlatScheduler, FlatUnit
from memfit.sharding.gradients import WholeGradient
from memfit.sharding.schedule import EventKind, ShardSchedule, actings
from memfit.sharding.units import Pass, ShardCall


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeBytes:
    """The highest point: what the shards take, and beside them gathered parameters and gradients at one moment."""

    shard_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    at: str

    @property
    def peak_bytes(self) -> int:
        return self.shard_bytes + self.gathered_bytes + self.gradient_bytes


def expected_bytes(model: nn.Module) -> RuntimeBytes:
    """Return the highest point of the runtime's own memory in a step of a sharded model."""
    runtime = get_runtime(model)
    schedule = build_schedule(runtime)
    level, peak, at = Counter[Category](), Counter[Category](), ""
    for event in schedule.events:
        if event.kind is EventKind.ALLOCATE:
            role = schedule.buffers[event.number].role
            level[role.category] += event.size_bytes
            if level.total() > peak.total():
                peak, at = level.copy(), f"{role.title} of {runtime.units[event.unit].title}"
        elif event.kind is EventKind.FREE:
            level[schedule.buffers[event.number].role.category] -= event.size_bytes
    gathered = peak.pop(Category.GATHERED_PARAMETER, 0)
    shards = sum(flat.shard.untyped_storage().nbytes() for unit in runtime.units for flat in unit.flats)
    return RuntimeBytes(shard_bytes=shards, gathered_bytes=gathered, gradient_bytes=peak.total(), at=at)


def build_schedule(runtime: Runtime) -> ShardSchedule:
    """Return what the runtime does in a step in which every unit runs once; units are numbered as in `runtime.units`.

    Of the ops, each unit's forward is one, and so is each gradient.
    """
    units = _units(runtime)
    inner = _order(runtime)
    forward = max(len(inner), 1)
    calls = {0: _run(0, forward, forward)}
    gradients: list[WholeGradient] = []
    end = forward
    for place in reversed(range(len(inner))):
        own = _gradients(units[inner[place]].groups, end)
        begin, end = end, end + max(len(own), 1)  # a unit that is frozen has a backward, too
        calls[inner[place]] = _run(place, place + 1, begin, end)
        gradients += own
    own = _gradients(units[0].groups, end)
    scheduler = FlatScheduler(
        units,
        [*gradients, *own],
        {},
        runtime.schedule,
        separate_parts=runtime.links[0].separate_parts,
        on_host=any(flat.shard.device != flat.device for unit in runtime.units for flat in unit.flats),
    )
    step = Pass(begin=0, backward_begin=forward, end=end + max(len(own), 1), earliest=0)
    return scheduler.run(actings(((calls[number],) for number in range(len(runtime.units))), [step]))


def _units(runtime: Runtime) -> list[FlatUnit]:
    """The units as the schedule has them; parameters are numbered in their order."""
    numbers = count()
    return [
        FlatUnit(
            module=unit.name,
            groups=tuple(
                FlatGroup(
                    layout=flat.layout,
                    parameters=tuple(islice(numbers, len(flat.parameters))),
                    trains=flat.trains,
                    kept_item_bytes=flat.dtype.itemsize,
                    gathered_item_bytes=unit.gather_dtype(flat).itemsize,
                    reduced_item_bytes=gradients.dtype.itemsize,
                    gradient_item_bytes=gradients.kept_dtype.itemsize,
                    in_place=not flat.whole(unit.gather_dtype(flat)).bytes,
                )
                for flat, gradients in zip(unit.flats, unit.gradients, strict=True)
            ),
            options=unit.options,
        )
        for unit in runtime.units
    ]


def _order(runtime: Runtime) -> list[int]:
    """The numbers of the units inside the root, in the order of the forward."""
    given = runtime.schedule.order or ()
    inner = range(1, len(runtime.units))
    return sorted(inner, key=lambda each: given.index(name) if (name := runtime.units[each].name) in given else each)


def _run(begin: int, end: int, backward_begin: int, backward_end: int = NEVER) -> ShardCall:
    """A run of a unit. The root's inputs need no gradient, so that the end of its backward is not seen."""
    inside = backward_end != NEVER
    return ShardCall(
        begin=begin,
        end=end,
        backward_begin=backward_begin,
        backward_end=backward_end,
        depth=int(inside),
        reduces=inside,
    )


def _gradients(groups: Sequence[FlatGroup], begin: int) -> list[WholeGradient]:
    """The gradients of a unit, one with each op from `begin` on."""
    trained = [number for group in groups if group.trains for number in reversed(group.parameters)]
    return [
        WholeGradient(parameter=number, storages=(), alloc_at=op, ready=op, arrived=op, free_after=AFTER_STEP)
        for op, number in enumerate(trained, begin)
    ]
