"""Every allocation of a step as columns: when each is made and freed, as captured or under a plan.

Note [Allocations under a plan]: instants are the ops of the step and, before the op at which a unit is recomputed,
those of its ops that are recomputed. A storage lives as it did in the captured step, except that

1. one that a policy drops is freed when nothing but autograd held it; the recompute makes another in its place, which
   lives until the original would have been freed;
2. a result that a policy saves and autograd would not have kept, and an input of a checkpointed unit that would be gone
   by then, live until the recompute that needs them is over. Several units may need one; it is there once;
3. whatever else a recompute makes lives as long within it as it did in the forward, at most until its end;
4. one that a unit offloads stays while it is copied, until the forward of the next unit has ended, and is freed then.
   Its copy is allocated where the backward of that next unit begins, ahead of the next unit's own recompute, and lives
   until the original would have been freed.

Under sharding some storages are replaced by intervals: shards, gathered parameters, buffers. What sharding makes and
frees between two ops it does in an order, where that is given. Whenever it has made something and frees something
after that, there is an instant of its own, at which both are there; it comes before units that are recomputed.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memfit.capture import (
    AFTER_STEP,
    AUTOGRAD_THREAD,
    BEFORE_STEP,
    NO_INDEX,
    Category,
    Phase,
    Trace,
    product_thread,
    workspace_thread,
)
from memfit.errors import InputError

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
CATEGORIES = tuple(Category)
ROW = {category: row for row, category in enumerate(CATEGORIES)}
"""The place of each category in `CATEGORIES`, and in the rows of tables."""
BETWEEN = -2
"""The `run` of an instant between two ops, when sharding has made something and not yet freed something else."""

_TEMPORARY, _ACTIVATION, _STATE = ROW[Category.TEMPORARY], ROW[Category.ACTIVATION], ROW[Category.OPTIMIZER_STATE]
_GRADIENT = ROW[Category.GRADIENT]
_WORKSPACE = ROW[Category.WORKSPACE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Forward ops `begin` up to (not including) `end` that can be recomputed as one, and their backward.

    `name` is the module's path, with `#1` appended for its second call of the step, `#2` for its third; the
    model itself has the empty path. `call` is the index of the module call. `backward_begin` is the first op that asks
    for a tensor which autograd saved in the unit.
    """

    name: str
    module: str
    kind: str
    call: int
    begin: int
    end: int
    backward_begin: int
    backward_end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recompute:
    """What recomputing a unit changes in the allocations of a step (Note [Allocations under a plan]).

    `ops` are recomputed before the unit's backward, in this order. `held` are storages that stay until they are over,
    `dropped` those that are freed after op `dropped_after` already. `remade` are made by the recompute at its op
    `remade_at` and freed after its op `remade_until` or, where `replaces`, when the original would have been.
    """

    unit: Unit
    ops: Ints
    held: Ints
    dropped: Ints
    dropped_after: Ints
    remade: Ints
    remade_at: Ints
    remade_until: Ints
    replaces: Flags


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offload:
    """Storages that a unit offloads: freed before op `gone_at`, allocated once more ahead of op `back_at`."""

    unit: Unit
    storages: Ints
    gone_at: int
    back_at: int


