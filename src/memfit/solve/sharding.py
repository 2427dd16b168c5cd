"""What fully sharded training changes in a step: levels of memory and time of communication, for fixed units.

Note [Sharded memory]: each rank keeps a shard of every parameter, gradient and optimizer state, cut along the first
dimension and padded to whole rows. A unit gathers its parameters before its forward and again before its backward:
a buffer while the unit before it still runs (it is prefetched), the parameters themselves while it runs. The root's
stay from its forward to the end of its backward. Gradients are whole until the unit's backward ends, are copied into a
buffer of the reduction's dtype, and that buffer lives until the next unit's backward ends. This is what FSDP2 does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from memfit.cost import Collective, CollectiveModel, Runtime
from memfit.cost.work import item_bytes_of
from memfit.errors import InputError, MissingFeatureError
from memfit.hardware import Target
from memfit.memory.timeline import CATEGORIES, Bytes, Timeline
from memfit.trace import NEVER, Category, Parameter, Phase, Trace

_BLOCK = re.compile(r"^(?P<list>.*?)\.?(?P<number>\d+)$")
_FEWEST_BLOCKS = 2


ShardDtype = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """How parameters are sharded; `units` are module paths, by default the repeated blocks, the root always.

    `shard_dtype` is that of shards, their gradients and optimizer state, `param_dtype` that of gathered parameters,
    `reduce_dtype` that in which gradients are summed; each is the parameter's own unless given.
    """

    units: tuple[str, ...] | None = None
    shard_dtype: ShardDtype | None = None
    param_dtype: ShardDtype | None = None
    reduce_dtype: ShardDtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit:
    """A module whose parameters are gathered together, those of units inside it excepted."""

    module: str
    parameters: int
    shard_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    reduced_bytes: int
    begin: int
    end: int
    backward_begin: int
    backward_end: int


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A step of one rank among many: its levels, its units and its communication."""

    before_by_row: Bytes
    during_by_row: Bytes
    units: tuple[ShardUnit, ...]
    communication_ms: float
    exposed_ms: float

    @cached_property
    def before(self) -> Bytes:
        """Bytes alive just before each op."""
        return self.before_by_row.sum(axis=0)

    @cached_property
    def during(self) -> Bytes:
        """Bytes alive while each op runs."""
        return self.during_by_row.sum(axis=0)


def repeated_blocks(trace: Trace) -> tuple[str, ...]:
    """Modules that are alike and numbered in a row, the outermost such; what FSDP usually wraps."""
    called = {call.module for call in trace.calls}
    owners = {name.rpartition(".")[0] for parameter in trace.parameters for name in parameter.names}
    lists: dict[str, list[str]] = defaultdict(list)
    kinds: dict[str, set[str]] = defaultdict(set)
    for module in trace.modules:
        match = _BLOCK.match(module.path)
        holds = any(owner == module.path or owner.startswith(f"{module.path}.") for owner in owners)
        if match and module.path in called and holds:
            lists[match["list"]].append(module.path)
            kinds[match["list"]].add(module.kind)
    found: list[str] = []
    for name in sorted(lists, key=lambda each: (each.count("."), each)):
        inside = any(name == block or name.startswith(f"{block}.") for block in found)
        if len(lists[name]) >= _FEWEST_BLOCKS and len(kinds[name]) == 1 and not inside:
            found += lists[name]
    return tuple(found)


def shard(timeline: Timeline, runtime: Runtime, target: Target, options: ShardOptions | None = None) -> Sharding:
    """The step as one rank of the target sees it."""
    options = options or ShardOptions()
    trace = timeline.trace
    units = _units(trace, target.ranks, options)
    levels = _Levels(timeline)
    by_name = {unit.module: unit for unit in units}
    for parameter in trace.parameters:
        levels.shard_parameter(parameter, by_name[_home(parameter, tuple(by_name))], target.ranks, options)
    trained = [parameter for parameter in trace.parameters if parameter.trainable]
    whole = sum(trace.storages[parameter.storage].bytes for parameter in trained)
    kept = sum(shard_bytes(parameter, target.ranks, options.shard_dtype) for parameter in trained)
    levels.shard_optimizer_temporaries(kept / whole if whole else 1.0)
    root = next(unit for unit in units if not unit.module)
    blocks = sorted((unit for unit in units if unit.module), key=lambda unit: unit.begin)
    levels.gather(root, blocks)
    communication_ms, exposed_ms = _communication(runtime, target, root, blocks)
    return Sharding(
        before_by_row=levels.before_by_row,
        during_by_row=levels.during_by_row,
        units=units,
        communication_ms=communication_ms,
        exposed_ms=exposed_ms,
    )


