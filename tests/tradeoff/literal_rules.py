"""The rules of docs/design/tradeoff.md, written down once more: slowly, with sets, from the trace itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from memfit.capture import AFTER_STEP, NO_INDEX, Category, Phase, Trace
from memfit.tradeoff import Policy, Unit

OWNED = {Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE}


@dataclass(frozen=True)
class Outcome:
    """What one policy does, by the ops that it lets run again."""

    bytes: int
    ms: float
    stop: int
    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    dropped: tuple[tuple[int, int], ...]
    cached: int


class Literal:
    """One unit, op by op."""

    def __init__(self, trace: Trace, unit: Unit, op_ms: list[float]) -> None:
        self.trace, self.unit, self.op_ms = trace, unit, op_ms
        self.inside = range(unit.begin, unit.end)
        self.forward = [i for i, op in enumerate(trace.ops) if op.phase in (Phase.FORWARD, Phase.LOSS)]
        self.alloc_at = [s for s, storage in enumerate(trace.storages) if storage.alloc_at in self.inside]
        self.groups = self._groups()
        self.all_discardable = [storage for storage in self.alloc_at if self.discardable(storage)]
        self.all_forced = {op for op in self.inside if self.forced(op) and not self.view(op)}
        self.all_fixed = {op for op in self.inside if self.fixed(op)}
        given = trace.calls[unit.call].inputs if unit.call != NO_INDEX else ()
        self.lost_inputs = {
            storage
            for storage in (*given, *(ref.storage for op in self.inside for ref in trace.ops[op].inputs))
            if trace.storages[storage].alloc_at < unit.begin
            and trace.storages[storage].category not in OWNED
            and not self.held(storage)
        }

    def size(self, storage: int) -> int:
        unit = self.trace.hardware.allocator.rounding_bytes
        return (self.trace.storages[storage].bytes + unit - 1) // unit * unit

    def reads(self, op: int, storage: int) -> bool:
        return any(ref.storage == storage for ref in self.trace.ops[op].inputs)

    def writes(self, op: int, storage: int) -> bool:
        return storage in self.trace.ops[op].mutates

    def view(self, op: int) -> bool:
        return self.trace.ops[op].view

    def made(self, storage: int) -> bool:
        alloc_at = self.trace.storages[storage].alloc_at
        return not self.view(alloc_at) and any(ref.storage == storage for ref in self.trace.ops[alloc_at].outputs)

    def held(self, storage: int) -> bool:
        free_after = self.trace.storages[storage].free_after
        return free_after == AFTER_STEP or free_after >= self.unit.backward_begin

    def discardable(self, storage: int) -> bool:
        record = self.trace.storages[storage]
        return (
            self.made(storage)
            and self.held(storage)
            and record.free_after != AFTER_STEP
            and record.free_after < self.unit.backward_end
            and AFTER_STEP < record.released < self.unit.end
            and len(record.saved_by) > 0
            and all(op in self.inside for op in record.saved_by)
            and self.need(storage) in self.inside
            and not any(self.reads(op, storage) for op in self.forward if op >= self.unit.end)
        )

    def need(self, storage: int) -> int:
        def packed(op: int) -> int:
            function = [i for i in self.forward if self.trace.ops[i].forward_op == op]
            if function:
                return max(function)
            is_result = any(ref.storage == storage for ref in self.trace.ops[op].outputs)
            return op if is_result else op - 1

        return max(packed(op) for op in self.trace.storages[storage].saved_by)

    def forced(self, op: int) -> bool:
        """Cannot run again: it writes to something older, or read something older that is then overwritten."""
        for storage, record in enumerate(self.trace.storages):
            if record.alloc_at >= self.unit.begin:
                continue
            if self.writes(op, storage):
                return True
            overwritten = any(
                self.writes(later, storage) for later in self.forward if op < later < self.unit.backward_begin
            )
            if self.reads(op, storage) and not self.view(op) and overwritten:
                return True
        return False

    def fixed(self, op: int) -> bool:
        """Cannot be saved: its result is overwritten after the unit."""
        return any(
            self.writes(later, storage)
            for storage in self.alloc_at
            if self.trace.storages[storage].alloc_at == op and self.made(storage)
            for later in self.forward
            if later >= self.unit.end
        )

    def _groups(self) -> list[frozenset[int]]:
        together: list[set[int]] = [{op} for op in self.inside if not self.view(op)]
        ties = [{op for op in self.inside if self.trace.ops[op].random}]
        for storage in self.alloc_at:
            writers = {op for op in self.inside if self.writes(op, storage)}
            if writers:
                early = {op for op in self.inside if self.reads(op, storage) and any(op < w for w in writers)}
                ties.append(
                    {op for op in writers | early | {self.trace.storages[storage].alloc_at} if not self.view(op)}
                )
        for tie in ties:
            joined = [group for group in together if group & tie]
            together = [group for group in together if not group & tie]
            if joined:
                together.append(set().union(*joined))
        return sorted((frozenset(group) for group in together), key=min)

    def outcomes(self) -> Iterator[Outcome]:
        """Every policy that the rules allow."""
        for count in range(len(self.groups) + 1):
            for dropped in combinations(self.groups, count):
                outcome = self.outcome(frozenset().union(*dropped))
                if outcome is not None:
                    yield outcome

    def outcome(self, dropped: frozenset[int]) -> Outcome | None:
        births = {storage: self.trace.storages[storage].alloc_at for storage in self.alloc_at}
        gone = [storage for storage in self.all_discardable if births[storage] in dropped]
        stop = max((self.need(storage) for storage in gone), default=-1)
        reached = [op for op in self.inside if op <= stop]
        runs = [op for op in reached if self.view(op) or op in dropped]
        saved = [op for op in reached if op not in runs]
        if self.all_forced & set(runs) or self.all_fixed & set(saved):
            return None
        fresh = [s for s in self.alloc_at if self.made(s) and not self.held(s) and births[s] in saved]
        kept = [storage for storage in self.all_discardable if storage not in gone]
        beyond = {births[storage] for storage in kept if births[storage] > stop}
        size = sum(map(self.size, gone)) - sum(map(self.size, fresh)) - sum(map(self.size, self.lost_inputs))
        return Outcome(
            bytes=size if gone else 0,
            ms=sum(self.op_ms[op] for op in runs),
            stop=stop - self.unit.begin if gone else -1,
            saved=tuple(op - self.unit.begin for op in sorted({*saved, *beyond})),
            recomputed=tuple(op - self.unit.begin for op in runs),
            dropped=tuple(sorted(map(self.result, gone))),
            cached=sum(map(self.size, kept)) + sum(map(self.size, fresh)),
        )

    def result(self, storage: int) -> tuple[int, int]:
        """The op that makes a storage and its place among the new storages of that op."""
        alloc_at = self.trace.storages[storage].alloc_at
        alike = [s for s in sorted(self.alloc_at) if self.made(s) and self.trace.storages[s].alloc_at == alloc_at]
        return alloc_at - self.unit.begin, alike.index(storage)

    def frontier(self) -> list[tuple[int, float]]:
        """The undominated pairs of bytes and time, after the policy that does nothing."""
        points = {(outcome.bytes, outcome.ms) for outcome in self.outcomes()}
        best = {
            point
            for point in points
            if not any(other[0] >= point[0] and other[1] <= point[1] and other != point for other in points)
        }
        return sorted(best | {(0, 0.0)})

    def peak(self, policy: Policy) -> int:
        """The highest point of a second run, simulated with a set of what is alive."""
        alive: set[int] = set()
        highest = 0
        for op in range(self.unit.begin, self.unit.begin + policy.stop + 1):
            if op - self.unit.begin in policy.recomputed:
                alive |= {s for s in self.alloc_at if self.trace.storages[s].alloc_at == op}
                rounding = self.trace.hardware.allocator.rounding_bytes
                workspace = -(-self.trace.ops[op].workspace_bytes // rounding) * rounding
                highest = max(highest, sum(map(self.size, alive)) + workspace)
            alive -= {s for s in alive if self._goes_after(s, op)}
        return highest

    def _goes_after(self, storage: int, op: int) -> bool:
        if self.discardable(storage):
            return False
        if self.held(storage) and not self.made(storage) and self.trace.storages[storage].saved_by:
            return False
        if not self.held(storage):
            return op >= self.trace.storages[storage].free_after
        released = self.trace.storages[storage].released
        return released != AFTER_STEP and op >= released
