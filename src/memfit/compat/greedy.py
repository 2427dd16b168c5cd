"""The greedy order of the prototype: groups of ops by bytes per millisecond, each op in exactly one group."""

from __future__ import annotations

import sys

from memfit.compat.sac import MSPS, SACGreedyOrderMeta, SACStats


def greedy_order(sac_stats: SACStats) -> SACGreedyOrderMeta:
    """The order in which groups are given up.

    Views always run again. Stored are: a group that writes to what is older than the module, which shows in its
    head being itself in-place or a view; and with `force_store_random` the group of the random ops.
    """
    views, random = set(sac_stats.view_like_ops), set(sac_stats.rand_ops)
    head_of = dict(sac_stats.inplace_ops)
    in_place: dict[int, set[int]] = {}
    for op, head in sac_stats.inplace_ops:
        in_place.setdefault(head, {head}).add(op)
    touched = [head for head, group in in_place.items() if group & random]
    together = random.union(*(in_place[head] for head in touched))
    random_group = {min(together): together} if together else {}

    groups = {head: group for head, group in in_place.items() if head not in touched} | random_group
    unwritable = {head for head in in_place if head in head_of or head in views}
    stored = unwritable - set(touched)
    if random_group and (sac_stats.force_store_random or unwritable & set(touched)):
        stored |= random_group.keys()

    members = set().union(*groups.values())
    alone = {op: {op} for op in range(len(sac_stats.memory)) if op not in members and op not in views}
    candidates = {head: group for head, group in (alone | groups).items() if head not in stored}
    return SACGreedyOrderMeta(
        recomputed_ops=views - members,
        stored_ops=stored,
        inplace_op_groups=in_place,
        random_ops_group=random_group,
        msps_meta=sorted(
            (_msps(sac_stats, head, group) for head, group in candidates.items()),
            key=lambda each: (-each.msps, each.op_idx),
        ),
    )


def group_of(greedy: SACGreedyOrderMeta, op: int) -> set[int]:
    """The ops that are stored or run again together with this head of a group."""
    return greedy.random_ops_group.get(op) or greedy.inplace_op_groups.get(op) or {op}


def _msps(sac_stats: SACStats, head: int, group: set[int]) -> MSPS:
    memory = sum(sac_stats.memory[op] for op in group)
    runtime = sum(sac_stats.runtimes[op] for op in sorted(group))
    names = {sac_stats.func_names[op] for op in group}
    return MSPS(names, head, memory, runtime, memory / runtime if runtime > 0 else sys.float_info.max)