def _units(trace: Trace, ranks: int, options: ShardOptions) -> tuple[ShardUnit, ...]:
    if isinstance(options.units, str):
        raise InputError(f"units is {options.units!r}; give a tuple of module paths, ({options.units!r},)")
    wanted = repeated_blocks(trace) if options.units is None else tuple(dict.fromkeys(options.units))
    known = {module.path for module in trace.modules}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InputError(f"no module is called {unknown[0]!r}; give module paths such as {sorted(known)[1:4]}")
    names = ("", *(name for name in wanted if name))
    members: dict[str, list[Parameter]] = {name: [] for name in names}
    for parameter in trace.parameters:
        members[_home(parameter, names)].append(parameter)
    found = []
    for name in names:
        calls = [call for call in trace.calls if call.module == name and call.phase is Phase.FORWARD]
        if not calls:
            raise InputError(f"module {name!r} is never called, so it cannot gather its parameters; leave it out")
        if len(calls) > 1:
            raise MissingFeatureError(
                f"module {name!r} runs {len(calls)} times in the step, and its gathers are modelled for one run only; "
                "plan one micro-batch, or leave the module out of the sharded units"
            )
        trainable = [each for each in members[name] if each.trainable]
        backward = [call for call in calls if call.backward_begin != NEVER]
        found.append(
            ShardUnit(
                module=name,
                parameters=len(members[name]),
                shard_bytes=sum(shard_bytes(each, ranks, options.shard_dtype) for each in members[name]),
                gathered_bytes=sum(_bytes(each, ranks, options.param_dtype) for each in members[name]),
                gradient_bytes=sum(_bytes(each, ranks, options.param_dtype) for each in trainable),
                reduced_bytes=sum(_bytes(each, ranks, options.reduce_dtype) for each in trainable),
                begin=min(call.begin for call in calls),
                end=max(call.end for call in calls),
                backward_begin=min((call.backward_begin for call in backward), default=NEVER),
                backward_end=max((call.backward_end for call in backward), default=NEVER),
            )
        )
    return tuple(found)


def shard_bytes(parameter: Parameter, ranks: int, dtype: str | None = None) -> int:
    """What one rank keeps of a parameter: whole rows of its first dimension, the last rank's padded."""
    return _elements(parameter, ranks) // ranks * _item_bytes(dtype or parameter.dtype)


