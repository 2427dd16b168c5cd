"""Memory by module and by call: what a module owns, what its forward leaves for backward, its peaks.

Note [Calls]: calls nest, so the calls that enclose an op are a chain from the innermost one outwards, with
growing ends. A sum over "the calls in which storage s was allocated and which it outlives" is therefore a walk up
that chain, made for all storages at once, one numpy operation for each level of nesting. The highest point of
a call is a range maximum, taken from a sparse table. Nothing here scans the ops or the storages once for each
call.

Note [Inputs and outputs]: a trace has no arguments of modules. A call's inputs are the storages that its ops
read, that are older than the call, and that are not parameters, buffers or optimizer state; its outputs are
those allocated in it that a later op outside of it reads in forward or, when there are none, those that its last
op made and left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Phase, Trace
from memfit.memory.allocations import CATEGORIES, Bytes
from memfit.memory.timeline import Timeline
from memfit.paths import around

_OWNED = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is allocated on the device at one moment: before `op`, or while it runs in the case of a peak."""

    op: int
    total_bytes: int
    by_category: dict[Category, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemory:
    """One module call. `activation_bytes` is what its forward leaves for backward; snapshots count all alive.

    The snapshots of backward are None when nothing of the call runs in backward. A call in phase BACKWARD is
    a recomputation by activation checkpointing.
    """

    call: int
    module: str
    kind: str
    index: int
    phase: Phase
    activation_bytes: int
    input_bytes: int
    output_bytes: int
    before_forward: Snapshot
    after_forward: Snapshot
    forward_peak: Snapshot
    before_backward: Snapshot | None
    after_backward: Snapshot | None
    backward_peak: Snapshot | None

    @property
    def temporary_bytes(self) -> int:
        """Temporaries at the call's own forward peak."""
        return self.forward_peak.by_category.get(Category.TEMPORARY, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """One module: what it owns, its children included, and all its calls.

    `activation_bytes` is the sum over its calls of one forward pass, the largest such sum when gradients are
    accumulated over several passes. A storage that several modules share counts once for each that encloses
    it.
    """

    module: str
    kind: str
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    activation_bytes: int
    calls: tuple[CallMemory, ...]

    @property
    def input_bytes(self) -> int:
        """The largest input of a call."""
        return max((call.input_bytes for call in self.calls), default=0)

    @property
    def output_bytes(self) -> int:
        """The largest output of a call."""
        return max((call.output_bytes for call in self.calls), default=0)

    @property
    def temporary_bytes(self) -> int:
        """The most temporaries at the forward peak of a call."""
        return max((call.temporary_bytes for call in self.calls), default=0)

    @property
    def forward_peak_bytes(self) -> int:
        """The highest point of the device's memory in any forward of this module; 0 when never called."""
        return max((call.forward_peak.total_bytes for call in self.calls), default=0)

    @property
    def backward_peak_bytes(self) -> int:
        """The highest point of the device's memory in any backward of this module; 0 when it has none."""
        return max((call.backward_peak.total_bytes for call in self.calls if call.backward_peak), default=0)


def module_memory(timeline: Timeline) -> dict[str, ModuleMemory]:
    """Return every module of the model by path, and modules called that are not part of it, such as a loss."""
    trace = timeline.trace
    calls = call_memory(timeline)
    by_module: dict[str, list[CallMemory]] = defaultdict(list)
    for call in calls:
        by_module[call.module].append(call)
    kinds = {module.path: module.kind for module in trace.modules}
    for call in calls:
        kinds.setdefault(call.module, call.kind)
    owned = _Owned(timeline)
    held = _held_by_module(trace, calls)
    return {
        path: ModuleMemory(
            module=path,
            kind=kind,
            parameter_bytes=owned.total[Category.PARAMETER].get(path, 0),
            buffer_bytes=owned.total[Category.BUFFER].get(path, 0),
            gradient_bytes=owned.total[Category.GRADIENT].get(path, 0),
            optimizer_state_bytes=owned.total[Category.OPTIMIZER_STATE].get(path, 0),
            activation_bytes=held.get(path, 0),
            calls=tuple(by_module.get(path, ())),
        )
        for path, kind in kinds.items()
    }


def call_memory(timeline: Timeline) -> tuple[CallMemory, ...]:
    """Return every module call, in the order of `trace.calls`."""
    trace = timeline.trace
    if not trace.calls:
        return ()
    nesting = _Nesting(trace)
    held = _held(timeline, nesting)
    reads = _reads(trace)
    inputs = _inputs(timeline, nesting, reads)
    outputs = _outputs(timeline, nesting, reads)
    begin, end = nesting.begin, nesting.end
    back, back_end = nesting.backward_begin, nesting.backward_end
    peaks = RangePeak(timeline.during_bytes)
    before = _before(timeline, begin)
    after = _before(timeline, end)
    forward_peak = _peaks(timeline, peaks, begin, end)
    before_backward = _before(timeline, back)
    after_backward = _before(timeline, back_end)
    backward_peak = _peaks(timeline, peaks, back, back_end)
    return tuple(
        CallMemory(
            call=i,
            module=call.module,
            kind=call.kind,
            index=call.index,
            phase=call.phase,
            activation_bytes=int(held[i]),
            input_bytes=int(inputs[i]),
            output_bytes=int(outputs[i]),
            before_forward=before[i],
            after_forward=after[i],
            forward_peak=forward_peak[i],
            before_backward=before_backward[i] if call.backward_begin != NO_INDEX else None,
            after_backward=after_backward[i] if call.backward_begin != NO_INDEX else None,
            backward_peak=backward_peak[i] if call.backward_begin != NO_INDEX else None,
        )
        for i, call in enumerate(trace.calls)
    )


class RangePeak:
    """A sparse table: the index of the largest value of any range, in constant time."""

    def __init__(self, values: Bytes) -> None:
        self.values = values
        self._levels = [np.arange(len(values))]
        span = 1
        while 2 * span <= len(values):
            last = self._levels[-1]
            self._levels.append(self._larger(last[:-span], last[span:]))
            span *= 2

    def __call__(self, begin: Bytes, end: Bytes) -> Bytes:
        """Return the first place of the largest value of each range; none may be empty."""
        level = np.frexp(end - begin)[1] - 1
        found = np.empty(len(begin), np.int64)
        for k in np.unique(level):
            of = level == k
            table = self._levels[k]
            found[of] = self._larger(table[begin[of]], table[end[of] - (1 << int(k))])
        return found

    def _larger(self, left: Bytes, right: Bytes) -> Bytes:
        return np.where(self.values[right] > self.values[left], right, left)


class _Nesting:
    """The calls as arrays, and for every moment the innermost call that runs."""

    def __init__(self, trace: Trace) -> None:
        count = len(trace.calls)
        calls = trace.calls
        self.begin = np.fromiter((call.begin for call in calls), np.int64, count)
        self.end = np.fromiter((call.end for call in calls), np.int64, count)
        self.parent = np.fromiter((call.parent for call in calls), np.int64, count)
        self.backward_begin = np.fromiter((call.backward_begin for call in calls), np.int64, count)
        self.backward_end = np.fromiter((call.backward_end for call in calls), np.int64, count)
        self.innermost = np.full(len(trace.ops) + 1, NO_INDEX, np.int64)
        for number, call in enumerate(calls):  # a parent's number is below those of its children
            self.innermost[call.begin : call.end] = number

        # A storage made between two ops, such as a saved random state, belongs to the call that was running
        # then. One of a backward op names the call of its forward op, in which it was not allocated.
        self.maker = np.fromiter((storage.call for storage in trace.storages), np.int64, len(trace.storages))
        alloc_at = np.fromiter((storage.alloc_at for storage in trace.storages), np.int64, len(trace.storages))
        named = self.maker != NO_INDEX
        within = (self.begin[self.maker] <= alloc_at) & (alloc_at <= self.end[self.maker])
        self.maker = np.where(named & ~within, self.innermost[alloc_at], self.maker)

    def outlived(self, storages: Bytes, until: Bytes) -> Iterable[tuple[Bytes, Bytes]]:
        """Yield pairs (item, call) of the calls that made `storages[item]` and end by op `until[item]`."""
        item = np.arange(len(storages))
        call = self.maker[storages]
        while True:
            keep = call != NO_INDEX
            keep[keep] = self.end[call[keep]] <= until[item[keep]]
            item, call = item[keep], call[keep]
            if not len(item):
                return
            yield item, call
            call = self.parent[call]


def _allocated_in_step(timeline: Timeline) -> Bytes:
    """Return storages that an op of the step made and that were seen alive."""
    seen = (timeline.free_after == AFTER_STEP) | (timeline.free_after >= timeline.alloc_at)
    return np.flatnonzero((timeline.alloc_at != BEFORE_STEP) & seen)


def _held(timeline: Timeline, nesting: _Nesting) -> Bytes:
    """Return, for each call, the activations allocated in its forward and alive when that ends."""
    trace = timeline.trace
    is_activation = np.fromiter(
        (storage.category is Category.ACTIVATION for storage in trace.storages), np.bool_, len(trace.storages)
    )
    chosen = _allocated_in_step(timeline)
    chosen = chosen[is_activation[chosen]]
    free_after = timeline.free_after[chosen]
    until = np.where(free_after == AFTER_STEP, len(trace.ops), free_after)
    held = np.zeros(len(trace.calls), np.int64)
    for item, call in nesting.outlived(chosen, until):
        np.add.at(held, call, timeline.allocation_bytes[chosen[item]])
    return held


def _inputs(timeline: Timeline, nesting: _Nesting, reads: tuple[Bytes, Bytes]) -> Bytes:
    """Return, for each call, the bytes of its inputs (Note [Inputs and outputs])."""
    trace = timeline.trace
    owned = np.fromiter((s.category in _OWNED for s in trace.storages), np.bool_, len(trace.storages))
    op, storage = reads
    call = nesting.innermost[op]
    keep = (call != NO_INDEX) & ~owned[storage]
    call, storage = call[keep], storage[keep]
    pairs: list[Bytes] = []
    while len(call):
        older = timeline.alloc_at[storage] < nesting.begin[call]
        call, storage = call[older], storage[older]
        pairs.append(call * len(trace.storages) + storage)
        call = nesting.parent[call]
        call, storage = call[call != NO_INDEX], storage[call != NO_INDEX]
    return _sum_pairs(timeline, pairs)


def _outputs(timeline: Timeline, nesting: _Nesting, reads: tuple[Bytes, Bytes]) -> Bytes:
    """Return, for each call, the bytes of its outputs (Note [Inputs and outputs])."""
    trace = timeline.trace
    count = len(trace.storages)
    op, storage = reads
    in_forward = np.fromiter((o.phase in (Phase.FORWARD, Phase.LOSS) for o in trace.ops), np.bool_, len(trace.ops))
    recomputes = nesting.innermost[:-1] != NO_INDEX
    forward = (in_forward | recomputes)[op]
    last_read = np.full(count, NO_INDEX, np.int64)
    np.maximum.at(last_read, storage[forward], op[forward])
    allocated = _allocated_in_step(timeline)
    pairs = [np.empty(0, np.int64)]
    pairs += [call * count + allocated[item] for item, call in nesting.outlived(allocated, last_read[allocated])]
    pairs.append(_left_by_last_op(timeline, without=set((np.concatenate(pairs) // max(count, 1)).tolist())))
    return _sum_pairs(timeline, pairs)


def _left_by_last_op(timeline: Timeline, without: set[int]) -> Bytes:
    """Return pairs of the other calls and the storages that their last ops made and that outlive them."""
    trace = timeline.trace
    alloc_at, free_after = timeline.alloc_at, timeline.free_after
    left = [
        number * len(trace.storages) + ref.storage
        for number, call in enumerate(trace.calls)
        if call.begin < call.end and number not in without
        for ref in trace.ops[call.end - 1].outputs
        if ref.storage != NO_INDEX
        and alloc_at[ref.storage] >= call.begin
        and (free_after[ref.storage] == AFTER_STEP or free_after[ref.storage] >= call.end)
    ]
    return np.array(left, np.int64)


def _reads(trace: Trace) -> tuple[Bytes, Bytes]:
    """Return every reading of a storage by an op, as (op, storage)."""
    counts = np.fromiter((len(op.inputs) for op in trace.ops), np.int64, len(trace.ops))
    op = np.repeat(np.arange(len(trace.ops)), counts)
    storage = np.fromiter((ref.storage for op in trace.ops for ref in op.inputs), np.int64, len(op))
    return op[storage != NO_INDEX], storage[storage != NO_INDEX]


def _sum_pairs(timeline: Timeline, pairs: list[Bytes]) -> Bytes:
    """Return the bytes of each call's storages, every pair `call * storages + storage` counted once."""
    total = np.zeros(len(timeline.trace.calls), np.int64)
    if pairs:
        call, storage = np.divmod(np.unique(np.concatenate(pairs)), len(timeline.trace.storages))
        np.add.at(total, call, timeline.allocation_bytes[storage])
    return total


def _before(timeline: Timeline, moments: Bytes) -> list[Snapshot]:
    return _snapshots(timeline.before_by_row, moments)


def _peaks(timeline: Timeline, peaks: RangePeak, begin: Bytes, end: Bytes) -> list[Snapshot]:
    """Return the highest moment of each range of ops; of an empty one, the moment itself."""
    empty = begin >= end
    found = np.where(empty, begin, peaks(np.where(empty, 0, begin), np.where(empty, 1, end)))
    during = _snapshots(timeline.during_by_row, found)
    if empty.any():
        for number, snapshot in zip(
            np.flatnonzero(empty), _snapshots(timeline.before_by_row, begin[empty]), strict=True
        ):
            during[number] = snapshot
    return during


def _snapshots(table: Bytes, moments: Bytes) -> list[Snapshot]:
    columns = table[:, moments].T
    totals = columns.sum(axis=1).tolist()
    return [
        Snapshot(
            op=op,
            total_bytes=total,
            by_category={c: n for c, n in zip(CATEGORIES, column, strict=True) if n},
        )
        for op, total, column in zip(moments.tolist(), totals, columns.tolist(), strict=True)
    ]


def _held_by_module(trace: Trace, calls: tuple[CallMemory, ...]) -> dict[str, int]:
    """Return, for each module the largest sum of its calls' activations over one forward pass."""
    begins = [
        index
        for index, op in enumerate(trace.ops)
        if op.phase is Phase.BACKWARD and (index == 0 or trace.ops[index - 1].phase is not Phase.BACKWARD)
    ]
    sums: dict[tuple[str, int], int] = defaultdict(int)
    for call in calls:
        if call.phase is not Phase.BACKWARD and not _inside_itself(trace, call):
            forward_pass = bisect_right(begins, call.before_forward.op)
            sums[call.module, forward_pass] += call.activation_bytes
    held: dict[str, int] = {}
    for (module, _), n_bytes in sums.items():
        held[module] = max(held.get(module, 0), n_bytes)
    return held


def _inside_itself(trace: Trace, call: CallMemory) -> bool:
    """Return whether the module called itself, so that the outer call counts what this one holds."""
    return any(trace.calls[outer].module == call.module for outer in trace.ancestors(call.call)[1:])


class _Owned:
    """Bytes that modules own with their children, by category and path; a shared storage counts once for each."""

    def __init__(self, timeline: Timeline) -> None:
        self._bytes: list[int] = timeline.allocation_bytes.tolist()
        self.total: dict[Category, dict[str, int]] = {}
        trace = timeline.trace
        gradients = {p.storage: (p.gradient,) for p in trace.parameters if p.gradient != NO_INDEX}
        states = {p.storage: p.state for p in trace.parameters}
        self._add(Category.PARAMETER, [(m.path, m.parameters) for m in trace.modules])
        self._add(Category.BUFFER, [(m.path, m.buffers) for m in trace.modules])
        for category, belonging in ((Category.GRADIENT, gradients), (Category.OPTIMIZER_STATE, states)):
            self._add(
                category,
                [(m.path, tuple(s for p in m.parameters for s in belonging.get(p, ()))) for m in trace.modules],
            )

    def _add(self, category: Category, owners: list[tuple[str, tuple[int, ...]]]) -> None:
        total: dict[str, set[int]] = defaultdict(set)
        for path, storages in owners:
            for outer in (path, *around(path)):
                total[outer].update(storages)
        self.total[category] = {path: self._sum(storages) for path, storages in total.items()}

    def _sum(self, storages: set[int]) -> int:
        return sum(self._bytes[storage] for storage in storages)