class Stream(str, enum.Enum):
    """The stream on which something runs, or on which a block is allocated: free blocks of each are kept apart."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    COPY = "copy"
    ALL_REDUCE = "all_reduce"
    """Between replicas of a hybrid mesh."""


STREAMS = tuple(Stream)
STREAM_NUMBER = {stream: number for number, stream in enumerate(STREAMS)}
"""The number of each stream, in tables and in the allocator's model; compute is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Bytes that sharding adds, there while ops `begin` up to (not including) `end` run, allocated on `stream`.

    `begin` is `BEFORE_STEP` for what is there before the step, `end` is `AFTER_STEP` for what stays. With `ahead` it is
    made before op `begin` and before a unit that is recomputed there, as an all-gather is; otherwise by the op, as a
    gradient is. `made_order` and `freed_order` are its places in what happens between the same two ops; `NO_INDEX` is
    before all of that. What has them may be made and freed between the same two ops.
    """

    category: Category
    size_bytes: int
    begin: int
    end: int
    ahead: bool = True
    made_order: int = NO_INDEX
    freed_order: int = NO_INDEX
    module: str = ""
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllocationTable:
    """Every allocation of a step, and the instants that it lives through.

    Of each instant, in the order they run: `op` is the op of the trace that runs, `run` the number of the recompute
    that it belongs to, `NO_INDEX` in the step itself, and `BETWEEN` where none runs and `op` is the next. The last
    instant is the end of the step. `workspace_bytes` has one entry for each other instant.

    Of each allocation: `size_bytes` is what is asked of the allocator, `row` its category's place in `CATEGORIES`. It
    is made at instant `alloc_at` (or `BEFORE_STEP`) and freed after instant `free_after` (or `AFTER_STEP`); one that is
    freed before it is made was made and freed between two ops and is in no instant. `storage` is the storage that it is
    or is made in place of, `remade` the number of the recompute that made it. The last allocations are the intervals of
    sharding, which have neither. `stream` is the place in `STREAMS` of the stream that it is allocated on.

    The rest is about the first step of a process. `states_made` is the instant before which it makes the optimizer
    state. `product_thread` is, of each instant but the last, the thread in which a product runs, `NO_INDEX` where none
    does; `first_made_at`, of each allocation, the instant at which a first step makes a workspace of such a thread,
    `BEFORE_STEP` for all others (Note [cuBLAS workspaces]). `first_use` is the instant at which the backward first adds
    to a gradient that is there before the step and stays, so that a first step makes it, `NO_INDEX` for all others.
    With `zeroed_first`, gradients that are freed with the first op are gone before it, since `zero_grad` comes first.
    Before it a process runs the instants up to (not including) `warmed_until` once (`Step.warm_up`), and nothing that
    these make outlives instant `warm_up_frees`.
    """

    op: Ints
    run: Ints
    workspace_bytes: Bytes
    size_bytes: Bytes
    row: Ints
    alloc_at: Ints
    free_after: Ints
    storage: Ints
    remade: Ints
    stream: Ints
    first_use: Ints
    states_made: int
    product_thread: Ints
    first_made_at: Ints
    warm_up_frees: Ints
    zeroed_first: bool = False
    warmed_until: int = 0

    @classmethod
    def of(cls, trace: Trace) -> AllocationTable:
        """Build the table of a captured step."""
        storages, count, ops = trace.storages, len(trace.storages), len(trace.ops)
        row = np.fromiter((ROW[storage.category] for storage in storages), np.int64, count)
        alloc_at = np.fromiter((storage.alloc_at for storage in storages), np.int64, count)
        states = np.flatnonzero((alloc_at == BEFORE_STEP) & (row == _STATE))
        product = np.fromiter((product_thread(op) for op in trace.ops), np.int64, ops)
        return cls(
            op=np.arange(ops + 1),
            run=np.full(ops + 1, NO_INDEX),
            workspace_bytes=np.fromiter((op.workspace_bytes for op in trace.ops), np.int64, ops),
            size_bytes=np.fromiter((storage.bytes for storage in storages), np.int64, count),
            row=row,
            alloc_at=alloc_at,
            free_after=np.fromiter((storage.free_after for storage in storages), np.int64, count),
            storage=np.arange(count),
            remade=np.full(count, NO_INDEX),
            stream=_streams_of(trace),
            first_use=_first_uses(trace, (alloc_at == BEFORE_STEP) & (row == _GRADIENT)),
            states_made=_first_reader(trace, set(states.tolist())),
            zeroed_first=bool(trace.ops) and trace.ops[0].phase is Phase.FORWARD,
            warmed_until=_warm_up_end(trace),
            warm_up_frees=_warm_up_frees(trace),
            product_thread=product,
            first_made_at=_first_products(trace, product, row),
        )

    def under_plan(
        self,
        recomputes: Sequence[Recompute],
        added: Sequence[Interval],
        removed: frozenset[int],
        offloads: Sequence[Offload] = (),
    ) -> AllocationTable:
        """Return the table of the step under a plan, from that of the captured one.

        `recomputes` are in the order in which they run. Under sharding `removed` are the storages that a rank does not
        have and `added` what it has instead, each of them there at some time (`is_there`).
        """
        between = _instants_between(added, self.instants)
        op, run = _build_instants(self.instants, recomputes, between)
        at = np.flatnonzero(run == NO_INDEX)  # the instant of each op of the step
        free_after = _instants_of(at, self.free_after)
        row = self.row.copy()
        own = np.arange(len(free_after))
        columns = [np.stack((own, np.full_like(own, NO_INDEX), _instants_of(at, self.alloc_at), free_after))]
        for number, each in enumerate(recomputes):
            instants = np.flatnonzero(run == number)
            free_after[each.held] = np.maximum(free_after[each.held], instants[-1])
            row[each.held] = np.where(row[each.held] == _TEMPORARY, _ACTIVATION, row[each.held])
            free_after[each.dropped] = at[each.dropped_after]
            # What is freed after an op that is not recomputed is gone before the next one that is.
            in_run = instants[np.searchsorted(each.ops, each.remade_until, side="right") - 1]
            columns.append(
                np.stack(
                    (
                        each.remade,
                        np.full_like(each.remade, number),
                        instants[np.searchsorted(each.ops, each.remade_at)],
                        np.where(each.replaces, _instants_of(at, self.free_after[each.remade]), in_run),
                    )
                )
            )
        for each in offloads:
            # The first instant at `back_at` that is none of sharding's: of a recompute, if one runs there, or the op.
            back = int(at[each.back_at - 1]) + 1
            back += int(np.argmax(run[back:] != BETWEEN))
            columns.append(
                np.stack(
                    (
                        each.storages,
                        np.full_like(each.storages, NO_INDEX),
                        np.full_like(each.storages, back),
                        free_after[each.storages],
                    )
                )
            )
            free_after[each.storages] = at[each.gone_at - 1]
        columns[0][3] = free_after
        storage, remade, alloc_at, free_after = np.concatenate(columns, axis=1)
        here = ~np.isin(storage, list(removed))
        storage, remade, alloc_at, free_after = (column[here] for column in (storage, remade, alloc_at, free_after))
        spans = _spans(added, between, at)
        # A unit is recomputed in autograd's thread, whatever thread its forward ran in.
        product = np.append(self.product_thread, NO_INDEX)[op]
        product = np.where((run >= 0) & (product != NO_INDEX), AUTOGRAD_THREAD, product)
        product = np.where(run == BETWEEN, NO_INDEX, product)[:-1]
        none = np.full(len(added), NO_INDEX)
        return AllocationTable(
            op=op,
            run=run,
            workspace_bytes=np.where(run == BETWEEN, 0, np.append(self.workspace_bytes, 0)[op])[:-1],
            size_bytes=np.concatenate((self.size_bytes[storage], _column(each.size_bytes for each in added))),
            row=np.concatenate((row[storage], _column(ROW[each.category] for each in added))),
            alloc_at=np.concatenate((alloc_at, spans[:, 0])),
            free_after=np.concatenate((free_after, spans[:, 1])),
            storage=np.concatenate((storage, none)),
            remade=np.concatenate((remade, none)),
            stream=np.concatenate((self.stream[storage], _column(STREAM_NUMBER[each.stream] for each in added))),
            first_use=np.concatenate(
                (np.where(remade == NO_INDEX, _instants_of(at, self.first_use)[storage], NO_INDEX), none)
            ),
            states_made=int(at[self.states_made]),
            zeroed_first=self.zeroed_first,
            warmed_until=int(at[self.warmed_until - 1]) + 1 if self.warmed_until else 0,
            warm_up_frees=np.concatenate((_instants_of(at, self.warm_up_frees)[storage], spans[:, 1])),
            product_thread=product,
            first_made_at=np.concatenate((self._first_made_under(product)[storage], none)),
        )

    def _first_made_under(self, product: Ints) -> Ints:
        """Return `first_made_at` when the products of the instants run in these threads."""
        found = self.first_made_at.copy()
        for number in np.flatnonzero(found != BEFORE_STEP).tolist():
            found[number] = np.flatnonzero(product == self.product_thread[found[number]])[0]
        return found

    @property
    def instants(self) -> int:
        """How many ops run; also the number of the end of the step."""
        return len(self.workspace_bytes)

    @property
    def seen(self) -> Flags:
        """Those that are there at an instant."""
        return (self.alloc_at == BEFORE_STEP) | (self.free_after == AFTER_STEP) | (self.free_after >= self.alloc_at)

    def levels(self, rounding_bytes: int = 1) -> tuple[Bytes, Bytes]:
        """Return the bytes before and during each instant (Note [Moments]), a row for each category."""
        size = round_up(self.size_bytes, rounding_bytes)
        allocated = np.zeros((len(CATEGORIES), self.instants + 1), np.int64)
        freed = np.zeros((len(CATEGORIES), self.instants + 1), np.int64)
        start = np.zeros(len(CATEGORIES), np.int64)
        resident, seen = self.alloc_at == BEFORE_STEP, self.seen
        made, gone = seen & ~resident, seen & (self.free_after != AFTER_STEP)
        np.add.at(start, self.row[resident], size[resident])
        np.add.at(allocated, (self.row[made], self.alloc_at[made]), size[made])
        np.add.at(freed, (self.row[gone], self.free_after[gone] + 1), size[gone])
        before = start[:, None] + np.cumsum(allocated, axis=1) - allocated - np.cumsum(freed, axis=1)
        during = before + allocated
        during[_TEMPORARY, :-1] += round_up(self.workspace_bytes, rounding_bytes)
        return before, during


def round_up(sizes: Bytes, rounding_bytes: int) -> Bytes:
    """Return sizes as the device's allocator rounds them."""
    return -(-sizes // rounding_bytes) * rounding_bytes


def in_order(recomputes: Iterable[Recompute]) -> tuple[Recompute, ...]:
    """Return recomputes in the order in which they run; no unit may lie inside another."""
    found = list(recomputes)
    forward = sorted((each.unit for each in found), key=lambda unit: unit.begin)
    for unit, following in pairwise(forward):
        if following.begin < unit.end:
            raise InputError(f"{following.name!r} lies inside {unit.name!r}, and both are checkpointed; leave one out")
    return tuple(sorted(found, key=lambda each: each.unit.backward_begin))


def is_there(interval: Interval, ops: int) -> bool:
    """Return whether an interval is ever there in a step of this many ops."""
    if not BEFORE_STEP <= interval.begin <= ops or interval.end < AFTER_STEP or interval.size_bytes < 0:
        raise InputError(
            f"{interval} is not in a step of {ops} ops; give ops from 0 to {ops}, BEFORE_STEP or AFTER_STEP for others"
        )
    begin = max(interval.begin, 0)
    ordered = begin == interval.end and interval.freed_order != NO_INDEX
    return interval.end == AFTER_STEP or begin < interval.end or ordered


@dataclass(slots=True)
class _Moment:
    """An instant between two ops: intervals that are made before it, and those that are freed after."""

    made: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)


