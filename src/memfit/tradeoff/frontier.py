"""The frontier of every unit of a step: its undominated policies, bytes discarded against recompute time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.capture import Trace
from memfit.capture.environment import no_garbage_collection
from memfit.errors import InputError
from memfit.tradeoff.choices import Choices
from memfit.tradeoff.facts import Facts, Times
from memfit.tradeoff.pareto import pool_of
from memfit.tradeoff.policy import Policy, build_policy
from memfit.tradeoff.problem import Problem, Role
from memfit.tradeoff.thinning import thinned
from memfit.tradeoff.units import Unit, units

POINTS = 24
"""As many policies a frontier has at most, unless asked otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The policies of one unit by increasing bytes and time; the first one discards nothing.

    `exact` says that no policy was left out before thinning: each one here is optimal, and the thinned ones were
    chosen among all. Otherwise only the corners of the convex hull are sure to be optimal. `discardable_bytes`
    is what autograd holds for this unit alone.
    """

    policies: tuple[Policy, ...]
    exact: bool
    discardable_bytes: int

    def fastest(self, discarded_bytes: int) -> Policy | None:
        """The policy with the least recompute time that discards at least so much; None when none does."""
        return next((policy for policy in self.policies if policy.discarded_bytes >= discarded_bytes), None)


class Frontiers(Mapping[str, Frontier]):
    """The frontiers of a step by the names of its units. Units that are alike share one object."""

    def __init__(self, units: tuple[Unit, ...], frontiers: Sequence[Frontier]) -> None:
        self.units = units
        self._by_name = {unit.name: frontier for unit, frontier in zip(units, frontiers, strict=True)}

    def __getitem__(self, name: str) -> Frontier:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, unit: Unit) -> Frontier:
        """The frontier of a unit."""
        return self._by_name[unit.name]

    @property
    def distinct(self) -> int:
        """How many different frontiers there are."""
        return len({id(frontier) for frontier in self._by_name.values()})


@no_garbage_collection()
def build_frontiers(trace: Trace, op_ms: Sequence[float] | Times, *, points: int = POINTS) -> Frontiers:
    """The frontiers of all units of a step, at most `points` policies each, for these times of its ops."""
    if points < 2:
        raise InputError(f"points is {points}; a frontier needs its two ends, give 2 or more")
    facts = Facts.of(trace, np.asarray(op_ms, np.float64))
    found = units(trace)
    shared: dict[bytes, Frontier] = {}
    made = []
    for unit in found:
        problem = Problem.of(facts, unit)
        frontier = shared.get(problem.digest)
        if frontier is None:
            frontier = shared[problem.digest] = build_frontier(problem, points=points)
        made.append(frontier)
    return Frontiers(found, made)


def build_frontier(problem: Problem, *, points: int = POINTS) -> Frontier:
    """The frontier of one unit."""
    choices = Choices(problem)
    pool = pool_of(choices)
    zero = np.zeros(1, np.int64)
    places = thinned(np.concatenate((zero, pool.discarded_bytes)), np.concatenate((zero, pool.time)), points)
    policies = [build_policy(problem, np.zeros(problem.groups, bool))]
    for place in places[1:].tolist():
        candidate = pool.candidate(place - 1)
        policies.append(build_policy(problem, choices.dropped(candidate.stage, set(candidate.saved))))
    return Frontier(
        policies=tuple(policies),
        exact=pool.exact,
        discardable_bytes=int(problem.size[problem.role == Role.DISCARDABLE].sum()),
    )