def _elements(parameter: Parameter, ranks: int) -> int:
    """Elements with the padding that makes the first dimension a multiple of the ranks."""
    shape = parameter.shape or (1,)
    rows = -(-shape[0] // ranks) * ranks
    return rows * int(np.prod(shape[1:], dtype=np.int64))


def _bytes(parameter: Parameter, ranks: int, dtype: str | None) -> int:
    return _elements(parameter, ranks) * _item_bytes(dtype or parameter.dtype)


def _item_bytes(dtype: str) -> int:
    try:
        return item_bytes_of(dtype)
    except AttributeError as error:
        raise InputError(f"{dtype!r} is no dtype of torch; write for example 'float32' or 'bfloat16'") from error


def _home(parameter: Parameter, names: Sequence[str]) -> str:
    """The innermost unit that holds every name of a parameter; one that is tied across units belongs to the root."""
    homes = {
        max((name for name in names if not name or path.startswith(f"{name}.")), key=len) for path in parameter.names
    }
    return homes.pop() if len(homes) == 1 else ""


class _Levels:
    """Levels of the step from which storages are taken and to which intervals are added."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._ops = len(timeline.trace.ops)
        self._change = np.zeros((len(CATEGORIES), self._ops + 2), np.int64)
        self._gone: set[int] = set()

    @property
    def during_by_row(self) -> Bytes:
        return self._timeline.during_by_row + np.cumsum(self._change, axis=1)[:, : self._ops + 1]

    @property
    def before_by_row(self) -> Bytes:
        return self._timeline.before_by_row + np.cumsum(self._change, axis=1)[:, : self._ops + 1]

    def add(self, category: Category, n_bytes: int, begin: int, end: int) -> None:
        """Bytes that are there while ops `begin` up to (not including) `end` run."""
        rounding = self._timeline.rounding_bytes
        rounded = -(-n_bytes // rounding) * rounding
        begin = max(0, begin)
        if begin < end:
            row = self._change[CATEGORIES.index(category)]
            row[begin] += rounded
            row[min(end, self._ops + 1)] -= rounded

    def take(self, storage: int) -> tuple[int, int]:
        """Take a storage away; the interval in which it was there."""
        birth, death = int(self._timeline.birth[storage]), int(self._timeline.death[storage])
        begin, end = max(0, birth), self._ops + 1 if death == NEVER else death + 1
        if storage not in self._gone:
            self._gone.add(storage)
            n_bytes = int(self._timeline.storage_bytes[storage])
            if begin < end:
                row = self._change[CATEGORIES.index(self._timeline.trace.storages[storage].category)]
                row[begin] -= n_bytes
                row[end] += n_bytes
        return begin, end

    def shard_parameter(self, parameter: Parameter, unit: ShardUnit, ranks: int, options: ShardOptions) -> None:
        """Parameter, gradient and optimizer state become shards; the whole gradient lives until it is reduced."""
        kept = shard_bytes(parameter, ranks, options.shard_dtype)
        self.add(Category.PARAMETER, kept, *self.take(parameter.storage))
        if parameter.gradient != NEVER:
            begin, end = self.take(parameter.gradient)
            whole = _bytes(parameter, ranks, options.param_dtype)
            before_step = int(self._timeline.birth[parameter.gradient]) == NEVER
            made = unit.backward_begin if before_step else begin
            reduced = unit.backward_end if unit.backward_end != NEVER else end
            self.add(Category.GRADIENT, whole, made, min(reduced, end))
            self.add(Category.GRADIENT, kept, begin if before_step else min(reduced, end), end)
        scale = _item_bytes(options.shard_dtype or parameter.dtype) / _item_bytes(parameter.dtype)
        for storage in parameter.state:
            whole = self._timeline.trace.storages[storage].bytes
            elements = int(np.prod(parameter.shape, dtype=np.int64))
            if whole < elements:  # a step counter, not a state of each element
                continue
            part = _elements(parameter, ranks) / max(1, elements) / ranks
            self.add(Category.OPTIMIZER_STATE, int(np.ceil(whole * part * scale)), *self.take(storage))

    def shard_optimizer_temporaries(self, part: float) -> None:
        """What the optimizer's ops make is as large as the shards they work on, `part` of the whole."""
        trace = self._timeline.trace
        for number, storage in enumerate(trace.storages):
            if storage.birth < 0 or number in self._gone or storage.category is not Category.TEMPORARY:
                continue
            if storage.birth < len(trace.ops) and trace.ops[storage.birth].phase is Phase.OPTIMIZER:
                self.add(Category.TEMPORARY, int(np.ceil(storage.bytes * part)), *self.take(number))

    def gather(self, root: ShardUnit, blocks: Sequence[ShardUnit]) -> None:
        """Gathered parameters and buffers of Note [Sharded memory]."""
        gathered, moved = Category.GATHERED_PARAMETER, Category.COMMUNICATION
        last = root.backward_end if root.backward_end != NEVER else root.end
        self.add(gathered, root.gathered_bytes, root.begin, last)
        self.add(moved, root.reduced_bytes, last - 1, last + 1)
        for earlier, unit in zip((root, *blocks), blocks, strict=False):
            self.add(moved, unit.gathered_bytes, earlier.begin, unit.begin + 1)
            self.add(gathered, unit.gathered_bytes, unit.begin, unit.end)
        backward = sorted((unit for unit in blocks if unit.backward_begin != NEVER), key=lambda u: u.backward_begin)
        for earlier, unit in zip((root, *backward), backward, strict=False):
            self.add(moved, unit.gathered_bytes, earlier.backward_begin, unit.backward_begin + 1)
            self.add(gathered, unit.gathered_bytes, unit.backward_begin, unit.backward_end)
        for unit, later in zip(backward, (*backward[1:], root), strict=False):
            end = max(later.backward_end, unit.backward_end) + 1
            self.add(moved, unit.reduced_bytes, unit.backward_end - 1, end)


def _communication(
    runtime: Runtime, target: Target, root: ShardUnit, blocks: Sequence[ShardUnit]
) -> tuple[float, float]:
    """All of it, and what compute does not hide: a unit's transfers run beside the compute of the unit before it."""
    model = CollectiveModel(target)

    def gather_ms(unit: ShardUnit) -> float:
        return model.collective_ms(Collective.ALL_GATHER, unit.gathered_bytes)

    def reduce_ms(unit: ShardUnit) -> float:
        return model.collective_ms(Collective.REDUCE_SCATTER, unit.reduced_bytes)

    times = runtime.cumulative_ms
    total = exposed = gather_ms(root)
    for earlier, unit in zip((None, *blocks), blocks, strict=False):
        needed = gather_ms(unit)
        hidden = float(times[earlier.end] - times[earlier.begin]) if earlier is not None else 0.0
        total += needed
        exposed += max(0.0, needed - hidden)
    backward = sorted((unit for unit in blocks if unit.backward_begin != NEVER), key=lambda u: u.backward_begin)
    for earlier, unit in zip((None, *backward), backward, strict=False):
        needed = gather_ms(unit) + (reduce_ms(earlier) if earlier is not None else 0.0)
        hidden = float(times[earlier.backward_end] - times[earlier.backward_begin]) if earlier is not None else 0.0
        total += needed
        exposed += max(0.0, needed - hidden)
    tail = (reduce_ms(backward[-1]) if backward else 0.0) + reduce_ms(root)
    return total + tail, exposed + tail
