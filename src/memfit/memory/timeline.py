"""Memory over the ops of a step, by category: Trace -> Timeline.

Note [Moments]: with n ops there are n + 1 moments of two kinds. `before[k]` is what is alive between op k-1
and op k, when nothing runs; `during[k]` is that, and what op k allocates, and its workspace. Index n is the
end of the step: `before[n]` is what op n-1 left, `during[n]` adds storages that were noted after the last op.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.capture import NEVER, Category, Phase, Trace
from memfit.errors import InputError

Bytes = npt.NDArray[np.int64]
CATEGORIES = tuple(Category)
_ROW = {category: row for row, category in enumerate(CATEGORIES)}
_TEMPORARY = _ROW[Category.TEMPORARY]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """A run of ops of one phase: `begin` up to (not including) `end`."""

    phase: Phase
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What is allocated at every moment of the step (Note [Moments]); rows of tables follow `CATEGORIES`."""

    trace: Trace
    rounding_bytes: int
    storage_bytes: Bytes
    alloc_at: Bytes
    free_after: Bytes
    before_by_row: Bytes
    during_by_row: Bytes

    @classmethod
    def of(cls, trace: Trace, rounding_bytes: int = 1) -> Timeline:
        """The timeline of a trace, storages and workspaces rounded up to `rounding_bytes` (512 on CUDA)."""
        if rounding_bytes < 1:
            raise InputError(f"rounding_bytes is {rounding_bytes}; give 1 for none, 512 for CUDA's allocator")
        count, ops = len(trace.storages), len(trace.ops)
        size = _rounded((storage.bytes for storage in trace.storages), count, rounding_bytes)
        alloc_at = np.fromiter((storage.alloc_at for storage in trace.storages), np.int64, count)
        free_after = np.fromiter((storage.free_after for storage in trace.storages), np.int64, count)
        row = np.fromiter((_ROW[storage.category] for storage in trace.storages), np.int64, count)
        seen = (free_after == NEVER) | (free_after >= alloc_at)  # what is made and freed between two ops is in neither
        ends = seen & (free_after != NEVER)
        starts = seen & (alloc_at != NEVER)
        allocated = np.zeros((len(CATEGORIES), ops + 1), np.int64)
        freed = np.zeros((len(CATEGORIES), ops + 1), np.int64)
        start = np.zeros(len(CATEGORIES), np.int64)
        resident = alloc_at == NEVER
        np.add.at(start, row[resident], size[resident])
        np.add.at(allocated, (row[starts], alloc_at[starts]), size[starts])
        np.add.at(freed, (row[ends], free_after[ends] + 1), size[ends])
        before = start[:, None] + np.cumsum(allocated, axis=1) - allocated - np.cumsum(freed, axis=1)
        during = before + allocated
        during[_TEMPORARY, :ops] += _rounded((op.workspace_bytes for op in trace.ops), ops, rounding_bytes)
        return cls(
            trace=trace,
            rounding_bytes=rounding_bytes,
            storage_bytes=size,
            alloc_at=alloc_at,
            free_after=free_after,
            before_by_row=before,
            during_by_row=during,
        )

    @cached_property
    def before_bytes(self) -> Bytes:
        """Bytes alive just before each op, and at the end of the step."""
        return self.before_by_row.sum(axis=0)

    @cached_property
    def during_bytes(self) -> Bytes:
        """Bytes alive while each op runs, workspace included: the candidates for the peak."""
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

    @property
    def peak_bytes(self) -> int:
        """The highest point of the step."""
        return int(self.during_bytes[self.peak_op])

    @cached_property
    def peak_op(self) -> int:
        """The first op that reaches the peak; `len(trace.ops)` when only the end of the step does."""
        return int(self.during_bytes.argmax())

    @property
    def peak_by_category(self) -> dict[Category, int]:
        """The peak taken apart, largest first, without the categories that have no part in it."""
        return self.by_category_during(self.peak_op)

    @property
    def peak_module(self) -> str:
        """The path of the module that the peak is in; empty for the model itself and outside any call."""
        return self.module_of(self.peak_op)

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

    def module_of(self, op: int) -> str:
        """The path of the module whose call made the op."""
        call = self.trace.ops[op].call if op < len(self.trace.ops) else NEVER
        return self.trace.calls[call].module if call != NEVER else ""

    def by_category_during(self, op: int) -> dict[Category, int]:
        """Bytes by category while the op runs, largest first."""
        return _largest_first(self.during_by_row[:, op])

    def by_category_before(self, op: int) -> dict[Category, int]:
        """Bytes by category just before the op, largest first."""
        return _largest_first(self.before_by_row[:, op])

    def alive_at(self, op: int) -> npt.NDArray[np.intp]:
        """The storages alive while the op runs, in order of birth."""
        self._check(op)
        return np.flatnonzero((self.alloc_at <= op) & ((self.free_after == NEVER) | (self.free_after >= op)))

    def largest_at(self, op: int, count: int = 10) -> npt.NDArray[np.intp]:
        """The `count` largest storages alive while the op runs, largest first, older first among equals."""
        alive = self.alive_at(op)
        return alive[np.argsort(-self.storage_bytes[alive], kind="stable")[:count]]

    def _check(self, op: int) -> None:
        if not 0 <= op <= len(self.trace.ops):
            raise InputError(f"op {op} is not in the step; give 0 to {len(self.trace.ops)}, the end of the step")


def _rounded(sizes: Iterable[int], count: int, rounding_bytes: int) -> Bytes:
    return -(-np.fromiter(sizes, np.int64, count) // rounding_bytes) * rounding_bytes


def _largest_first(column: Bytes) -> dict[Category, int]:
    order = np.argsort(-column, kind="stable")
    return {CATEGORIES[row]: int(column[row]) for row in order if column[row]}
