"""A unit's groups as choices, stop by stop: the knapsacks whose union is the frontier.

Note [Stages]: fix the stop L. A group whose ops and whose packed tensors all lie within L is settled: its bytes
and time are the same for every later stop, so the list of settled choices only grows. A group that needs more
than L is saved; one that has begun and goes on after L is a choice for this stage alone. For a choice, saving it
costs `lost_bytes` (what it would have discarded and what is newly held) and running it again costs its time.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from memfit.tradeoff.facts import Flags
from memfit.tradeoff.problem import Problem, Role

_NONE = 1 << 60


@dataclass(frozen=True, slots=True)
class Choice:
    """A group that may be saved or run again; times are in picoseconds."""

    group: int
    lost_bytes: int
    time: int
    ops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stop. `potential_bytes` and `time` are those of saving nothing that may be chosen.

    The choices are the first `settled` ones of all stages and the stage's `own`. Groups that always run again
    are the first `running` ones and the stage's `own_running`.
    """

    stop: int
    potential_bytes: int
    time: int
    ops: int
    settled: int
    own: tuple[Choice, ...]
    running: int
    own_running: tuple[int, ...]


@dataclass(slots=True)
class Choices:
    """The settled choices in the order in which they settle, and the stages."""

    problem: Problem
    settled: list[Choice] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.problem.groups:
            _Sweep(self).run()

    def dropped(self, stage: Stage, saved: set[int]) -> Flags:
        """The groups that run again at a stage when these of its choices are saved."""
        dropped = np.zeros(self.problem.groups, bool)
        dropped[self.running[: stage.running]] = True
        dropped[list(stage.own_running)] = True
        for choice in (*self.settled[: stage.settled], *stage.own):
            dropped[choice.group] = choice.group not in saved
        return dropped


@dataclass(slots=True)
class _Group:
    """A group's ops with running sums of their times, and its storages."""

    number: int
    ops: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    fresh_at: list[int] = field(default_factory=list)
    fresh_bytes: list[int] = field(default_factory=list)
    discardable_bytes: int = 0
    need: int = -1
    forced: int = _NONE
    fixed: int = _NONE

    @property
    def settles(self) -> int:
        return max(self.ops[-1], self.need)

    def until(self, stop: int) -> Choice:
        """The group as far as a stop reaches it."""
        ops = bisect_right(self.ops, stop)
        fresh = bisect_right(self.fresh_at, stop)
        newly_held = self.fresh_bytes[fresh - 1] if fresh else 0
        return Choice(self.number, self.discardable_bytes + newly_held, self.times[ops - 1], ops)


class _Sweep:
    """Goes through the stops from the first to the last."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        problem = choices.problem
        self.groups = _groups_of(problem)
        self.view_time = np.cumsum(np.where(problem.view, problem.picoseconds, 0)).tolist()
        self.carriers = np.unique(problem.alloc_at[problem.role == Role.DISCARDABLE]).tolist()
        self.open: dict[int, _Group] = {}
        self.potential_bytes = -problem.input_bytes
        self.time = 0
        self.ops = 0

    def run(self) -> None:
        begun = settled = 0
        settling = sorted(self.groups, key=lambda group: (group.settles, group.number))
        for stop in sorted({group.need for group in self.groups if group.need >= 0}):
            while begun < len(self.groups) and self.groups[begun].ops[0] <= stop:
                self.open[begun] = self.groups[begun]
                begun += 1
            while settled < len(settling) and settling[settled].settles <= stop:
                group = settling[settled]
                settled += 1
                del self.open[group.number]
                if max(group.forced, group.fixed) <= stop:
                    return  # neither saved nor run again: no later stop can be reached
                self._settle(group, stop)
            self._add_stage(stop)

    def _settle(self, group: _Group, stop: int) -> None:
        """Add to every later stage what a group costs and gains; list it when there is a choice."""
        choice = group.until(stop)
        if group.forced <= stop:
            self.potential_bytes -= choice.lost_bytes - group.discardable_bytes
            self.ops += choice.ops
        elif group.fixed <= stop or (choice.lost_bytes and not choice.time):
            self.choices.running.append(group.number)
            self.potential_bytes += group.discardable_bytes
            self.time += choice.time
        elif not choice.lost_bytes:
            self.ops += choice.ops
        else:
            self.choices.settled.append(choice)
            self.potential_bytes += group.discardable_bytes

    def _add_stage(self, stop: int) -> None:
        potential_bytes, time, ops = self.potential_bytes, self.time, self.ops
        own: list[Choice] = []
        own_running: list[int] = []
        for group in self.open.values():
            choice = group.until(stop)
            save = group.need > stop or group.forced <= stop
            if save and group.fixed <= stop:
                return
            if save:
                potential_bytes -= choice.lost_bytes - group.discardable_bytes
                ops += choice.ops
            elif group.fixed <= stop:
                own_running.append(group.number)
                potential_bytes += group.discardable_bytes
                time += choice.time
            elif not choice.lost_bytes:
                ops += choice.ops
            else:
                own.append(choice)
                potential_bytes += group.discardable_bytes
        self.choices.stages.append(
            Stage(
                stop=stop,
                potential_bytes=potential_bytes,
                time=time + self.view_time[stop],
                ops=ops + len(self.carriers) - bisect_right(self.carriers, stop),
                settled=len(self.choices.settled),
                own=tuple(own),
                running=len(self.choices.running),
                own_running=tuple(own_running),
            )
        )


def _groups_of(problem: Problem) -> list[_Group]:
    groups = [_Group(number) for number in range(problem.groups)]
    columns = (problem.group, problem.picoseconds, problem.forced, problem.fixed)
    for op, (number, time, forced, fixed) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if number < 0:
            continue
        group = groups[number]
        group.ops.append(op)
        group.times.append(time)
        if forced:
            group.forced = min(group.forced, op)
        if fixed:
            group.fixed = min(group.fixed, op)
    rows = (problem.role, problem.alloc_at, problem.size, problem.need)
    of_op = problem.group.tolist()
    for role, alloc_at, size, need in zip(*(row.tolist() for row in rows), strict=True):
        group = groups[of_op[alloc_at]]
        if role == Role.FRESH:
            group.fresh_at.append(alloc_at)
            group.fresh_bytes.append(size)
        elif role == Role.DISCARDABLE:
            group.discardable_bytes += size
            group.need = max(group.need, need)
    for group in groups:
        group.times = list(accumulate(group.times))
        group.fresh_bytes = list(accumulate(group.fresh_bytes))
    return groups
