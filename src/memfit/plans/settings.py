"""Settings: what a plan may decide that changes the step, its sharding or its optimizer, one combination at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from memfit.capture import (
    ChunkedLoss,
    Implementation,
    Phase,
    Step,
    Trace,
    batch_rows,
    find_chunkable,
    implementations_of_step,
)
from memfit.memory import Reservation
from memfit.paths import around
from memfit.sharding import ShardOptions, repeated_blocks
from memfit.solve import Problem, Solved
from memfit.text import counted

CHUNKS = (16, 8, 4, 2)
"""The most first: if they are not better than the whole loss, none are, and fewer gain little on them."""
MOST_CHUNKS = max(CHUNKS)
PREFETCH = (1, 2, 0)
KEPT = (0, 1, 2, 4, 8, 16)
"""How many of the last units may stay gathered; all are tried too."""
PARTS = (2, 4, 8, 16)
"""Into how many micro-batches a batch may be divided."""
LEAST_GAIN_MS = 1e-5
"""Times within ten nanoseconds count as equal."""
_LARGE = 0.02
"""A module beside the blocks, or inside one, is a unit from this part of the model's or the block's parameters on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVariant:
    """One way to run the step, which is captured by itself: micro-batches, chunks of the loss, optimizer step."""

    parts: int = 1
    chunked: ChunkedLoss | None = None
    implementation: Implementation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variant of the step, and how it is sharded; None is as it was given."""

    variant: StepVariant = StepVariant()
    shard: ShardOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was solved, in which setting, and what the allocator does with it where that is known."""

    problem: Problem
    solved: Solved
    setting: Setting = Setting()
    reservation: Reservation | None = None

    @property
    def base_ms(self) -> float:
        """The time of the step without what the plan adds."""
        return base_ms(self.problem)

    @property
    def step_ms(self) -> float:
        """The time of the step under the plan, infinite when there is none."""
        return self.base_ms + self.solved.recompute_ms

    def better_than(self, other: Answer) -> bool:
        """Return whether it is faster, or nearer to the budget when neither fits."""
        if self.solved.choice is None and other.solved.choice is None:
            mine, theirs = self.solved.minimum_budget_bytes, other.solved.minimum_budget_bytes
            return mine is not None and (theirs is None or mine < theirs)
        return self.step_ms < other.step_ms - LEAST_GAIN_MS

    def no_worse_than(self, other: Answer) -> bool:
        """Return whether it is as fast and has as much room in the allocator, where that is known of both."""
        rooms = [each.reservation.room.value for each in (self, other) if each.reservation is not None]
        return self.step_ms <= other.step_ms + LEAST_GAIN_MS and rooms == sorted(rooms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Ways to shard that differ only in which units stay gathered between forward and backward.

    The first needs the least memory, the last communicates least.
    """

    members: tuple[ShardOptions | None, ...]
    place: tuple[int, ...] = ()
    """Which of the choices of units, replicas, prefetch and place of shards it has, by number."""

    @property
    def least(self) -> ShardOptions | None:
        """The member that needs the least memory."""
        return self.members[0]

    @property
    def most(self) -> ShardOptions | None:
        """The member that communicates least."""
        return self.members[-1]


def base_ms(problem: Problem) -> float:
    """Return the time of a problem's step when nothing is recomputed."""
    return problem.runtime.total_ms + problem.exposed_ms


# -- what there is to decide ------------------------------------------------------------------------------------------


def find_variants(
    problem: Problem, step: Step | None, kinds: Iterable[str], fixed: ChunkedLoss | None
) -> list[StepVariant]:
    """Return every variant of the step that may be decided, with a loss in `fixed` chunks where that is given."""
    kinds = frozenset(kinds)
    chunks: list[ChunkedLoss | None] = [fixed]
    ways: list[Implementation | None] = [None]
    parts = [1]
    if step is not None:
        chunkable = find_chunkable(problem.trace)
        if fixed is None and "loss" in kinds and chunkable is not None and is_reached(chunkable, step):
            chunks += [chunkable.with_chunks(number) for number in CHUNKS]
        if "optimizer" in kinds:
            own = _implementation_of(problem.trace)
            ways += [way for way in implementations_of_step(step) if way != own]
        if "micro_batch" in kinds:
            parts += find_parts(problem.trace, step)
    return [
        StepVariant(parts=one, implementation=two, chunked=three)
        for one, two, three in itertools.product(parts, ways, chunks)
    ]


def _implementation_of(trace: Trace) -> Implementation | None:
    """Return how the optimizer of a step does its step, by the names of its ops; None where they do not tell."""
    names = {op.name for op in trace.ops if op.phase is Phase.OPTIMIZER}
    if any("_fused_" in name for name in names):
        return "fused"
    if any("_foreach_addcdiv" in name for name in names):
        return "foreach"  # other ops on lists may be a clipping of gradients
    return None if any("_foreach_" in name for name in names) else "single"


def is_reached(chunkable: ChunkedLoss, step: Step) -> bool:
    """Return whether an engine reaches the loss: in the model's call, or a function that `plan.loss` is given."""
    return chunkable.inside or step.loss is not None


def find_parts(trace: Trace, step: Step) -> list[int]:
    """Return into how many micro-batches the batch of a step may be divided.

    All tensors of the batch have one row for each sample. Batch norm would compute something else.
    """
    rows = batch_rows(step.batch)
    if step.run is not None or rows is None or any("batch_norm" in op.name for op in trace.ops):
        return []
    return [parts for parts in PARTS if rows % parts == 0]


def find_families(problem: Problem, kinds: Iterable[str]) -> list[Family]:
    """Return every way to shard that may be decided; the first has the step sharded as it was given."""
    given = problem.options.shard
    if not can_shard_otherwise(problem):
        return [Family(members=(None,))]
    kinds = frozenset(kinds)
    units = [given.units, *(find_unit_choices(problem) if "units" in kinds else ())]
    replicas = [given.replicas, *(_replicas(problem) if "replicas" in kinds else ())]
    ahead = dict.fromkeys((given.prefetch, *(PREFETCH if "prefetch" in kinds else ())))
    host = [given.cpu_offload]
    if "cpu_offload" in kinds and problem.target.device.type == "cuda":
        host = [False, True]
    found = []
    for chosen in itertools.product(*map(enumerate, (units, replicas, ahead, host))):
        place, values = zip(*chosen, strict=True)
        changed = replace(given, **dict(zip(("units", "replicas", "prefetch", "cpu_offload"), values, strict=True)))
        members = list(_kept(problem, changed)) if "reshard" in kinds else [changed]
        found.append(Family(members=tuple(None if each == given else each for each in members), place=place))
    return found


def can_shard_otherwise(problem: Problem) -> bool:
    """Return whether the planner shards the step, and not its own code or DDP."""
    return problem.sharding is not None and problem.options.shard.parallel == "fsdp" and not problem.trace.mesh


def gathers_more(one: ShardOptions, other: ShardOptions) -> bool:
    """Return whether a rank holds as much at every instant as with the other sharding, or more."""
    keeps = one.reshard_after_forward is False or (
        other.reshard_after_forward is True
        and (one.reshard_after_forward is not True or one.keep_last >= other.keep_last)
        and (one.reshard_after_forward is True or not other.keep_last)
    )
    return (
        keeps
        and one.prefetch >= other.prefetch
        and one.replicas % other.replicas == 0
        and (one.units, one.cpu_offload, one.engine) == (other.units, other.cpu_offload, other.engine)
    )


def _kept(problem: Problem, options: ShardOptions) -> Iterator[ShardOptions]:
    """Yield ways to reshard, from the one that gathers least to the one that keeps all."""
    assert problem.sharding is not None
    inner = sum(bool(unit.module) for unit in problem.sharding.units) if options.units is None else len(options.units)
    for number in KEPT:
        if number < inner or not number:
            yield replace(options, keep_last=number or False, reshard_after_forward=True)
    ranks, node = options.shard_ranks(problem.target.ranks), problem.target.ranks_per_node
    if node < ranks and ranks % node == 0 and node > 1:
        yield replace(options, keep_last=False, reshard_after_forward=node)
    if inner:
        yield replace(options, keep_last=False, reshard_after_forward=False)


def _replicas(problem: Problem) -> list[int]:
    """Return into how many groups the ranks may be divided: of one, two or four nodes, or parts of the only one."""
    ranks, node = problem.target.ranks, problem.target.ranks_per_node
    groups = (node, 2 * node, 4 * node) if ranks > node else (ranks // 2, ranks // 4)
    return [ranks // size for size in groups if 2 <= size < ranks and ranks % size == 0]


def find_unit_choices(problem: Problem) -> list[tuple[str, ...]]:
    """Return other modules to be units: with the large modules beside the blocks, and with those inside them.

    What holds a parameter that another unit has too is left out, and so is what is never called.
    """
    trace = problem.trace
    if trace.cast is not None and trace.cast.units:
        return []  # the step was captured with casts at the usual units
    blocks = repeated_blocks(trace)
    called = {call.module for call in trace.calls if call.phase is Phase.FORWARD and call.begin < call.end}
    tied = {path for each in trace.parameters if len(each.names) > 1 for name in each.names for path in around(name)}
    sizes: dict[str, int] = {}
    for each in trace.parameters:
        for path in around(each.names[0]):
            sizes[path] = sizes.get(path, 0) + trace.storages[each.storage].bytes
    able = [path for path in sizes if path and path in called and path not in tied]

    def outermost(inside: str, least: float) -> list[str]:
        prefix = inside and f"{inside}."
        large = [path for path in able if path != inside and path.startswith(prefix) and sizes[path] >= least]
        apart = [path for path in large if not _contains_any(path, blocks) or inside]
        return [path for path in apart if not any(path.startswith(f"{other}.") for other in apart)]

    beside = [path for path in outermost("", _LARGE * sizes.get("", 0)) if not _inside_any(path, blocks)]
    inner = [path for block in blocks for path in outermost(block, _LARGE * sizes[block])]
    choices = [(*blocks, *beside)] if beside else []
    choices += [(*blocks, *inner)] if inner else []
    return choices


def _contains_any(path: str, blocks: Iterable[str]) -> bool:
    return any(block == path or block.startswith(f"{path}.") for block in blocks)


def _inside_any(path: str, blocks: Iterable[str]) -> bool:
    return any(path == block or path.startswith(f"{block}.") for block in blocks)


# -- in words ---------------------------------------------------------------------------------------------------------


def describe(setting: Setting) -> str:
    """Return what a setting changes, in words."""
    parts, variant = [], setting.variant
    if variant.parts > 1:
        parts.append(f"{variant.parts} micro-batches")
    if variant.chunked is not None:
        parts.append(f"the loss in {variant.chunked.chunks} chunks")
    if variant.implementation is not None:
        parts.append(f"a {variant.implementation!r} optimizer step")
    if setting.shard is not None:
        parts.append(f"{describe_reshard(setting.shard)}, prefetch {setting.shard.prefetch}")
    return ", ".join(parts) or "the step as it is"


def describe_reshard(shard: ShardOptions) -> str:
    """Return which units stay gathered between forward and backward."""
    if shard.reshard_after_forward is False:
        return "all units kept"
    if shard.reshard_after_forward is not True:
        return f"all units resharded to {shard.reshard_after_forward} ranks"
    if shard.keep_last:
        return "the last unit kept" if shard.keep_last == 1 else f"the last {shard.keep_last} units kept"
    return "all units resharded"


def describe_units(shard: ShardOptions) -> str:
    """Return how many modules are sharded by themselves."""
    return counted(len(shard.units or ()), "unit")