def _instants_between(intervals: Sequence[Interval], ops: int) -> dict[int, list[_Moment]]:
    """Return the instants before each op. Intervals that are made after the last of them are in none."""
    acts: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for number, interval in enumerate(intervals):
        if interval.ahead and interval.begin != BEFORE_STEP:
            acts[interval.begin].append((interval.made_order, 0, number))
        if interval.freed_order != NO_INDEX and AFTER_STEP < interval.end <= ops:
            acts[interval.end].append((interval.freed_order, 1, number))
    found: dict[int, list[_Moment]] = {}
    for op, all_acts in acts.items():
        moments: list[_Moment] = []
        for _, freed, number in sorted(all_acts):
            if freed and moments:
                moments[-1].freed.append(number)
            elif not freed:
                if not moments or moments[-1].freed:
                    moments.append(_Moment())
                moments[-1].made.append(number)
        if moments and not moments[-1].freed:
            moments.pop()
        if moments:
            found[op] = moments
    return found


def _build_instants(
    ops: int, recomputes: Sequence[Recompute], between: Mapping[int, Sequence[_Moment]]
) -> tuple[Ints, Ints]:
    """Return the op and the recompute of each instant; the end of the step counts as op `ops`."""
    inserted = [(moment, 0, np.full(len(found), moment), BETWEEN) for moment, found in between.items()]
    inserted += [(each.unit.backward_begin, 1 + number, each.ops, number) for number, each in enumerate(recomputes)]
    op, run, done = [], [], 0
    for before, _, their_ops, number in sorted(inserted, key=lambda each: each[:2]):
        op += [np.arange(done, before), their_ops]
        run += [np.full(before - done, NO_INDEX), np.full(len(their_ops), number)]
        done = before
    op.append(np.arange(done, ops + 1))
    run.append(np.full(ops + 1 - done, NO_INDEX))
    return np.concatenate(op), np.concatenate(run)


