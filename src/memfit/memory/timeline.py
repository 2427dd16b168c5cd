"""Memory over a step, by category, as captured or under a plan: Trace -> Timeline.

Note [Moments]: with n ops there are n + 1 moments of two kinds. `before[k]` is what is alive between op k-1
and op k, when nothing runs; `during[k]` is that, and what op k allocates, and its workspace. Index n is the
end of the step: `before[n]` is what op n-1 left, `during[n]` adds storages that were noted after the last op.
Under a plan the ops of recomputes come between, and under sharding instants between two ops (Note [Allocations under a
plan]): moments are then instants, not ops.

Under a plan this is the judge: it knows nothing of the program that found the plan. The program's rows are never lower,
but where inputs die inside a unit: what a unit drops leaves them with the end of its forward and not as soon as it
could, and what several units hold counts for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Phase, Trace
from memfit.errors import InputError
from memfit.memory.allocations import (
    BETWEEN,
    CATEGORIES,
    AllocationTable,
    Bytes,
    Interval,
    Ints,
    Offload,
    Recompute,
    Unit,
    in_order,
    is_there,
    round_up,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """A run of ops of one phase: `begin` up to (not including) `end`."""

    phase: Phase
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One allocation of the step. `storage` is `NO_INDEX` for one of sharding.

    `remade` is the unit whose recompute made it in place of the storage, None for the storage itself.
    """

    size_bytes: int
    category: Category
    storage: int
    remade: str | None
    name: str
    module: str
    alloc_at: int
    free_after: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What is allocated at every instant of the step (Note [Moments]); rows of tables follow `CATEGORIES`.

    Instants are the ops of the step and of recomputes in the order they run, and the end of the step; under sharding
    there may be some between two ops. Storages have the category that they were captured with; a temporary that a plan
    holds for backward is an activation. `units` are recomputed, in this order.
    """

    trace: Trace
    rounding_bytes: int
    allocations: AllocationTable
    units: tuple[Unit, ...]
    intervals: tuple[Interval, ...]
    before_by_row: Bytes
    during_by_row: Bytes

    @classmethod
    def of(
        cls,
        trace: Trace,
        rounding_bytes: int = 1,
        *,
        recomputes: Iterable[Recompute] = (),
        offloads: Sequence[Offload] = (),
        intervals: Sequence[Interval] = (),
        removed: frozenset[int] = frozenset(),
    ) -> Timeline:
        """Build the timeline of a step, storages and workspaces rounded up to `rounding_bytes` (512 on CUDA).

        A plan is given as the `recomputes` of its checkpointed units, none of them inside another, and the `offloads`
        of units. Under sharding `removed` are the storages that a rank does not have, `intervals` what it has instead.
        """
        if rounding_bytes < 1:
            raise InputError(f"rounding_bytes is {rounding_bytes}; give 1 for none, 512 for CUDA's allocator")
        captured = cls._from_table(trace, rounding_bytes, AllocationTable.of(trace), (), ())
        if not (recomputes or offloads or intervals or removed):
            return captured
        return captured.under_plan(recomputes, offloads=offloads, intervals=intervals, removed=removed)

    def under_plan(
        self,
        recomputes: Iterable[Recompute] = (),
        *,
        offloads: Sequence[Offload] = (),
        intervals: Sequence[Interval] = (),
        removed: frozenset[int] = frozenset(),
    ) -> Timeline:
        """Return the timeline of a captured step under a plan, sharded, or both (as `of` does)."""
        assert not (self.units or self.intervals), "one plan, on the step as it was captured"
        ordered = in_order(recomputes)
        added = [interval for interval in intervals if is_there(interval, len(self.trace.ops))]
        table = self.allocations.under_plan(ordered, added, removed, offloads)
        return self._from_table(self.trace, self.rounding_bytes, table, ordered, added)

    @classmethod
    def _from_table(
        cls,
        trace: Trace,
        rounding_bytes: int,
        table: AllocationTable,
        recomputes: Sequence[Recompute],
        intervals: Sequence[Interval],
    ) -> Timeline:
        before, during = table.levels(rounding_bytes)
        return cls(
            trace=trace,
            rounding_bytes=rounding_bytes,
            allocations=table,
            units=tuple(each.unit for each in recomputes),
            intervals=tuple(intervals),
            before_by_row=before,
            during_by_row=during,
        )

    @property
    def op(self) -> Ints:
        """The op of the trace that runs at each instant; their number for the end of the step."""
        return self.allocations.op

    @property
    def run(self) -> Ints:
        """The number in `units` of the recompute that each instant belongs to, `NO_INDEX` in the step itself.

        `BETWEEN` is an instant between the op before and `op`, at which sharding holds more than while either runs.
        """
        return self.allocations.run

    @property
    def alloc_at(self) -> Ints:
        """The instant at which each allocation is made, or `BEFORE_STEP`."""
        return self.allocations.alloc_at

    @property
    def free_after(self) -> Ints:
        """The instant after which each allocation is freed, or `AFTER_STEP`."""
        return self.allocations.free_after

    @cached_property
    def allocation_bytes(self) -> Bytes:
        """The size of each allocation, as the device's allocator rounds it."""
        return round_up(self.allocations.size_bytes, self.rounding_bytes)

    @cached_property
    def before_bytes(self) -> Bytes:
        """Bytes alive just before each instant."""
        return self.before_by_row.sum(axis=0)

    @cached_property
    def during_bytes(self) -> Bytes:
        """Bytes alive while the op of each instant runs, workspace included: the candidates for the peak."""
        return self.during_by_row.sum(axis=0)

    @property
    def by_category(self) -> dict[Category, Bytes]:
        """`during_bytes` taken apart, for the categories that occur."""
        return {c: self.during_by_row[r] for r, c in enumerate(CATEGORIES) if self.during_by_row[r].any()}

    @property
    def start_bytes(self) -> int:
        """What is resident before the first op."""
        return int(self.before_bytes[0])

    @property
    def end_bytes(self) -> int:
        """What is left when the step is over."""
        return int(self.during_bytes[-1])

    @cached_property
    def peak_instant(self) -> int:
        """The first instant that reaches the peak."""
        return int(self.during_bytes.argmax())

    @property
    def peak_op(self) -> int:
        """The op at the peak; `len(trace.ops)` when only the end of the step reaches it."""
        return int(self.op[self.peak_instant])

    @property
    def peak_bytes(self) -> int:
        """The highest point of the step."""
        return int(self.during_bytes[self.peak_instant])

    @property
    def peak_by_category(self) -> dict[Category, int]:
        """The peak taken apart, largest first, without the categories that have no part in it."""
        return self.by_category_during(self.peak_instant)

    @property
    def peak_module(self) -> str:
        """The path of the module that the peak is in; empty for the model itself and outside any call."""
        return self.module_of(self.peak_instant)

    @property
    def peak_source(self) -> str:
        """The user's line that the peak is in."""
        return self.trace.source_of(self.peak_op) if self.peak_op < len(self.trace.ops) else ""

    @cached_property
    def phases(self) -> tuple[PhaseSpan, ...]:
        """The phases in the order they ran; with accumulation, forward and backward come several times."""
        spans: list[PhaseSpan] = []
        ops = self.trace.ops
        begin = 0
        for index in range(1, len(ops) + 1):
            if index == len(ops) or ops[index].phase is not ops[begin].phase:
                spans.append(PhaseSpan(phase=ops[begin].phase, begin=begin, end=index))
                begin = index
        return tuple(spans)

    @cached_property
    def step_instants(self) -> Ints:
        """The instant of each op of the step, and of its end."""
        return np.flatnonzero(self.run == NO_INDEX)

    def recompute_instants(self, number: int) -> Ints:
        """Return the instants of a unit's recompute, by its number in `units`."""
        return np.flatnonzero(self.run == number)

    @cached_property
    def during_step_bytes(self) -> Bytes:
        """Bytes while each op of the step runs, and between it and the next; not in recomputes."""
        found = self.during_bytes[self.step_instants]
        between = np.flatnonzero(self.run == BETWEEN)
        np.maximum.at(found, np.maximum(self.op[between] - 1, 0), self.during_bytes[between])
        return found

    def step_levels(self) -> tuple[Bytes, Bytes]:
        """Return the bytes before and during each op of the step, a row for each category, without recomputes.

        What sharding does between op k-1 and op k has a highest point of its own, which goes to `during[k-1]` when it
        is higher than that (to `during[0]` at the beginning of the step). `before[k]` is what is there after all of it.
        """
        table, at = self.allocations, self.step_instants
        before, during = self.before_by_row[:, at], self.during_by_row[:, at]
        # An interval that is made ahead of op k, after the last instant between, is in `during[k]` alone until here.
        first = len(table.alloc_at) - len(self.intervals)
        ahead = first + np.flatnonzero([interval.ahead for interval in self.intervals])
        ahead = ahead[table.alloc_at[ahead] != BEFORE_STEP]
        ahead = ahead[self.run[table.alloc_at[ahead]] == NO_INDEX]
        np.add.at(before, (table.row[ahead], self.op[table.alloc_at[ahead]]), self.allocation_bytes[ahead])
        highest = during.sum(axis=0)
        for instant in np.flatnonzero(self.run == BETWEEN).tolist():
            to = max(int(self.op[instant]) - 1, 0)
            if self.during_bytes[instant] > highest[to]:
                during[:, to], highest[to] = self.during_by_row[:, instant], self.during_bytes[instant]
        rising = np.flatnonzero(before[:, 1:].sum(axis=0) > highest[:-1])
        during[:, rising] = before[:, rising + 1]
        return before, during

    def recomputed_unit(self, instant: int) -> str | None:
        """Return the unit that is recomputed at an instant, None in the step itself."""
        run = int(self.run[instant])
        return None if run < 0 else self.units[run].name

    def module_of(self, instant: int) -> str:
        """Return the path of the module whose call made the op; empty outside any call and between ops."""
        op = int(self.op[instant])
        runs = op < len(self.trace.ops) and int(self.run[instant]) != BETWEEN
        call = self.trace.ops[op].call if runs else NO_INDEX
        return self.trace.calls[call].module if call != NO_INDEX else ""

    def instant_ms(self, op_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return how long each instant is when ops take these times; none passes between ops and at the end."""
        return np.where(self.run == BETWEEN, 0.0, np.append(op_ms, 0.0)[self.op])

    def by_category_during(self, instant: int) -> dict[Category, int]:
        """Return the bytes by category at an instant, largest first."""
        return _largest_first(self.during_by_row[:, instant])

    def alive_at(self, instant: int) -> npt.NDArray[np.intp]:
        """Return the numbers of the allocations that are there at an instant; at `BEFORE_STEP`, before the step."""
        if not BEFORE_STEP <= instant <= self.allocations.instants:
            end = self.allocations.instants
            raise InputError(f"op {instant} is not in the step; give 0 to {end}, the end of the step")
        alloc_at, free_after = self.alloc_at, self.free_after
        return np.flatnonzero((alloc_at <= instant) & ((free_after == AFTER_STEP) | (free_after >= instant)))

    def largest_at(self, instant: int, count: int = 10) -> tuple[Allocation, ...]:
        """Return the largest allocations that are there at an instant, largest first, older first among equals."""
        alive = self.alive_at(instant)
        order = np.lexsort((alive, self.alloc_at[alive], -self.allocations.size_bytes[alive]))[:count]
        return tuple(self.allocation(number) for number in alive[order].tolist())

    def allocation(self, number: int) -> Allocation:
        """Return one of the allocations, with what is known of it."""
        table, trace = self.allocations, self.trace
        storage, remade = int(table.storage[number]), int(table.remade[number])
        if storage == NO_INDEX:
            name, module = "", self.intervals[number - (len(table.alloc_at) - len(self.intervals))].module
        else:
            found = trace.storages[storage]
            name = found.name or (trace.ops[found.alloc_at].name if 0 <= found.alloc_at < len(trace.ops) else "")
            module = found.module
        return Allocation(
            size_bytes=int(table.size_bytes[number]),
            category=CATEGORIES[int(table.row[number])],
            storage=storage,
            remade=None if remade == NO_INDEX else self.units[remade].name,
            name=name,
            module=module,
            alloc_at=int(table.alloc_at[number]),
            free_after=int(table.free_after[number]),
        )


def _largest_first(column: Bytes) -> dict[Category, int]:
    return {CATEGORIES[row]: int(column[row]) for row in np.argsort(-column, kind="stable") if column[row]}
