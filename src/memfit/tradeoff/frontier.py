"""The frontier of every unit of a step: its undominated policies, bytes discarded against recompute time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memfit.capture import Trace, no_garbage_collection
from memfit.errors import InputError
from memfit.tradeoff.columns import Times, TraceColumns
from memfit.tradeoff.pareto import GroupChoices, build_pool, thin_out
from memfit.tradeoff.policy import Policy, Role, UnitColumns, build_policy
from memfit.tradeoff.units import Unit, find_units

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
    """The frontiers of a step by the names of its units, each built when it is first asked for.

    Units that are alike share one object. `trace_columns` are the columns of the trace that frontiers are built from.
    """

    def __init__(self, trace_columns: TraceColumns, *, points: int) -> None:
        self.trace_columns = trace_columns
        self._points = points
        self._by_name: dict[str, Frontier] = {}
        self._by_digest: dict[bytes, Frontier] = {}

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Every unit of the step."""
        return find_units(self.trace_columns.trace)

    @cached_property
    def _unit(self) -> dict[str, Unit]:
        return {unit.name: unit for unit in self.units}

    @no_garbage_collection()
    def __getitem__(self, name: str) -> Frontier:
        if name not in self._by_name:
            columns = UnitColumns.of(self.trace_columns, self._unit[name])
            if columns.digest not in self._by_digest:
                self._by_digest[columns.digest] = build_frontier(columns, points=self._points)
            self._by_name[name] = self._by_digest[columns.digest]
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unit)

    def __len__(self) -> int:
        return len(self._unit)

    def of(self, unit: Unit) -> Frontier:
        """Return the frontier of a unit."""
        return self[unit.name]

    @property
    def distinct(self) -> int:
        """How many different frontiers there are."""
        return len({id(frontier) for frontier in self.values()})


def build_frontiers(trace: Trace, op_ms: Sequence[float] | Times, *, points: int = POINTS) -> Frontiers:
    """Return the frontiers of all units of a step, at most `points` policies each, for these times of its ops."""
    if points < 2:
        raise InputError(f"points is {points}; a frontier needs its two ends, give 2 or more")
    return Frontiers(TraceColumns.of(trace, np.asarray(op_ms, np.float64)), points=points)


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
