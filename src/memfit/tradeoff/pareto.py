"""The frontier of one unit: its undominated policies, of bytes discarded against recompute time.

Note [Stages]: fix the stop L. A group whose ops and whose packed tensors all lie within L is settled: its bytes
and time are the same for every later stop, so the list of settled choices only grows. A group that needs more
than L is saved; one that has begun and goes on after L is a choice for this stage alone. For a choice, saving it
costs `lost_bytes` (what it would have discarded and what is newly held) and recomputing it costs its time. Each stage
is a knapsack, and the frontier is that of their union.

Note [Lists]: a list holds undominated states: bytes lost by saving, time of recomputing the rest, in order of
bytes. One choice makes two copies of it, one that recomputes the group and one that saves it; merged and pruned
they are the next list. Among states of equal bytes and time the one with fewer saved ops stays, then the one
that saves earlier groups. Each list remembers where its states come from, so that a state's choices can be read
back.

Note [Hull]: for a price of time per byte every choice decides for itself, so the best state of every stage is a
sum, whatever the number of choices. Asking at the slopes between the points found so far finds every corner of
the frontier's convex hull. It is used for units with too many choices for exact lists.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.memory import Flags, Ints
from memfit.tradeoff.columns import Times
from memfit.tradeoff.policy import Role, UnitColumns

_NONE = 1 << 60


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """A group that may be saved or recomputed; times are in picoseconds."""

    group: int
    lost_bytes: int
    time: int
    ops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stop. `potential_bytes` and `time` are those of saving nothing that may be chosen.

    The choices are the first `settled` ones of all stages and the stage's `own`. Groups that are always recomputed
    are the first `running` ones and the stage's `own_running`.
    """

    stop: int
    potential_bytes: int
    time: int
    ops: int
    settled: int
    own: tuple[GroupChoice, ...]
    running: int
    own_running: tuple[int, ...]


@dataclass(slots=True)
class GroupChoices:
    """The settled choices in the order in which they settle, and the stages."""

    unit_columns: UnitColumns
    settled: list[GroupChoice] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.unit_columns.groups:
            _Sweep(self).run()

    def dropped(self, stage: Stage, saved: set[int]) -> Flags:
        """Return the groups that are recomputed at a stage when these of its choices are saved."""
        dropped = np.zeros(self.unit_columns.groups, bool)
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

    def until(self, stop: int) -> GroupChoice:
        """Return the group as far as a stop reaches it."""
        ops = bisect_right(self.ops, stop)
        fresh = bisect_right(self.fresh_at, stop)
        newly_held = self.fresh_bytes[fresh - 1] if fresh else 0
        return GroupChoice(self.number, self.discardable_bytes + newly_held, self.times[ops - 1], ops)


class _Sweep:
    """Goes through the stops from the first to the last."""

    def __init__(self, choices: GroupChoices) -> None:
        self.choices = choices
        unit_columns = choices.unit_columns
        self.groups = _groups_of(unit_columns)
        self.view_time = np.cumsum(np.where(unit_columns.view, unit_columns.picoseconds, 0)).tolist()
        self.carriers = np.unique(unit_columns.alloc_at[unit_columns.role == Role.DISCARDABLE]).tolist()
        self.open: dict[int, _Group] = {}
        self.potential_bytes = -unit_columns.input_bytes
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
                    return  # neither saved nor recomputed: no later stop can be reached
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
        own: list[GroupChoice] = []
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


def _groups_of(unit_columns: UnitColumns) -> list[_Group]:
    groups = [_Group(number) for number in range(unit_columns.groups)]
    columns = (unit_columns.group, unit_columns.picoseconds, unit_columns.forced, unit_columns.fixed)
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
    rows = (unit_columns.role, unit_columns.alloc_at, unit_columns.size, unit_columns.need)
    of_op = unit_columns.group.tolist()
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


# ---- Convex hull ----


@dataclass(frozen=True, slots=True)
class PolicyPoint:
    """A policy by its stage and the groups it saves there; time is in picoseconds."""

    discarded_bytes: int
    time: int
    ops: int
    stage: Stage
    saved: frozenset[int]


