"""`SACStats` and its companions, names that users of `torch.distributed._tools` know, made from a trace."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from memfit.capture import NO_INDEX, Category, Trace
from memfit.errors import InputError
from memfit.tradeoff import Times, Unit

SKIPPED_OPS = frozenset(
    map(
        str,
        (
            *SAC_IGNORED_OPS,
            torch.ops.aten.lift_fresh.default,
            torch.ops.profiler._record_function_exit._RecordFunction,
            torch.ops.aten.clone.default,
        ),
    )
)
"""Ops that selective checkpointing neither saves nor counts, as in the prototype."""


@dataclass
class SACStats:
    """The ops of one module call that selective checkpointing decides on, as columns.

    `runtimes` are milliseconds and `memory` is bytes; the last op that makes something has none, because its
    result is the module's output. `view_like_ops`, `rand_ops` and `saved_autograd_ops` (all results of which
    autograd saves) are indices; `inplace_ops` are pairs of an op and the first one that has the same storage, or
    itself. With `force_store_random` there is no input that could be replayed.
    """

    func_names: list[str]
    runtimes: list[float]
    memory: list[int]
    view_like_ops: list[int]
    rand_ops: list[int]
    saved_autograd_ops: list[int]
    inplace_ops: list[tuple[int, int]]
    force_store_random: bool


class MSPS(NamedTuple):
    """A group of ops that is discarded together: names, first op, bytes, milliseconds, bytes per millisecond."""

    func_names: set[str]
    op_idx: int
    memory: int
    runtime: float
    msps: float


@dataclass
class SACGreedyOrderMeta:
    """The order in which groups are given up, most bytes per millisecond first.

    `recomputed_ops` are always recomputed and `stored_ops` never, the latter by the heads of their groups. Groups
    are by their heads: those of in-place ops, and the one of random ops with the groups that these touch.
    """

    recomputed_ops: set[int]
    stored_ops: set[int]
    inplace_op_groups: dict[int, set[int]]
    random_ops_group: dict[int, set[int]]
    msps_meta: list[MSPS]


@dataclass
class SACTradeOffStats:
    """The greedy order as a curve, and a continuous piecewise linear fit of it.

    Keys of `tradeoff_curve` are the discarded share of `sac_memory`, values the share of `sac_runtime` that is
    run again. Segment i is `slopes[i] * x + intercepts[i]` between `fit_breaks[i]` and `fit_breaks[i + 1]`.
    """

    n_segments: int
    slopes: list[float]
    intercepts: list[float]
    fit_breaks: list[float]
    tradeoff_curve: OrderedDict[float, float]
    sac_memory: int
    sac_runtime: float


class SACTable:
    """What statistics of modules need of a trace, read once."""

    def __init__(self, trace: Trace, op_ms: Sequence[float] | Times) -> None:
        self.trace = trace
        self.op_ms: list[float] = np.asarray(op_ms, np.float64).tolist()
        if len(self.op_ms) != len(trace.ops):
            raise InputError(f"{len(trace.ops)} ops need as many times, and {len(self.op_ms)} were given")
        self.skipped = [op.name in SKIPPED_OPS for op in trace.ops]
        rounding = trace.hardware.allocator.rounding_bytes
        self.bytes = [-(-storage.bytes // rounding) * rounding for storage in trace.storages]
        self.names: dict[str, str] = {}

    def stats(self, unit: Unit) -> SACStats:
        """Return the statistics of one module call."""
        kept = [op for op in range(unit.begin, unit.end) if not self.skipped[op]]
        ops = [self.trace.ops[op] for op in kept]
        made = [{ref.storage for ref in op.outputs} - {NO_INDEX} for op in ops]
        views = [i for i, op in enumerate(ops) if op.view]
        in_place = _in_place(made, [_writes_in_place(op.name) for op in ops])
        memory = [
            0 if op.view else sum(self.bytes[storage] for storage in storages)
            for op, storages in zip(ops, made, strict=True)
        ]
        passing = {*views, *(op for op, _ in in_place)}
        last = next((i for i in range(len(ops) - 1, -1, -1) if i not in passing), None)
        if last is not None:
            memory[last] = 0
        return SACStats(
            func_names=[self._packet(op.name) for op in ops],
            runtimes=[self.op_ms[op] for op in kept],
            memory=memory,
            view_like_ops=views,
            rand_ops=[i for i, op in enumerate(ops) if op.random],
            saved_autograd_ops=[i for i, storages in enumerate(made) if self._saved(storages, unit)],
            inplace_ops=in_place,
            force_store_random=not self._reads_input(unit),
        )

    def _packet(self, name: str) -> str:
        """Strip namespace and overload: `aten.add.Tensor` is `add`."""
        packet = self.names.get(name)
        if packet is None:
            packet = self.names[name] = name.split(".")[1]
        return packet

    def _saved(self, storages: set[int], unit: Unit) -> bool:
        """Return whether autograd has saved all of them by the time the unit's forward is over."""
        records = self.trace.storages
        return bool(storages) and all(any(op < unit.end for op in records[s].saved_by) for s in storages)

    def _reads_input(self, unit: Unit) -> bool:
        """Return whether the unit reads a tensor older than itself that the model does not own."""
        records = self.trace.storages
        for op in range(unit.begin, unit.end):
            for ref in self.trace.ops[op].inputs:
                if ref.storage == NO_INDEX:
                    return True
                storage = records[ref.storage]
                if storage.alloc_at < unit.begin and storage.category not in (Category.PARAMETER, Category.BUFFER):
                    return True
        return False


def sac_stats(trace: Trace, op_ms: Sequence[float] | Times, unit: Unit) -> SACStats:
    """Return the statistics of one unit for these times of the trace's ops; for many units keep a `SACTable`."""
    return SACTable(trace, op_ms).stats(unit)


def _writes_in_place(name: str) -> bool:
    """Return whether an op's name says that it writes to its first argument, as in `add_` and `__iadd__`."""
    packet = name.split(".")[1]
    if packet.startswith("__") and packet.endswith("__"):
        return packet.startswith("__i")
    return packet.endswith("_")


def _in_place(made: list[set[int]], writes: list[bool]) -> list[tuple[int, int]]:
    """Pair each in-place op with the first op before it that has the same storages, or with itself."""
    pairs = []
    for i, storages in enumerate(made):
        if writes[i]:
            first = next((j for j in range(i) if storages <= made[j]), i) if storages else i
            pairs.append((i, first))
    return pairs


# -- The greedy order of the prototype: groups of ops by bytes per millisecond, each op in exactly one group ----------


def greedy_order(sac_stats: SACStats) -> SACGreedyOrderMeta:
    """Order the groups of ops by bytes freed per recompute time, the best first.

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
    """Return the ops that are stored or recomputed together with this head of a group."""
    return greedy.random_ops_group.get(op) or greedy.inplace_op_groups.get(op) or {op}


def _msps(sac_stats: SACStats, head: int, group: set[int]) -> MSPS:
    memory = sum(sac_stats.memory[op] for op in group)
    runtime = sum(sac_stats.runtimes[op] for op in sorted(group))
    names = {sac_stats.func_names[op] for op in group}
    return MSPS(names, head, memory, runtime, memory / runtime if runtime > 0 else sys.float_info.max)
