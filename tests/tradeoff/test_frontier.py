"""The frontier is what enumerating every policy by the letter of the rules finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from literal_rules import Literal
from random_units import units_in_traces

from memfit.errors import InputError
from memfit.trace import Trace
from memfit.tradeoff import Frontier, Policy, Unit, frontier_of, frontiers
from memfit.tradeoff.facts import Facts
from memfit.tradeoff.problem import Problem

ALL = 10**6
Drawn = tuple[Trace, Unit, np.ndarray]


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


def of_unit(drawn: Drawn, points: int = ALL) -> Frontier:
    trace, unit, op_ms = drawn
    return frontier_of(Problem.of(Facts.of(trace, op_ms), unit), points=points)


def pairs(policies: tuple[Policy, ...]) -> list[tuple[int, float]]:
    return [(policy.discarded_bytes, policy.recompute_ms) for policy in policies]


@examples(250)
@given(units_in_traces())
def test_frontier_is_that_of_all_policies(drawn: Drawn) -> None:
    frontier = of_unit(drawn)
    assert frontier.exact
    assert pairs(frontier.policies) == Literal(drawn[0], drawn[1], drawn[2].tolist()).frontier()


@examples(15)
@given(units_in_traces(most_ops=14))
def test_frontier_of_longer_units_is_that_of_all_policies(drawn: Drawn) -> None:
    literal = Literal(drawn[0], drawn[1], drawn[2].tolist())
    assert pairs(of_unit(drawn).policies) == literal.frontier()


@examples(250)
@given(units_in_traces(most_ops=14))
def test_every_policy_does_what_it_says(drawn: Drawn) -> None:
    trace, unit, op_ms = drawn
    literal = Literal(trace, unit, op_ms.tolist())
    for policy in of_unit(drawn).policies:
        dropped = frozenset(
            op for group in literal.groups if any(op - unit.begin in policy.recomputed for op in group) for op in group
        )
        outcome = literal.outcome(dropped)
        assert outcome is not None, "the rules forbid this policy"
        assert outcome.recomputed == policy.recomputed
        assert outcome.saved == policy.saved
        assert outcome.stop == policy.stop
        assert outcome.cached == policy.cached_bytes
        assert (outcome.bytes, outcome.ms) == (policy.discarded_bytes, policy.recompute_ms)
        assert literal.peak(policy) == policy.recompute_peak_bytes