def _spans(intervals: Sequence[Interval], between: Mapping[int, Sequence[_Moment]], at: Ints) -> Ints:
    """Return of each interval the instants at which it is made and after which it is freed."""
    last = np.concatenate(([BEFORE_STEP], at[:-1]))  # the instant of the op before each
    spans = np.full((len(intervals), 2), BEFORE_STEP)
    for number, interval in enumerate(intervals):
        begin, end = interval.begin, interval.end
        if begin != BEFORE_STEP:
            made_before = int(last[begin]) + 1 + len(between.get(begin, ()))
            spans[number, 0] = made_before if interval.ahead else at[begin]
        if AFTER_STEP < end < len(at):
            spans[number, 1] = last[end]
    for op, moments in between.items():
        for place, moment in enumerate(moments):
            spans[moment.made, 0] = spans[moment.freed, 1] = last[op] + 1 + place
    return spans


def _instants_of(at: Ints, ops: Ints) -> Ints:
    """Return the instants of ops; those outside the step stay what they are."""
    return np.where(ops < 0, ops, at[ops])


def _column(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)


def _streams_of(trace: Trace) -> Ints:
    """Return the place in `STREAMS` of the stream that each storage was captured on (`Trace.streams`)."""
    found = np.zeros(len(trace.storages), np.int64)
    for number, name in trace.streams.items():
        found[number] = STREAM_NUMBER[Stream(name)]
    return found


