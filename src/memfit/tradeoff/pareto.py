"""The exact frontier of a unit's choices.

Note [Lists]: a list holds undominated states: bytes lost by saving, time of running the rest again, in order of
bytes. One choice makes two copies of it, one that runs the group again and one that saves it; merged and pruned
they are the next list. Among states of equal bytes and time the one with fewer saved ops stays, then the one
that saves earlier groups. Each list remembers where its states come from, so that a state's choices can be read
back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memfit.tradeoff.choices import Choice, Choices, Stage
from memfit.tradeoff.facts import Flags, Ints
from memfit.tradeoff.hull import Candidate, hull_corners

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
        """The groups that a state saves."""
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
    _corners: list[Candidate]

    def candidate(self, place: int) -> Candidate:
        """The policy at a place, with its choices."""
        number, index = int(self._stage[place]), int(self._index[place])
        if number < 0:
            return self._corners[index]
        stage, states = self._stages[number]
        return Candidate(
            int(self.discarded_bytes[place]),
            int(self.time[place]),
            stage.ops + int(states.ops[index]),
            stage,
            states.saved(index),
        )


def pool_of(choices: Choices, states_limit: int = STATES, choices_limit: int = EXACT_CHOICES) -> Pool:
    """The undominated policies that discard something."""
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


def _list_stages(choices: Choices, staged: list[tuple[Stage, _States]], limit: int) -> bool:
    """Make the list of every stage; says whether none was cut."""
    zero = np.zeros(1, np.int64)
    states = _States(zero, zero, zero, zero)
    settled, exact = 0, True
    for stage in choices.stages:
        for choice in choices.settled[settled : stage.settled]:
            states, whole = _cut(_extended(states, choice), limit)
            exact &= whole
        settled = stage.settled
        own = states
        for choice in stage.own:
            own, whole = _cut(_extended(own, choice), limit)
            exact &= whole
        staged.append((stage, own))
    return exact


def _extended(states: _States, choice: Choice) -> _States:
    """The list after one more choice."""
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
    """Which states, sorted by bytes and then by time, are faster than all before them."""
    keep = np.ones(len(time), bool)
    keep[1:] = time[1:] < np.minimum.accumulate(time)[:-1]
    return keep


def _cut(states: _States, limit: int) -> tuple[_States, bool]:
    """At most `limit` states, evenly spread over the bytes, the ends among them; says whether all stayed."""
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
