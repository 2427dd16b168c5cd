"""The allocations of a step under a plan: which are made and freed when, op by op, second runs included.

Note [Lives under a plan]: instants are the ops of the step and, before the op at which a unit runs again, those of its
ops that do. A storage lives as it did in the captured step, except that

1. one that a policy drops is freed when nothing but autograd held it; the second run makes another in its place, which
   lives until the original would have gone;
2. a result that a policy saves and autograd would not have kept, and an input of a checkpointed unit that would be gone
   by then, live until the second run that needs them is over. Several units may need one; it is there once;
3. whatever else a second run makes again lives as long within it as it did in the first run, at most until its end.

Under sharding some storages are replaced by intervals: shards, gathered parameters, buffers. What sharding makes and
frees between two ops it does in an order, where that is given. Whenever it has made something and frees something
after that, there is an instant of its own, at which both are there; it comes before units that run again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from memfit.capture import NEVER, Category
from memfit.errors import InputError
from memfit.memory import CATEGORIES
from memfit.memory.events import AllocationTable
from memfit.memory.intervals import Interval
from memfit.tradeoff import Policy, Unit
from memfit.tradeoff.facts import Facts, Ints
from memfit.tradeoff.problem import Problem, Role, lost_inputs

Chosen = tuple[Unit, Policy]

_TEMPORARY, _ACTIVATION = map(CATEGORIES.index, (Category.TEMPORARY, Category.ACTIVATION))
BETWEEN = -2
"""Marks an instant between two ops, when sharding has made something and not yet freed something else."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedLives:
    """Instants and allocations of the step under a plan.

    `op` is, for each instant, the op of the trace that runs, and `run` the number in `units` of the second run that it
    belongs to, `NEVER` in the step itself; the last instant is the end of the step. Where `run` is `BETWEEN` none
    runs, and `op` is the next. `storage` and `remade` are of each allocation: the storage that it is, or is made in
    place of, and the second run that made it. The last allocations are the `intervals`, in their order, and have
    neither.
    """

    units: tuple[Unit, ...]
    intervals: tuple[Interval, ...]
    op: Ints
    run: Ints
    lives: AllocationTable
    storage: Ints
    remade: Ints


def planned_lives(
    facts: Facts, chosen: Iterable[Chosen], *, intervals: Sequence[Interval], removed: frozenset[int]
) -> PlannedLives:
    """Lives of the step with these units checkpointed (Note [Lives under a plan])."""
    step = AllocationTable.of(facts.trace)
    runs = _in_order(chosen)
    added = [interval for interval in intervals if _there(interval, step.instants)]
    between = _between(added, step.instants)
    op, run = _instants(step.instants, runs, between)
    at = np.flatnonzero(run == NEVER)
    free_after = _at(at, step.free_after)
    row = step.row.copy()
    parts = [
        _run_again(facts, number, each, np.flatnonzero(run == number), at, free_after, row)
        for number, each in enumerate(runs)
    ]
    own = np.arange(len(free_after))
    storage, remade, alloc_at, free_after = np.concatenate(
        [np.stack((own, np.full_like(own, NEVER), _at(at, step.alloc_at), free_after)), *parts], axis=1
    )
    here = ~np.isin(storage, list(removed))
    storage, remade, alloc_at, free_after = (column[here] for column in (storage, remade, alloc_at, free_after))
    spans = _spans(added, between, at)
    rows = [CATEGORIES.index(interval.category) for interval in added]
    sizes = [interval.size_bytes for interval in added]
    nothing = np.full(len(added), NEVER)
    return PlannedLives(
        units=tuple(unit for unit, _ in runs),
        intervals=tuple(added),
        op=op,
        run=run,
        lives=AllocationTable(
            size_bytes=np.concatenate((step.size_bytes[storage], np.array(sizes, np.int64))),
            row=np.concatenate((row[storage], np.array(rows, np.int64))),
            alloc_at=np.concatenate((alloc_at, spans[:, 0])),
            free_after=np.concatenate((free_after, spans[:, 1])),
            workspace_bytes=np.where(run == BETWEEN, 0, np.append(step.workspace_bytes, 0)[op])[:-1],
            states_made=int(at[step.states_made]),
        ),
        storage=np.concatenate((storage, nothing)),
        remade=np.concatenate((remade, nothing)),
    )


def _in_order(chosen: Iterable[Chosen]) -> list[Chosen]:
    """Units in the order in which they run again; no policy may be for a part of another's unit."""
    runs = [each for each in chosen if each[1].stop >= 0]
    forward = sorted((unit for unit, _ in runs), key=lambda unit: unit.begin)
    for unit, following in pairwise(forward):
        if following.begin < unit.end:
            raise InputError(f"{following.name!r} lies inside {unit.name!r}, and both are checkpointed; leave one out")
    return sorted(runs, key=lambda each: each[0].backward_begin)


