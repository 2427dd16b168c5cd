"""The frontier of every unit of a step: its undominated policies, bytes discarded against recompute time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.capture import Trace
from memfit.capture.environment import no_garbage_collection
from memfit.errors import InputError
from memfit.tradeoff.columns import Times, TraceColumns
from memfit.tradeoff.pareto import GroupChoices, build_pool, thin_out
from memfit.tradeoff.policy import Policy, Role, UnitColumns, build_policy
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
        """Return the policy with the least recompute time that discards at least so much; None when none does."""
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
        """Return the frontier of a unit."""
        return self._by_name[unit.name]

    @property
    def distinct(self) -> int:
        """How many different frontiers there are."""
        return len({id(frontier) for frontier in self._by_name.values()})


@no_garbage_collection()
def build_frontiers(trace: Trace, op_ms: Sequence[float] | Times, *, points: int = POINTS) -> Frontiers:
    """Return the frontiers of all units of a step, at most `points` policies each, for these times of its ops."""
    if points < 2:
        raise InputError(f"points is {points}; a frontier needs its two ends, give 2 or more")
    columns = TraceColumns.of(trace, np.asarray(op_ms, np.float64))
    found = units(trace)
    shared: dict[bytes, Frontier] = {}
    made = []
    for unit in found:
        unit_columns = UnitColumns.of(columns, unit)
        frontier = shared.get(unit_columns.digest)
        if frontier is None:
            frontier = shared[unit_columns.digest] = build_frontier(unit_columns, points=points)
        made.append(frontier)
    return Frontiers(found, made)


def build_frontier(unit_columns: UnitColumns, *, points: int = POINTS) -> Frontier:
    """Return the frontier of one unit."""
    choices = GroupChoices(unit_columns)
    pool = build_pool(choices)
    zero = np.zeros(1, np.int64)
    places = thin_out(np.concatenate((zero, pool.discarded_bytes)), np.concatenate((zero, pool.time)), points)
    policies = [build_policy(unit_columns, np.zeros(unit_columns.groups, bool))]
    for place in places[1:].tolist():
        candidate = pool.candidate(place - 1)
        policies.append(build_policy(unit_columns, choices.dropped(candidate.stage, set(candidate.saved))))
    return Frontier(
        policies=tuple(policies),
        exact=pool.exact,
        discardable_bytes=int(unit_columns.size[unit_columns.role == Role.DISCARDABLE].sum()),
    )
