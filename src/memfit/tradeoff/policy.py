"""A policy of one unit, and what it does: bytes, time, and the peak while the unit runs again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.memory import Recompute, Unit
from memfit.tradeoff.facts import Facts, Flags
from memfit.tradeoff.problem import Problem, Role, lost_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which ops of a unit are saved and which run again, as offsets from the unit's first op.

    `dropped` are the storages that are dropped, each as the op that makes it and its place among the new storages of
    that op: a tensor that autograd packs is dropped when its storage is one of these, all others are held. `stop` is
    the last op of the second run, -1 when there is none. `discarded_bytes` is what backward no longer finds, less what
    is newly held; `cached_bytes` is what is held because of this policy. `recompute_peak_bytes` is the highest point of
    the second run above the level just before the unit's backward. `profile` is what changes while the unit runs for
    the first time: after an op, by so many bytes.
    """

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    dropped: tuple[tuple[int, int], ...]
    stop: int
    discarded_bytes: int
    cached_bytes: int
    recompute_ms: float
    recompute_peak_bytes: int
    profile: tuple[tuple[int, int], ...] = ()


def build_policy(problem: Problem, dropped: Flags) -> Policy:
    """The policy that lets these groups run again and saves all others."""
    group, role = problem.group, problem.role
    offsets = np.arange(len(group))
    discardable = role == Role.DISCARDABLE
    owned = discardable | (role == Role.FRESH)
    of_dropped = np.zeros(len(role), bool)
    of_dropped[owned] = dropped[group[problem.alloc_at[owned]]]
    stop = int(problem.need[discardable & of_dropped].max(initial=-1))
    reached = offsets <= stop
    runs = reached & (problem.view | dropped[group] if problem.groups else problem.view)
    carries = np.zeros(len(group), bool)
    carries[problem.alloc_at[discardable]] = True
    newly_held = int(problem.size[(role == Role.FRESH) & ~of_dropped & (problem.alloc_at <= stop)].sum())
    gone = int(problem.size[discardable & of_dropped].sum())
    kept = int(problem.size[discardable & ~of_dropped].sum())
    return Policy(
        saved=tuple(np.flatnonzero(np.where(reached, ~runs, carries)).tolist()),
        recomputed=tuple(np.flatnonzero(runs).tolist()),
        dropped=_results(problem, discardable & of_dropped),
        stop=stop,
        discarded_bytes=gone - newly_held - problem.input_bytes if stop >= 0 else 0,
        cached_bytes=kept + newly_held,
        recompute_ms=float(problem.ms[runs].sum()),
        recompute_peak_bytes=_peak_bytes(problem, runs, stop),
        profile=_profile(problem, discardable & of_dropped, (role == Role.FRESH) & ~of_dropped, stop)
        if stop >= 0
        else (),
    )


def _profile(problem: Problem, dropped: Flags, held: Flags, stop: int) -> tuple[tuple[int, int], ...]:
    """Bytes that leave early because they are dropped, and those that stay because they are held, by op."""
    count = len(problem.ms)
    change = np.zeros(count + 1, np.int64)
    np.subtract.at(change, problem.gone[dropped], problem.size[dropped])
    newly = held & (problem.alloc_at <= stop)
    np.add.at(change, problem.gone[newly], problem.size[newly])
    np.add.at(change, problem.input_ends, problem.input_size)
    return tuple((int(op), int(change[op])) for op in np.flatnonzero(change[: count - 1]))


def _results(problem: Problem, chosen: Flags) -> tuple[tuple[int, int], ...]:
    """Storages by the op that makes them and their place among the new storages of that op."""
    made = np.flatnonzero(problem.role != Role.LOOSE)
    alloc_at = problem.alloc_at[made]
    place = np.arange(len(made)) - np.searchsorted(alloc_at, alloc_at)
    picked = chosen[made]
    return tuple(zip(alloc_at[picked].tolist(), place[picked].tolist(), strict=True))


def _peak_bytes(problem: Problem, runs: Flags, stop: int) -> int:
    """The highest point of a second run: results as they come and go, and the workspace of each op."""
    if stop < 0:
        return 0
    made = runs[problem.alloc_at] & (problem.ends >= problem.alloc_at)
    change = np.zeros(len(runs) + 2, np.int64)
    np.add.at(change, problem.alloc_at[made], problem.size[made])
    np.add.at(change, problem.ends[made] + 1, -problem.size[made])
    level = np.cumsum(change)[: stop + 1]
    return int((level + np.where(runs, problem.workspace, 0)[: stop + 1]).max(initial=0))


def build_recompute(facts: Facts, unit: Unit, policy: Policy) -> Recompute:
    """Return what a policy changes in the allocations of the step (memory's Note [Allocations under a plan])."""
    problem = Problem.of(facts, unit)
    low, high = np.searchsorted(facts.forward_alloc_at, (unit.begin, unit.end))
    own = facts.forward_storages[low:high]
    saved, runs = np.zeros((2, len(problem.view)), bool)
    saved[list(policy.saved)] = True
    runs[list(policy.recomputed)] = True
    held, discardable = saved[problem.alloc_at], problem.role == Role.DISCARDABLE
    newly_held = own[(problem.role == Role.FRESH) & held & (problem.alloc_at <= policy.stop)]
    dropped = own[discardable & ~held]
    made = runs[problem.alloc_at] & (problem.ends >= problem.alloc_at)
    return Recompute(
        unit=unit,
        ops=unit.begin + np.array(policy.recomputed, np.int64),
        held=np.concatenate((newly_held, lost_inputs(facts, unit))),
        dropped=dropped,
        dropped_after=np.maximum(facts.released[dropped], facts.alloc_at[dropped]),
        remade=own[made],
        remade_at=unit.begin + problem.alloc_at[made],
        remade_until=unit.begin + problem.ends[made],
        replaces=discardable[made],
    )
