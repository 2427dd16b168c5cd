"""What holds an allocation at an instant of a step, in words."""

from __future__ import annotations

from collections import defaultdict

from memfit.analysis.explanation import HeldStorage
from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Phase, TensorRef, short
from memfit.memory import Bytes, Timeline
from memfit.paths import module_label
from memfit.tradeoff import LOSS

_SHARDED = {
    Category.PARAMETER: "shard of parameters of {}",
    Category.GRADIENT: "gradient of {}, as a rank keeps it",
    Category.OPTIMIZER_STATE: "shard of optimizer state of {}",
    Category.GATHERED_PARAMETER: "gathered parameters of unit {}",
    Category.COMMUNICATION: "buffer for the communication of unit {}",
    Category.TEMPORARY: "temporary of the optimizer, for the shards of {}",
}
_PYTHON = "(a name, a list or an attribute)"
_OWNED = (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE, Category.INPUT)


class Holders:
    """Tells what holds allocations at one instant; reads the ops once.

    `now` is the first op of the step that is not over; between two ops and in a recompute it is not `running` yet.
    """

    def __init__(self, timeline: Timeline, instant: int, kept: dict[int, str] | None = None) -> None:
        self.timeline = timeline
        self.instant = instant
        self.trace = timeline.trace
        self.kept = kept or {}
        op, run = int(timeline.op[instant]), int(timeline.run[instant])
        self.now = op if run < 0 else timeline.units[run].backward_begin
        self.running = run == NO_INDEX
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._backward: dict[int, list[int]] = defaultdict(list)
        self._first: dict[int, TensorRef] = {}
        for index, each in enumerate(self.trace.ops):
            for ref in each.inputs:
                self._readers[ref.storage].append(index)
                self._first.setdefault(ref.storage, ref)
            for ref in each.outputs:
                self._first.setdefault(ref.storage, ref)
            if each.phase is Phase.BACKWARD and each.forward_op != NO_INDEX:
                self._backward[each.forward_op].append(index)
        self._parameters = {each.storage: each for each in self.trace.parameters}

    def of(self, number: int) -> HeldStorage:
        """Return an allocation of the timeline with what holds it."""
        found = self.timeline.allocation(number)
        kind, held_by = self._holder(number)
        alloc_at, free_after = self._op(found.alloc_at), self._op(found.free_after)
        shape, dtype = self._tensor(found.storage)
        return HeldStorage(
            size_bytes=found.size_bytes,
            category=found.category,
            name=short(found.name),
            module=found.module,
            source=self.source(found.storage),
            shape=shape,
            dtype=dtype,
            holder=kind,
            held_by=held_by,
            alloc_at=alloc_at,
            born_by="" if alloc_at is None else self._name(alloc_at),
            free_after=free_after,
            dies_after="" if free_after is None else self._name(free_after),
        )

    def source(self, storage: int) -> str:
        """Return the user's line that made a storage; empty for what is there before the step."""
        if storage == NO_INDEX or not 0 <= self.trace.storages[storage].alloc_at < len(self.trace.ops):
            return ""
        return self.trace.source_of(self.trace.storages[storage].alloc_at)

    def place(self, storage: int) -> str:
        """Return where a result that no module made was made: `<loss>` or `<optimizer>`; empty for all others."""
        if (
            storage == NO_INDEX
            or self.trace.storages[storage].module
            or self.trace.storages[storage].category in _OWNED
        ):
            return ""
        return self.place_of_op(self.trace.storages[storage].alloc_at)

    def place_of_op(self, op: int) -> str:
        """Return `<loss>` or `<optimizer>` for an op outside of any module, empty for one inside."""
        if not 0 <= op < len(self.trace.ops) or self.trace.ops[op].call != NO_INDEX:
            return ""
        return "<optimizer>" if self.trace.ops[op].phase is Phase.OPTIMIZER else LOSS

    def op_in(self, op: int) -> str:
        """Return an op and the module that it runs in, in words."""
        call = self.trace.ops[op].call
        where = self.place_of_op(op) if call == NO_INDEX else self.trace.calls[call].module or "the model itself"
        return f"{self._name(op)} in {where}"

    def _holder(self, number: int) -> tuple[str, str]:
        """Return the kind of holder, and what it is."""
        found = self.timeline.allocation(number)
        if found.storage == NO_INDEX:
            return "sharding", _SHARDED.get(found.category, "{}").format(module_label(found.module))
        if found.remade is not None:
            return "second run", f"made again by the second run of {module_label(found.remade)} for its backward"
        owner = {
            Category.PARAMETER: ("parameter", f"parameter {found.name}"),
            Category.OPTIMIZER_STATE: ("optimizer", f"optimizer state of {found.name}"),
            Category.GRADIENT: ("gradient", f"gradient of {found.name}"),
            Category.BUFFER: ("buffer", f"buffer {found.name}".strip()),
            Category.INPUT: ("input", "the batch"),
            Category.WORKSPACE: ("library", f"{found.name}, kept until the process ends"),
        }.get(found.category)
        if owner is not None:
            return owner
        if found.storage in self.kept:
            return "checkpointing", self.kept[found.storage]
        return self.of_storage(found.storage)

    def of_storage(self, storage: int) -> tuple[str, str]:
        """Return what holds a result of an op: autograd, ops that are still to read it, or only Python."""
        found, now = self.trace.storages[storage], self.now
        savers = [op for op in found.saved_by if op < now]
        later = {saver: reads for saver in savers if (reads := [op for op in self._backward[saver] if op >= now])}
        if later:
            saver, reads = next(iter(later.items()))
            also = f", and of {len(later) - 1} more" if len(later) > 1 else ""
            saved = f"saved for the backward of {self.op_in(saver)}{also}, read at op {reads[0]}"
            return "autograd", saved + self._beyond(storage, max(max(reads) for reads in later.values()))
        if self.running and found.alloc_at == now:
            return "running", f"result of {self._name(now)}, which runs"
        reading = [op for op in self._readers[storage] if op >= now]
        if self.running and reading and reading[0] == now:
            return "running", f"read by {self._name(now)}, which runs"
        if reading:
            return "waiting", f"read next by {self.op_in(reading[0])}, op {reading[0]}"
        if found.category is Category.TEMPORARY and self.trace.ops[found.alloc_at].phase is Phase.BACKWARD:
            return self._of_backward(storage)
        if savers and AFTER_STEP < found.released < now:
            return "autograd", f"saved for the backward of {self.op_in(savers[0])}, of which no op runs after this"
        last = max((op for op in self._readers[storage]), default=found.alloc_at)
        return "python", f"held by Python only {_PYTHON}: nothing reads it after op {last}"

    def _beyond(self, storage: int, last: int) -> str:
        """Say so where Python keeps a saved tensor beyond the last op of the backward that reads it."""
        found = self.trace.storages[storage]
        released = found.free_after if found.released == AFTER_STEP else found.released
        if AFTER_STEP < released <= last:
            return ""
        return f"; also held by Python {_PYTHON} {_until(released)}"

    def _of_backward(self, storage: int) -> tuple[str, str]:
        """Return what holds a gradient of an activation that no op reads again."""
        found = self.trace.storages[storage]
        made = self.trace.ops[found.alloc_at]
        if found.free_after == self.now:
            return "running", f"result of {self.op_in(found.alloc_at)}, about to be freed"
        if made.forward_op == NO_INDEX and made.name.startswith("aten.ones_like"):
            return "backward", f"gradient that the backward began with, held {_until(found.free_after)}"
        made_by = self.op_in(found.alloc_at)
        return "backward", f"result of {made_by}, not read again, held by the backward {_until(found.free_after)}"

    def _name(self, op: int) -> str:
        return short(self.trace.ops[op].name) if 0 <= op < len(self.trace.ops) else ""

    def _op(self, instant: int) -> int | None:
        return None if instant == BEFORE_STEP else int(self.timeline.op[instant])

    def _tensor(self, storage: int) -> tuple[tuple[int, ...] | None, str | None]:
        if storage == NO_INDEX:
            return None, None
        parameter = self._parameters.get(storage)
        if parameter is not None:
            return parameter.shape, parameter.dtype
        ref = self._first.get(storage)
        return (None, None) if ref is None else (ref.shape, ref.dtype)


def _until(op: int) -> str:
    return "beyond the step" if op == AFTER_STEP else f"until op {op}"


# Bytes as the allocator rounds them


def round_to_block(n_bytes: int, rounding_bytes: int) -> int:
    """Round bytes up to whole allocator blocks."""
    return -(-n_bytes // rounding_bytes) * rounding_bytes


def allocation_bytes(timeline: Timeline) -> Bytes:
    """Return the bytes that every allocation of a timeline takes."""
    return timeline.allocation_bytes
