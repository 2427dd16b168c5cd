"""`get_optimal_checkpointing_policy_per_module`: which ops of one module to save, exactly.

Ops that share a fate form a group: an in-place op and its parent, and all random ops unless each of them must be saved.
A group is saved, recomputed, or free to choose; among the free ones the most run time is to be saved within the bytes
allowed, a knapsack. Groups of equal bytes and equal time, as equal layers have them, are one variable that counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from memfit.errors import InputError
from memfit.solve.milp import Limits, Milp, SolverError, Status

LIMITS = Limits(gap=0.0, time_limit_s=60.0)


class SACDecision(IntEnum):
    """What selective checkpointing does with an op's result."""

    RECOMPUTE = 0
    SAVE = 1


class ModuleStats(Protocol):
    """What is read of memfit's or PyTorch's `SACStats`."""

    runtimes: list[float]
    memory: list[int]
    view_like_ops: list[int]
    rand_ops: list[int]
    inplace_ops: list[tuple[int, int]]
    force_store_random: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    ops: tuple[int, ...]
    total_bytes: int
    total_ms: float


def get_optimal_checkpointing_policy_per_module(sac_stats: ModuleStats, memory_budget: float) -> list[int]:
    """For each op of a module 1 (save) or 0 (recompute), so that the saved ones have the most run time.

    The budget is a share, 0 to 1, of the bytes of all ops. The list is empty, as the prototype's, when the ops that
    must be saved are above it or one of them is a view. Of equal groups the earliest are saved; an op without run
    time is saved only if it must be.
    """
    if not 0 <= memory_budget <= 1:
        raise InputError(f"memory_budget is {memory_budget!r}; give a share of the module's bytes from 0 to 1")
    saved = _forced(sac_stats)
    recomputed = set(sac_stats.view_like_ops)
    groups = _groups(sac_stats)
    must = [group for group in groups if saved.intersection(group.ops)]
    if any(recomputed.intersection(group.ops) for group in must):
        return []
    left_bytes = math.ceil(memory_budget * sum(sac_stats.memory)) - sum(group.total_bytes for group in must)
    if left_bytes < 0:
        return []
    free = [group for group in groups if not (saved | recomputed).intersection(group.ops) and group.total_ms > 0]
    decisions = [SACDecision.RECOMPUTE.value] * len(sac_stats.memory)
    for group in [*must, *_knapsack(free, left_bytes)]:
        for op in group.ops:
            decisions[op] = SACDecision.SAVE.value
    return decisions


def _forced(stats: ModuleStats) -> set[int]:
    """Random ops that cannot be replayed, and ops that write to what is not the module's own."""
    saved = {op for op, parent in stats.inplace_ops if op == parent}
    return saved.union(stats.rand_ops) if stats.force_store_random else saved


def _groups(stats: ModuleStats) -> list[_Group]:
    """The ops in the order of each group's first."""
    head = list(range(len(stats.memory)))

    def find(op: int) -> int:
        while head[op] != op:
            op = head[op]
        return op

    together = [] if stats.force_store_random else [(op, stats.rand_ops[0]) for op in stats.rand_ops]
    for op, other in (*stats.inplace_ops, *together):
        first, second = sorted((find(op), find(other)))
        head[second] = first
    members: dict[int, list[int]] = {}
    for op in range(len(stats.memory)):
        members.setdefault(find(op), []).append(op)
    return [
        _Group(
            ops=tuple(ops),
            total_bytes=sum(stats.memory[op] for op in ops),
            total_ms=math.fsum(stats.runtimes[op] for op in ops),
        )
        for ops in members.values()
    ]


def _knapsack(groups: Iterable[_Group], left_bytes: int) -> list[_Group]:
    """The groups of most time whose bytes are at most those left; without bytes they are taken anyway."""
    taken: list[_Group] = []
    equal: dict[tuple[int, float], list[_Group]] = {}
    for group in groups:
        if group.total_bytes == 0:
            taken.append(group)
        elif group.total_bytes <= left_bytes:
            equal.setdefault((group.total_bytes, group.total_ms), []).append(group)
    if sum(size * len(alike) for (size, _), alike in equal.items()) <= left_bytes:
        return [*taken, *(group for alike in equal.values() for group in alike)]
    unit_bytes = math.gcd(*(size for size, _ in equal))
    longest_ms = max(ms for _, ms in equal)
    milp = Milp()
    counts = [milp.variable(cost=-ms / longest_ms, upper=len(alike)) for (_, ms), alike in equal.items()]
    sizes = [size // unit_bytes for size, _ in equal]
    milp.row(zip(counts, sizes, strict=True), upper=left_bytes // unit_bytes)
    solution = milp.solve(LIMITS)
    if solution.status is not Status.OPTIMAL:
        raise SolverError(
            f"the best of {len(counts)} kinds of ops was not proven in {LIMITS.time_limit_s:g} s; "
            "decide on the modules inside this one instead"
        )
    numbers = [round(solution.values[count]) for count in counts]
    if sum(size * number for size, number in zip(sizes, numbers, strict=True)) > left_bytes // unit_bytes:
        raise SolverError("HiGHS gave an answer above the bytes allowed; please report the module")
    return [*taken, *(group for alike, number in zip(equal.values(), numbers, strict=True) for group in alike[:number])]
