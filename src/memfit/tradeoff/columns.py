"""What frontiers need of a trace, read once: columns over forward ops and over storages.

Note [Columns]: nested units look at the same ops again and again, so nothing here depends on a unit. A unit takes
slices of these columns, and equal slices mean equal units.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from memfit.capture import GENERATOR, NO_INDEX, Category, Op, Trace
from memfit.errors import InputError
from memfit.memory import Flags, Ints, round_up
from memfit.tradeoff.units import FORWARD

Times = NDArray[np.float64]

PICOSECONDS = 1e9
"""In a millisecond. Times are compared as whole picoseconds, so that the order of a sum does not matter."""

UPDATES = {
    "aten.native_batch_norm.default": ((3, 4), 5),
    "aten.cudnn_batch_norm.default": ((3, 4), 5),
    "aten.miopen_batch_norm.default": ((3, 4), 5),
    "aten.batch_norm_gather_stats.default": ((3, 4), None),
    "aten.batch_norm_gather_stats_with_counts.default": ((3, 4), None),
    "aten.batch_norm_update_stats.default": ((1, 2), None),
}
"""Ops that update running statistics without saying so in their schema: where these are, and the training flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceColumns:
    """Columns of a trace. Those of ops have the trace's length; ops outside the forward are blank.

    `signature` has, for each op, everything of it that a frontier depends on and that is its own. `writes` and
    `reads` are pairs of op and storage, `stale` triples of a reader, the storage it reads and the first op
    after it that overwrites that storage. `cached` are copies of parameters that autocast holds until it ends.
    `packed` is the op after which the last tensor of a storage that autograd saves has been packed; `forward_storages`
    lists the storages made in the forward in the order of their allocation.
    """

    trace: Trace
    rounding_bytes: int
    op_ms: Times
    view: Flags
    random: Flags
    pinned: Flags
    workspace: Ints
    signature: Ints
    read_op: Ints
    read_storage: Ints
    write_op: Ints
    write_storage: Ints
    stale: Ints
    size: Ints
    alloc_at: Ints
    free_after: Ints
    released: Ints
    made: Flags
    cached: Flags
    first_saver: Ints
    last_saver: Ints
    packed: Ints
    last_read: Ints
    last_write: Ints
    forward_storages: Ints
    forward_alloc_at: Ints

    @classmethod
    def of(cls, trace: Trace, op_ms: Times) -> TraceColumns:
        """Read a trace; sizes are rounded as its device's allocator does."""
        op_ms = np.asarray(op_ms, np.float64)
        if op_ms.shape != (len(trace.ops),):
            raise InputError(f"{len(trace.ops)} ops need as many times, and {op_ms.shape} were given")
        if not np.isfinite(op_ms).all() or (op_ms < 0).any():
            raise InputError("the time of an op is negative or not finite; give op_ms in milliseconds")
        return _Reader(trace, op_ms).columns()