def lower_hull(x: Ints | Times, y: Ints | Times) -> Ints:
    """Return the indices of the lower convex hull's corners, of points that are sorted by x."""
    corners: list[int] = []
    xs, ys = x.tolist(), y.tolist()
    for i in range(len(xs)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (ys[b] - ys[a]) * (xs[i] - xs[a]) < (ys[i] - ys[a]) * (xs[b] - xs[a]):
                break
            corners.pop()
        corners.append(i)
    return np.array(corners, np.int64)


class _Prices:
    """The best policy for a price (Note [Hull])."""

    def __init__(self, choices: GroupChoices) -> None:
        self.choices = choices
        stages = choices.stages
        self.potential = np.array([stage.potential_bytes for stage in stages], np.int64)
        self.time = np.array([stage.time for stage in stages], np.float64)
        self.settled = np.array([stage.settled for stage in stages], np.int64)
        own = [(number, choice) for number, stage in enumerate(stages) for choice in stage.own]
        self.own_stage = np.array([number for number, _ in own], np.int64)
        every = [*choices.settled, *(choice for _, choice in own)]
        self.groups = np.array([choice.group for choice in every], np.int64)
        self.lost = np.array([choice.lost_bytes for choice in every], np.int64)
        self.spent = np.array([choice.time for choice in every], np.int64)
        self.ops = np.array([choice.ops for choice in every], np.int64)

    def most(self) -> PolicyPoint:
        """Return the policy that discards the most: all choices are recomputed."""
        totals = self._totals(self.spent)
        highest = self.potential == self.potential.max()
        number = int(np.where(highest, totals, np.inf).argmin())
        return self._candidate(number, np.zeros(len(self.lost), bool))

    def best(self, price: float) -> PolicyPoint:
        """Return the policy with the least time less price times bytes."""
        saved = price * self.lost < self.spent
        totals = self._totals(np.where(saved, price * self.lost, self.spent))
        return self._candidate(int((totals - price * self.potential).argmin()), saved)

    def _totals(self, costs: NDArray[Any]) -> Times:
        """Return the time of each stage with what its choices cost."""
        count = len(self.choices.settled)
        settled = np.concatenate(([0.0], np.cumsum(costs[:count], dtype=np.float64)))
        totals: Times = self.time + settled[self.settled]
        np.add.at(totals, self.own_stage, costs[count:])
        return totals

    def _candidate(self, number: int, saved: Flags) -> PolicyPoint:
        stage = self.choices.stages[number]
        of_stage = np.zeros(len(saved), bool)
        of_stage[: stage.settled] = True
        of_stage[len(self.choices.settled) :] = self.own_stage == number
        saved = saved & of_stage
        return PolicyPoint(
            stage.potential_bytes - int(self.lost[saved].sum()),
            stage.time + int(self.spent[of_stage & ~saved].sum()),
            stage.ops + int(self.ops[saved].sum()),
            stage,
            frozenset(self.groups[saved].tolist()),
        )


def hull_corners(choices: GroupChoices) -> list[PolicyPoint]:
    """Return the corners of the frontier's lower convex hull, without the policy that does nothing."""
    if not choices.stages:
        return []
    prices = _Prices(choices)
    most = prices.most()
    if most.discarded_bytes <= 0:
        return []
    found: dict[tuple[int, int], PolicyPoint] = {(most.discarded_bytes, most.time): most}
    spans = [((0, 0), (most.discarded_bytes, most.time))]
    while spans:
        low, high = spans.pop()
        if high[1] <= low[1]:
            continue
        corner = prices.best((high[1] - low[1]) / (high[0] - low[0]))
        point = (corner.discarded_bytes, corner.time)
        below = (point[1] - low[1]) * (high[0] - low[0]) < (high[1] - low[1]) * (point[0] - low[0])
        if below and low[0] < point[0] < high[0]:
            found[point] = corner
            spans += [(low, point), (point, high)]
    return sorted(found.values(), key=lambda corner: corner.discarded_bytes)


# ---- Exact lists ----


STATES = 2048
"""The longest list that is kept; beyond it a frontier is no longer exact."""

EXACT_CHOICES = 192
"""Units with more choices than this get the corners of their hull alone."""

_RENUMBER = 50


@dataclass(frozen=True, slots=True)
class _States:
    """A list of states (Note [Lists]) and how it was made from the one before."""

    lost_bytes: Ints
    time: Ints
    ops: Ints
    rank: Ints
    before: _States | None = None
    group: int = -1
    origin: Ints | None = None
    steps: int = 0

    def saved(self, index: int) -> frozenset[int]:
        """Return the groups that a state saves."""
        states: _States = self
        groups = set()
        while states.before is not None and states.origin is not None:
            index = int(states.origin[index])
            if index >= len(states.before.time):
                index -= len(states.before.time)
                groups.add(states.group)
            states = states.before
        return frozenset(groups)


@dataclass(frozen=True, slots=True)
class Pool:
    """Undominated policies of a unit, by increasing discarded bytes; `exact` when there are no others."""

    discarded_bytes: Ints
    time: Ints
    exact: bool
    _stage: Ints
    _index: Ints
    _stages: list[tuple[Stage, _States]]
    _corners: list[PolicyPoint]

    def candidate(self, place: int) -> PolicyPoint:
        """Return the policy at a place, with its choices."""
        number, index = int(self._stage[place]), int(self._index[place])
        if number < 0:
            return self._corners[index]
        stage, states = self._stages[number]
        return PolicyPoint(
            int(self.discarded_bytes[place]),
            int(self.time[place]),
            stage.ops + int(states.ops[index]),
            stage,
            states.saved(index),
        )


def build_pool(choices: GroupChoices, states_limit: int = STATES, choices_limit: int = EXACT_CHOICES) -> Pool:
    """Return the undominated policies that discard something."""
    exact = len(choices.settled) + max((len(stage.own) for stage in choices.stages), default=0) <= choices_limit
    staged: list[tuple[Stage, _States]] = []
    if exact:
        exact = _list_stages(choices, staged, states_limit)
    corners = [] if exact else hull_corners(choices)
    columns: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
    for number, (stage, states) in enumerate(staged):
        useful = stage.potential_bytes - states.lost_bytes > 0
        index = np.flatnonzero(useful)
        columns.append(
            (
                stage.potential_bytes - states.lost_bytes[useful],
                stage.time + states.time[useful],
                stage.ops + states.ops[useful],
                np.full(len(index), number),
                index,
            )
        )
    if corners:
        rows = [(corner.discarded_bytes, corner.time, corner.ops, -1, i) for i, corner in enumerate(corners)]
        columns.append(tuple(np.array(rows, np.int64).T))  # type: ignore[arg-type]
    if not columns:
        none = np.zeros(0, np.int64)
        return Pool(none, none, exact, none, none, staged, corners)
    discarded, time, ops, number, index = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.lexsort((number, ops, time, -discarded))
    order = order[_undominated(time[order])][::-1]
    return Pool(discarded[order], time[order], exact, number[order], index[order], staged, corners)


def _list_stages(choices: GroupChoices, staged: list[tuple[Stage, _States]], limit: int) -> bool:
    """Make the list of every stage; return whether none was cut."""
    zero = np.zeros(1, np.int64)
    states = _States(zero, zero, zero, zero)
    settled, exact = 0, True
    for stage in choices.stages:
        for choice in choices.settled[settled : stage.settled]:
            states, whole = _cut(_extend(states, choice), limit)
            exact &= whole
        settled = stage.settled
        own = states
        for choice in stage.own:
            own, whole = _cut(_extend(own, choice), limit)
            exact &= whole
        staged.append((stage, own))
    return exact


def _extend(states: _States, choice: GroupChoice) -> _States:
    """Return the list after one more choice."""
    lost = np.concatenate((states.lost_bytes, states.lost_bytes + choice.lost_bytes))
    time = np.concatenate((states.time + choice.time, states.time))
    ops = np.concatenate((states.ops, states.ops + choice.ops))
    rank = np.concatenate((2 * states.rank + 1, 2 * states.rank))
    order = np.lexsort((rank, ops, time, lost))
    order = order[_undominated(time[order])]
    rank = rank[order]
    if states.steps % _RENUMBER == _RENUMBER - 1:
        rank = np.argsort(np.argsort(rank, kind="stable"), kind="stable")
    return _States(lost[order], time[order], ops[order], rank, states, choice.group, order, states.steps + 1)


def _undominated(time: Ints) -> Flags:
    """Return which states, sorted by bytes and then by time, are faster than all before them."""
    keep = np.ones(len(time), bool)
    keep[1:] = time[1:] < np.minimum.accumulate(time)[:-1]
    return keep


def _cut(states: _States, limit: int) -> tuple[_States, bool]:
    """Return at most `limit` states, evenly spread over the bytes, the ends among them, and whether all stayed."""
    count = len(states.time)
    if count <= limit or states.origin is None:
        return states, True
    spread = np.searchsorted(states.lost_bytes, np.linspace(0, states.lost_bytes[-1], limit).astype(np.int64))
    keep = np.unique(np.concatenate((spread, [0, count - 1])))
    kept = replace(
        states,
        lost_bytes=states.lost_bytes[keep],
        time=states.time[keep],
        ops=states.ops[keep],
        rank=states.rank[keep],
        origin=states.origin[keep],
    )
    return kept, False


# ---- Thinning ----


def thin_out(discarded_bytes: Ints, time: Ints, points: int) -> Ints:
    """Return the indices of at most `points` points of a frontier sorted by bytes, its first and last among them.

    All corners of the hull stay; when there are too many, those go first whose going loses the least area
    between the hull and the chord that replaces them. Room that is left goes, one by one, to the point that
    takes most from the area under the staircase.
    """
    count = len(time)
    if count <= points:
        return np.arange(count)
    corners = lower_hull(discarded_bytes, time)
    if len(corners) >= points:
        return _fewer_corners(discarded_bytes, time, corners, points)
    chosen = corners
    while len(chosen) < points:
        after = np.searchsorted(chosen, np.arange(count))
        low, high = chosen[np.maximum(after - 1, 0)], chosen[after]
        gain = (discarded_bytes - discarded_bytes[low]).astype(np.float64) * (time[high] - time)
        chosen = np.union1d(chosen, gain.argmax())
    return chosen


def _fewer_corners(x: Ints, y: Ints, corners: Ints, points: int) -> Ints:
    left = corners.tolist()
    while len(left) > points:
        px, py = x[left].astype(np.float64), y[left].astype(np.float64)
        lost: NDArray[np.float64] = np.abs(
            (px[1:-1] - px[:-2]) * (py[2:] - py[:-2]) - (px[2:] - px[:-2]) * (py[1:-1] - py[:-2])
        )
        del left[1 + int(lost.argmin())]
    return np.array(left, np.int64)
