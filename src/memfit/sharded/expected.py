"""What the runtime itself takes during a step, worked out from the layouts and the schedule, without running anything.

The model's activations come on top. Units run once, in the order they were recorded or listed; gradients of a unit come
in the reverse order of its parameters, those of the root before and after all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from memfit.sharded.fully_shard import get_runtime
from memfit.sharded.gradients import Gradients
from memfit.sharded.runtime import Runtime
from memfit.sharded.unit import Unit


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
    """The highest point of the runtime's own memory in a step of a sharded model."""
    runtime = get_runtime(model)
    root, units = runtime.units[0], runtime.units[1:]
    level = _Level()
    _forward(runtime, root, units, level)
    _backward(runtime, root, units, level)
    shards = sum(flat.shard.untyped_storage().nbytes() for unit in runtime.units for flat in unit.flats)
    return RuntimeBytes(
        shard_bytes=shards,
        gathered_bytes=level.peak["gathered"] + level.peak["kept"],
        gradient_bytes=level.peak["gradients"],
        at=level.at,
    )


@dataclass(slots=True)
class _Level:
    """Bytes now, by kind and owner, and at the highest point so far."""

    now: Counter[tuple[str, object]] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    at: str = ""

    def put(self, kind: str, owner: object, n_bytes: int, at: str) -> None:
        self.now[kind, owner] += n_bytes
        if n_bytes > 0 and self.now.total() > self.peak.total():
            self.peak = Counter()
            for (each, _), held in self.now.items():
                self.peak[each] += held
            self.at = at

    def drop(self, kind: str, owner: object) -> None:
        self.now.pop((kind, owner), None)

    def gather(self, unit: Unit, at: str) -> None:
        self.drop("gathered", unit)
        self.put("gathered", unit, unit.bytes, at)


def _forward(runtime: Runtime, root: Unit, units: Sequence[Unit], level: _Level) -> None:
    ahead = runtime.schedule.forward_prefetch
    level.gather(root, "the root's forward")
    for position, unit in enumerate(units):
        for each in units[position : position + 1 + ahead]:
            if ("gathered", each) not in level.now:
                level.gather(each, f"the forward of {unit.title}")
        if unit.options.reshard_ranks is not None:
            kept = unit.bytes // unit.options.reshard_ranks
            level.put("gathered", unit, kept, f"the end of the forward of {unit.title}")
            level.put("gathered", unit, -unit.bytes, "")
            level.now["kept", unit] = level.now.pop(("gathered", unit))
        elif not unit.options.keep:
            level.drop("gathered", unit)


def _backward(runtime: Runtime, root: Unit, units: Sequence[Unit], level: _Level) -> None:
    ahead, before = runtime.schedule.backward_prefetch, runtime.schedule.backward_prefetch_at == "before"
    summing: Unit | None = None
    for position in range(len(units) - 1, -1, -1):
        unit = units[position]
        at = f"the backward of {unit.title}"
        wanted = [unit, *units[max(position - ahead, 0) : position][::-1]]
        for each in wanted if before else wanted[:1]:
            _gather_again(each, level, at)
        for gradients in unit.gradients:
            _collect(unit, gradients, level, at)
        level.drop("gathered", unit)
        for gradients in unit.gradients:
            _begin_sum(gradients, level, f"the sum of gradients of {unit.title}")
        if summing is not None:
            _finish_sum(summing, level)
        summing = unit
        if not before:
            for each in wanted[1:]:
                _gather_again(each, level, at)
    for gradients in root.gradients:
        _collect(root, gradients, level, "the root's backward")
        _begin_sum(gradients, level, "the sum of gradients of the root unit")


def _gather_again(unit: Unit, level: _Level, at: str) -> None:
    if ("gathered", unit) not in level.now and unit.options.backward_gather:
        level.gather(unit, at)
        level.drop("kept", unit)


def _collect(unit: Unit, gradients: Gradients, level: _Level, at: str) -> None:
    """Gradients are held until their part is complete, then copied into it one by one."""
    held: set[int] = set()
    come: set[int] = set()
    filled: set[int] = set()
    flat = gradients.flat
    slots, size = flat.layout.slots, unit.gather_dtype(flat).itemsize
    trained = [number for number, parameter in enumerate(flat.parameters) if parameter.requires_grad]
    for number in reversed(trained):
        level.put("gradients", (gradients, number), slots[number].elements * size, at)
        held.add(number)
        come.add(number)
        for rank in gradients.completed(come, gradients.ranks_of(number)):
            if rank in filled:
                continue
            level.put("gradients", (gradients, "part", rank), gradients.part_bytes, at)
            filled.add(rank)
            for each in sorted(held):
                if filled.issuperset(gradients.ranks_of(each)):
                    level.drop("gradients", (gradients, each))
                    held.discard(each)


def _begin_sum(gradients: Gradients, level: _Level, at: str) -> None:
    link = gradients.flat.link
    if gradients.flat.trains and link.ranks > 1:
        others = link.ranks - 1 if link.separate_parts else 1
        level.put("gradients", (gradients, "received"), others * gradients.part_bytes, at)


def _finish_sum(unit: Unit, level: _Level) -> None:
    """One part, the sum, is left."""
    for gradients in unit.gradients:
        for owner in [owner for kind, owner in level.now if isinstance(owner, tuple) and owner[0] is gradients]:
            level.drop("gradients", owner)
        if gradients.flat.trains:
            level.now["gradients", (gradients, "sum")] = gradients.part_bytes