class _Reader:
    """Goes over the forward ops once, in Python, and makes arrays of what it saw."""

    def __init__(self, trace: Trace, op_ms: Times) -> None:
        self.trace = trace
        self.op_ms = op_ms
        self.rounding_bytes = trace.hardware.allocator.rounding_bytes
        count = len(trace.ops)
        self.kind = np.zeros(count, np.int64)
        self.view = np.zeros(count, bool)
        self.random = np.zeros(count, bool)
        self.pinned = np.zeros(count, bool)
        self.workspace = np.zeros(count, np.int64)
        self.made = np.zeros(len(trace.storages), bool)
        self.cached = np.zeros(len(trace.storages), bool)
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.last_of_function: dict[int, int] = {}
        self._kinds: dict[object, int] = {}
        self._geometries: dict[object, int] = {}
        self._geometry_of: dict[int, int] = {}
        self._trained = {parameter.storage for parameter in trace.parameters if parameter.trainable}
        for index, op in enumerate(trace.ops):
            if op.phase in FORWARD:
                self._read(index, op)

    def _read(self, index: int, op: Op) -> None:
        storages = self.trace.storages
        self.kind[index] = self._kind(op)
        self.view[index] = op.view
        given = GENERATOR in op.arguments
        self.random[index] = op.random and not given
        self.pinned[index] = given  # nobody puts a generator of the step's own back
        self.workspace[index] = op.workspace_bytes
        if op.forward_op != NO_INDEX:
            self.last_of_function[op.forward_op] = index
        for ref in op.inputs:
            # A parameter that was gathered in the forward is not held for a recompute: the backward gathers it again.
            if ref.storage != NO_INDEX and storages[ref.storage].category is not Category.GATHERED_PARAMETER:
                self.reads.append((index, ref.storage))
        if not op.view:
            for ref in op.outputs:
                if ref.storage != NO_INDEX and storages[ref.storage].alloc_at == index:
                    self.made[ref.storage] = True
                    self.cached[ref.storage] = self._is_cached(op)
        for storage in (*op.mutates, *_updated(op)) if op.name in UPDATES else op.mutates:
            if storage == NO_INDEX:
                self.pinned[index] = True
            else:
                self.writes.append((index, storage))

    def _is_cached(self, op: Op) -> bool:
        """Return whether an op casts a parameter that is trained, under autocast."""
        if self.trace.autocast is None or op.name != "aten._to_copy.default":
            return False
        return op.inputs[0].storage in self._trained

    def _kind(self, op: Op) -> int:
        geometry = self._geometry_of
        key = [op.name, op.arguments, len(op.inputs)]
        for ref in (*op.inputs, *op.outputs):
            number = geometry.get(id(ref))
            if number is None:
                view = (ref.shape, ref.stride, ref.offset, ref.dtype, ref.storage == NO_INDEX)
                number = geometry[id(ref)] = self._geometries.setdefault(view, len(self._geometries))
            key.append(number)
        return self._kinds.setdefault(tuple(key), len(self._kinds))

    def columns(self) -> TraceColumns:
        trace, ops = self.trace, len(self.trace.ops)
        storages = trace.storages
        count = len(storages)
        read = np.array(self.reads, np.int64).reshape(-1, 2)
        write = np.array(self.writes, np.int64).reshape(-1, 2)
        alloc_at = np.fromiter((storage.alloc_at for storage in storages), np.int64, count)
        first_saver, last_saver, packed = self._savers()
        last_read = np.full(count, NO_INDEX)
        np.maximum.at(last_read, read[:, 1], read[:, 0])
        last_write = np.full(count, NO_INDEX)
        np.maximum.at(last_write, write[:, 1], write[:, 0])
        forward = np.fromiter((op.phase in FORWARD for op in trace.ops), bool, ops)
        in_forward = (alloc_at >= 0) & (alloc_at < ops)
        in_forward[in_forward] = forward[alloc_at[in_forward]]
        forward_storages = np.flatnonzero(in_forward)
        forward_storages = forward_storages[np.argsort(alloc_at[forward_storages], kind="stable")]
        workspace = round_up(self.workspace, self.rounding_bytes)
        flags = self.view + 2 * self.random + 4 * self.pinned
        return TraceColumns(
            trace=trace,
            rounding_bytes=self.rounding_bytes,
            op_ms=self.op_ms,
            view=self.view,
            random=self.random,
            pinned=self.pinned,
            workspace=workspace,
            signature=np.stack((self.kind, flags, workspace, self.op_ms.view(np.int64)), axis=1),
            read_op=read[:, 0],
            read_storage=read[:, 1],
            write_op=write[:, 0],
            write_storage=write[:, 1],
            stale=self._stale(),
            size=round_up(np.fromiter((s.bytes for s in storages), np.int64, count), self.rounding_bytes),
            alloc_at=alloc_at,
            free_after=np.fromiter((storage.free_after for storage in storages), np.int64, count),
            released=np.fromiter((storage.released for storage in storages), np.int64, count),
            made=self.made,
            cached=self.cached,
            first_saver=first_saver,
            last_saver=last_saver,
            packed=packed,
            last_read=last_read,
            last_write=last_write,
            forward_storages=forward_storages,
            forward_alloc_at=alloc_at[forward_storages],
        )

    def _savers(self) -> tuple[Ints, Ints, Ints]:
        """Return of each storage the first and the last op that saves it, and the op after which it is packed.

        An op packs its inputs before it runs and its results after. A custom autograd function, which is known by
        its first op, packs everything after its last.
        """
        storages, ops = self.trace.storages, self.trace.ops
        first, last, packed = (np.full(len(storages), NO_INDEX) for _ in range(3))
        made_by: dict[int, set[int]] = {}
        for s, storage in enumerate(storages):
            if not storage.saved_by or storage.category is Category.GATHERED_PARAMETER:
                continue
            first[s], last[s] = storage.saved_by[0], storage.saved_by[-1]
            for op in storage.saved_by:
                if op not in made_by:
                    made_by[op] = {ref.storage for ref in ops[op].outputs}
                moment = self.last_of_function.get(op, op if s in made_by[op] else op - 1)
                packed[s] = max(packed[s], moment)
        return first, last, packed

    def _stale(self) -> Ints:
        """Return the readers of what is overwritten later: recomputed, they would find another value (not views)."""
        writers: dict[int, list[int]] = defaultdict(list)
        for op, storage in self.writes:
            writers[storage].append(op)
        found = []
        for op, storage in self.reads:
            if storage in writers and not self.view[op] and op not in writers[storage]:
                after = bisect_right(writers[storage], op)
                if after < len(writers[storage]):
                    found.append((op, storage, writers[storage][after]))
        return np.array(found, np.int64).reshape(-1, 3)


def _updated(op: Op) -> list[int]:
    """Return the running statistics that an op of `UPDATES` writes to."""
    positions, training = UPDATES[op.name]
    args, _ = msgspec.json.decode(op.arguments)
    if training is not None and not args[training]:
        return []
    return [op.inputs[args[position]["t"]].storage for position in positions if args[position] is not None]
