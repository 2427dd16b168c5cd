"""Memory over the ops of a step under a plan, its second runs included, and what the allocator reserves for it.

This is the judge of a plan and knows nothing of the program that found it (Note [Lives under a plan]). The program's
rows are never lower, but where inputs die inside a unit: what a unit drops leaves them with the end of its forward and
not as soon as it could, and what several units hold counts for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.capture import NEVER, Category, Trace
from memfit.hardware import Device
from memfit.memory import CATEGORIES, Reserved
from memfit.memory.allocator import MemoryEvent
from memfit.memory.events import AllocationTable, allocator_events, simulate_reserved
from memfit.memory.intervals import Interval
from memfit.memory.timeline import Bytes
from memfit.solve.planned_lives import BETWEEN, PlannedLives, planned_lives
from memfit.tradeoff import Policy, Unit
from memfit.tradeoff.facts import Facts, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One allocation of the step under a plan. `storage` is `NEVER` for one of sharding.

    `remade` is the unit whose second run made it in place of the storage, None for the storage itself.
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
class PlannedTimeline:
    """What is allocated at every instant of the step under a plan; rows of tables follow `CATEGORIES`.

    Instants are the ops of the step and of the second runs in the order they run, and the end of the step; under
    sharding there may be some between two ops. Storages have the category that they were captured with; a temporary
    that a plan holds for backward is an activation.
    """

    trace: Trace
    planned: PlannedLives
    rounding_bytes: int
    before_by_row: Bytes
    during_by_row: Bytes

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units that run again, in the order in which they do."""
        return self.planned.units

    @property
    def lives(self) -> AllocationTable:
        """Every allocation of the step."""
        return self.planned.lives

    @property
    def op(self) -> Ints:
        """The op of the trace that runs at each instant; their number for the end of the step."""
        return self.planned.op

    @property
    def run(self) -> Ints:
        """The number in `units` of the second run that each instant belongs to, `NEVER` in the step itself.

        `BETWEEN` is an instant between the op before and `op`, at which sharding holds more than while either runs.
        """
        return self.planned.run

    @cached_property
    def before_bytes(self) -> Bytes:
        """Bytes alive just before each instant."""
        return self.before_by_row.sum(axis=0)

    @cached_property
    def during_bytes(self) -> Bytes:
        """Bytes alive while the op of each instant runs, workspace included."""
        return self.during_by_row.sum(axis=0)

    @property
    def by_category(self) -> dict[Category, Bytes]:
        """`during_bytes` taken apart, for the categories that occur."""
        return {c: self.during_by_row[r] for r, c in enumerate(CATEGORIES) if self.during_by_row[r].any()}

    @cached_property
    def step_instants(self) -> Ints:
        """The instant of each op of the step, and of its end."""
        return np.flatnonzero(self.run == NEVER)

    def second_run_instants(self, run: int) -> Ints:
        """The instants of a unit's second run, by its number in `units`."""
        return np.flatnonzero(self.run == run)

    @cached_property
    def during_step_bytes(self) -> Bytes:
        """Bytes while each op of the step runs, and between it and the next; not in second runs."""
        found = self.during_bytes[self.step_instants]
        between = np.flatnonzero(self.run == BETWEEN)
        np.maximum.at(found, np.maximum(self.op[between] - 1, 0), self.during_bytes[between])
        return found

    @cached_property
    def peak_instant(self) -> int:
        """The first instant that reaches the peak."""
        return int(self.during_bytes.argmax())

    @property
    def peak_bytes(self) -> int:
        """The highest point of the step."""
        return int(self.during_bytes[self.peak_instant])

    @property
    def peak_by_category(self) -> dict[Category, int]:
        """The peak taken apart, largest first, without the categories that have no part in it."""
        return self.by_category_during(self.peak_instant)

    def by_category_during(self, instant: int) -> dict[Category, int]:
        """Bytes by category at an instant, largest first."""
        column = self.during_by_row[:, instant]
        return {CATEGORIES[row]: int(column[row]) for row in np.argsort(-column, kind="stable") if column[row]}

    def module_of(self, instant: int) -> str:
        """The path of the module whose call made the op; empty outside any call and between ops."""
        op = int(self.op[instant])
        runs = op < len(self.trace.ops) and int(self.run[instant]) != BETWEEN
        call = self.trace.ops[op].call if runs else NEVER
        return self.trace.calls[call].module if call != NEVER else ""

    def second_run_of(self, instant: int) -> str | None:
        """The unit that runs again at an instant, None in the step itself."""
        run = int(self.run[instant])
        return None if run < 0 else self.units[run].name

    def taken_ms(self, op_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """How long each instant is when ops take these times; no time passes between two ops and at the end."""
        return np.where(self.run == BETWEEN, 0.0, np.append(op_ms, 0.0)[self.op])

    def alive(self, instant: int) -> npt.NDArray[np.intp]:
        """The numbers in `lives` of what is there at an instant; at `NEVER`, of what is there before the step."""
        lives = self.lives
        return np.flatnonzero(
            (lives.alloc_at <= instant) & ((lives.free_after == NEVER) | (lives.free_after >= instant))
        )

    def largest_at(self, instant: int, count: int = 10) -> tuple[Allocation, ...]:
        """The largest allocations that are there at an instant, largest first, older first among equals."""
        lives, alive = self.lives, self.alive(instant)
        order = np.lexsort((alive, lives.alloc_at[alive], -lives.size_bytes[alive]))[:count]
        return tuple(self.allocation(number) for number in alive[order].tolist())

    def allocation(self, number: int) -> Allocation:
        """One of `lives`, with what is known of it."""
        lives, trace, intervals = self.lives, self.trace, self.planned.intervals
        storage, remade = int(self.planned.storage[number]), int(self.planned.remade[number])
        if storage == NEVER:
            name, module = "", intervals[number - (len(lives.alloc_at) - len(intervals))].module
        else:
            found = trace.storages[storage]
            name = found.name or (trace.ops[found.alloc_at].name if 0 <= found.alloc_at < len(trace.ops) else "")
            module = found.module
        return Allocation(
            size_bytes=int(lives.size_bytes[number]),
            category=CATEGORIES[int(lives.row[number])],
            storage=storage,
            remade=None if remade == NEVER else self.units[remade].name,
            name=name,
            module=module,
            alloc_at=int(lives.alloc_at[number]),
            free_after=int(lives.free_after[number]),
        )


def planned_timeline(
    facts: Facts,
    chosen: Iterable[tuple[Unit, Policy]],
    *,
    intervals: Sequence[Interval] = (),
    removed: frozenset[int] = frozenset(),
) -> PlannedTimeline:
    """The memory of the step with these units checkpointed, none of them inside another.

    Under sharding `removed` are the storages that a rank does not have and `intervals` what it has instead.
    """
    planned = planned_lives(facts, chosen, intervals=intervals, removed=removed)
    before, during = planned.lives.levels(facts.rounding_bytes)
    return PlannedTimeline(
        trace=facts.trace,
        planned=planned,
        rounding_bytes=facts.rounding_bytes,
        before_by_row=before,
        during_by_row=during,
    )


def planned_events(timeline: PlannedTimeline) -> Iterator[MemoryEvent]:
    """One steady step under the plan, from nothing; keys are the numbers of allocations, then of workspaces."""
    return allocator_events(timeline.lives)


def planned_reserved(timeline: PlannedTimeline, device: Device, *, limit_bytes: int | None = None) -> Reserved:
    """Peaks of the device's allocator under the plan, all on one stream (Note [Steady state] of the events).

    `out_of_memory_op` is an op of the trace, also when it was its second run that failed.
    """
    found = simulate_reserved(timeline.lives, device, limit_bytes=limit_bytes)
    failed = found.out_of_memory_op
    return found if failed is None or failed == NEVER else replace(found, out_of_memory_op=int(timeline.op[failed]))
