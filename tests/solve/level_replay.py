"""Levels of a step under a plan by other means than the planned timeline: what each policy adds to them and takes away.

Dropped storages leave when only autograd held them and come back, as others with their sizes, when the unit runs again;
saved results that autograd would not have kept stay until then; every op of a second run has its workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.memory import Bytes
from memfit.solve.program import Candidate, Program
from memfit.tradeoff import Policy
from memfit.tradeoff.columns import TraceColumns
from memfit.tradeoff.policy import Role, UnitColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The second run of a unit: bytes while each of its ops runs again."""

    unit: str
    before_op: int
    during_bytes: Bytes

    @property
    def peak_bytes(self) -> int:
        return int(self.during_bytes.max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Levels of the whole step under a plan."""

    during_bytes: Bytes
    reruns: tuple[Rerun, ...]

    @property
    def peak_bytes(self) -> int:
        """The highest point."""
        return max(int(self.during_bytes.max()), max((rerun.peak_bytes for rerun in self.reruns), default=0))

    @property
    def highest_rerun(self) -> Rerun | None:
        """The second run that is the highest point of the step, if one is."""
        highest = max(self.reruns, key=lambda rerun: rerun.peak_bytes, default=None)
        return highest if highest is not None and highest.peak_bytes > int(self.during_bytes.max()) else None

    @property
    def peak_op(self) -> int:
        """The op at the highest point; for a second run, the op before which it happens."""
        rerun = self.highest_rerun
        return rerun.before_op if rerun is not None else int(self.during_bytes.argmax())


def replay_levels(program: Program, trace_columns: TraceColumns, chosen: Sequence[tuple[Candidate, Policy]]) -> Replay:
    """Run the step's memory again under these policies."""
    ops = len(program.during)
    change = np.zeros(ops + 1, np.int64)
    parts = []
    for candidate, policy in chosen:
        problem = UnitColumns.of(trace_columns, candidate.unit)
        saved = np.zeros(len(problem.view), bool)
        saved[list(policy.saved)] = True
        runs = np.zeros(len(problem.view), bool)
        runs[list(policy.recomputed)] = True
        own = saved[problem.alloc_at]
        dropped = (problem.role == Role.DISCARDABLE) & ~own
        begin, end, again = candidate.unit.begin, candidate.unit.end, candidate.recompute_at
        low, high = np.searchsorted(trace_columns.forward_alloc_at, (begin, end))
        gone = trace_columns.forward_storages[low:high][dropped]
        np.subtract.at(
            change, np.maximum(trace_columns.released[gone], trace_columns.alloc_at[gone]) + 1, problem.size[dropped]
        )
        change[again] += int(problem.size[dropped].sum())
        newly = (problem.role == Role.FRESH) & own & (problem.alloc_at <= policy.stop)
        for size, gone in zip(problem.size[newly].tolist(), problem.ends[newly].tolist(), strict=True):
            change[min(begin + gone + 1, end)] += size
            change[again] -= size
        change[end] += problem.input_bytes
        change[again] -= problem.input_bytes
        parts.append((candidate, policy, problem, runs))
    shift = np.cumsum(change)[:ops]
    reruns = []
    for candidate, policy, problem, runs in parts:
        again = candidate.recompute_at
        level = int(program.before[again]) + int(shift[again - 1])
        reruns.append(
            Rerun(
                unit=candidate.unit.name,
                before_op=again,
                during_bytes=level + _second_run(problem, runs, policy.stop),
            )
        )
    return Replay(during_bytes=program.during + shift, reruns=tuple(reruns))


def _second_run(problem: UnitColumns, runs: np.ndarray, stop: int) -> Bytes:
    """What is alive above the level before while each op runs again."""
    alive: dict[int, int] = {}
    levels = []
    by_op: dict[int, list[int]] = {}
    for storage, alloc_at in enumerate(problem.alloc_at.tolist()):
        by_op.setdefault(alloc_at, []).append(storage)
    for op in range(stop + 1):
        if runs[op]:
            for storage in by_op.get(op, ()):
                if problem.ends[storage] >= op:
                    alive[storage] = int(problem.size[storage])
        levels.append(sum(alive.values()) + (int(problem.workspace[op]) if runs[op] else 0))
        for storage in [each for each in alive if problem.ends[each] <= op]:
            del alive[storage]
    return np.array(levels, np.int64)