def _instants(ops: int, runs: Sequence[Chosen], between: Mapping[int, Sequence[_Moment]]) -> tuple[Ints, Ints]:
    """The op and the second run of each instant; the end of the step counts as op `ops`."""
    inserted = [(moment, 0, np.full(len(found), moment), BETWEEN) for moment, found in between.items()]
    for number, (unit, policy) in enumerate(runs):
        inserted.append((unit.backward_begin, 1 + number, unit.begin + np.array(policy.recomputed, np.int64), number))
    op, run, done = [], [], 0
    for before, _, their_ops, number in sorted(inserted, key=lambda each: each[:2]):
        op += [np.arange(done, before), their_ops]
        run += [np.full(before - done, NEVER), np.full(len(their_ops), number)]
        done = before
    op.append(np.arange(done, ops + 1))
    run.append(np.full(ops + 1 - done, NEVER))
    return np.concatenate(op), np.concatenate(run)


def _run_again(
    facts: Facts, number: int, chosen: Chosen, instants: Ints, at: Ints, free_after: Ints, row: Ints
) -> Ints:
    """Change ends and categories of storages as a policy does; columns (storage, run, born, dies) of those remade."""
    unit, policy = chosen
    problem = Problem.of(facts, unit)
    low, high = np.searchsorted(facts.forward_alloc_at, (unit.begin, unit.end))
    own = facts.forward_storages[low:high]
    saved, runs = np.zeros((2, len(problem.view)), bool)
    saved[list(policy.saved)] = True
    runs[list(policy.recomputed)] = True
    held, discardable = saved[problem.alloc_at], problem.role == Role.DISCARDABLE
    newly_held = own[(problem.role == Role.FRESH) & held & (problem.alloc_at <= policy.stop)]
    for storages in (newly_held, lost_inputs(facts, unit)):
        free_after[storages] = np.maximum(free_after[storages], instants[-1])
        row[storages] = np.where(row[storages] == _TEMPORARY, _ACTIVATION, row[storages])
    dropped = own[discardable & ~held]
    free_after[dropped] = at[np.maximum(facts.released[dropped], facts.alloc_at[dropped])]
    made = runs[problem.alloc_at] & (problem.ends >= problem.alloc_at)
    again, ends = own[made], problem.ends[made]
    offsets = np.array(policy.recomputed, np.int64)
    # What goes at an op that does not run again is gone before the next that does.
    in_run = instants[np.searchsorted(offsets, ends, side="right") - 1]
    return np.stack(
        (
            again,
            np.full_like(again, number),
            instants[np.searchsorted(offsets, problem.alloc_at[made])],
            np.where(discardable[made], _at(at, facts.free_after[again]), in_run),
        )
    )


def _at(at: Ints, ops: Ints) -> Ints:
    """The instants of ops; `NEVER` stays what it is."""
    return np.where(ops == NEVER, NEVER, at[ops])


def _there(interval: Interval, ops: int) -> bool:
    """Whether an interval is ever there."""
    if not NEVER <= interval.begin <= ops or interval.end < NEVER or interval.size_bytes < 0:
        raise InputError(f"{interval} is not in a step of {ops} ops; give ops from 0 to {ops}, NEVER for outside of it")
    begin = max(interval.begin, 0)
    return interval.end == NEVER or begin < interval.end or (begin == interval.end and interval.freed_order != NEVER)


@dataclass(slots=True)
class _Moment:
    """An instant between two ops: intervals that are made before it, and those that are freed after."""

    made: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)


def _between(intervals: Sequence[Interval], ops: int) -> dict[int, list[_Moment]]:
    """For each op the instants before it. Intervals that are made after the last of them are in none."""
    acts: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for number, interval in enumerate(intervals):
        if interval.ahead and interval.begin != NEVER:
            acts[interval.begin].append((interval.made_order, 0, number))
        if interval.freed_order != NEVER and NEVER < interval.end <= ops:
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


def _spans(intervals: Sequence[Interval], between: Mapping[int, Sequence[_Moment]], at: Ints) -> Ints:
    """Of each interval the instants at which it is made and after which it goes."""
    last = np.concatenate(([NEVER], at[:-1]))  # the instant of the op before each
    spans = np.full((len(intervals), 2), NEVER)
    for number, interval in enumerate(intervals):
        begin, end = interval.begin, interval.end
        if begin != NEVER:
            made_before = int(last[begin]) + 1 + len(between.get(begin, ()))
            spans[number, 0] = made_before if interval.ahead else at[begin]
        if NEVER < end < len(at):
            spans[number, 1] = last[end]
    for op, moments in between.items():
        for place, moment in enumerate(moments):
            spans[moment.made, 0] = spans[moment.freed, 1] = last[op] + 1 + place
    return spans