def _warm_up_end(trace: Trace) -> int:
    """Return how many ops a warm-up runs: those of the first forward, and of the loss where it evaluates."""
    phases = {"none": (), "forward": (Phase.FORWARD,), "evaluation": (Phase.FORWARD, Phase.LOSS)}[trace.warm_up]
    return next((index for index, op in enumerate(trace.ops) if op.phase not in phases), len(trace.ops))


def _warm_up_frees(trace: Trace) -> Ints:
    """Return the op after which each storage is freed in a warm-up; without autograd when nothing else holds it."""
    evaluates = trace.warm_up == "evaluation"
    ends = (each.released if evaluates and each.alloc_at >= 0 else each.free_after for each in trace.storages)
    return np.fromiter(ends, np.int64, len(trace.storages))


def _first_uses(trace: Trace, gradients: Flags) -> Ints:
    """Return the first op of the backward that uses each of these storages, `NO_INDEX` where none does."""
    found = np.full(len(gradients), NO_INDEX)
    waiting = set(np.flatnonzero(gradients).tolist())
    for index, op in enumerate(trace.ops):
        if not waiting:
            break
        if op.phase is Phase.BACKWARD:
            used = waiting.intersection(ref.storage for ref in op.inputs)
            found[list(used)] = index
            waiting -= used
    return found


def _first_products(trace: Trace, product: Ints, row: Ints) -> Ints:
    """Return the op at which a first step makes each workspace, `BEFORE_STEP` for other storages."""
    found = np.full(len(trace.storages), BEFORE_STEP)
    for number in np.flatnonzero(row == _WORKSPACE).tolist():
        thread = workspace_thread(trace.storages[number])
        if thread != NO_INDEX:
            found[number] = np.flatnonzero(product == thread)[0]
    return found


def _first_reader(trace: Trace, states: set[int]) -> int:
    """Return the op before which an optimizer makes all its state; the end of the step when none reads it."""
    phase = Phase.OPTIMIZER  # looking a member up takes longer than the rest of the loop
    for index, op in enumerate(trace.ops if states else ()):
        if op.phase is phase and any(ref.storage in states for ref in op.inputs):
            return index
    return len(trace.ops)
