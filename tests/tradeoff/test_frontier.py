"""The frontier is what enumerating every policy by the letter of the rules finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama import Shape, training_step

import memfit
from memfit.capture import Trace
from memfit.errors import InputError
from memfit.tradeoff import Frontier, Policy, Unit, build_frontier, build_frontiers
from memfit.tradeoff.columns import TraceColumns
from memfit.tradeoff.pareto import GroupChoices, build_pool, hull_corners, lower_hull, thin_out
from memfit.tradeoff.policy import Role, UnitColumns
from tests.tradeoff.literal_rules import Literal
from tests.tradeoff.random_units import units_in_traces

ALL = 10**6
Drawn = tuple[Trace, Unit, np.ndarray]


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


def of_unit(drawn: Drawn, points: int = ALL) -> Frontier:
    trace, unit, op_ms = drawn
    return build_frontier(UnitColumns.of(TraceColumns.of(trace, op_ms), unit), points=points)


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
        assert outcome.dropped == policy.dropped
        assert outcome.stop == policy.stop
        assert outcome.cached == policy.cached_bytes
        assert (outcome.bytes, outcome.ms) == (policy.discarded_bytes, policy.recompute_ms)
        assert literal.peak(policy) == policy.recompute_peak_bytes


def times_of(trace: Trace) -> np.ndarray:
    """Something like a roofline: bytes and a launch, views for nothing."""
    return np.array([(op.read_bytes + op.written_bytes) / 1e6 + (not op.view) * 0.001 for op in trace.ops])


@examples(150)
@given(units_in_traces())
def test_a_smaller_need_never_costs_more_time(drawn: Drawn) -> None:
    trace, unit, op_ms = drawn
    frontier = of_unit(drawn)
    everything = list(Literal(trace, unit, op_ms.tolist()).outcomes())
    last = 0.0
    for wanted in range(frontier.discardable_bytes + 2):
        possible = [outcome.ms for outcome in everything if outcome.bytes >= wanted]
        fastest = frontier.fastest(wanted)
        if fastest is None:
            assert not possible
            break
        assert fastest.recompute_ms == min(possible) >= last
        last = fastest.recompute_ms


@examples(200)
@given(units_in_traces(most_ops=14))
def test_corners_found_by_prices_are_those_of_the_exact_frontier(drawn: Drawn) -> None:
    trace, unit, op_ms = drawn
    choices = GroupChoices(UnitColumns.of(TraceColumns.of(trace, op_ms), unit))
    exact = build_pool(choices)
    x = np.concatenate(([0], exact.discarded_bytes))
    y = np.concatenate(([0], exact.time))
    expected = [(int(x[i]), int(y[i])) for i in lower_hull(x, y)[1:]]
    assert [(corner.discarded_bytes, corner.time) for corner in hull_corners(choices)] == expected


@examples(200)
@given(units_in_traces(most_ops=14))
def test_short_lists_give_real_policies_and_keep_the_hull(drawn: Drawn) -> None:
    trace, unit, op_ms = drawn
    choices = GroupChoices(UnitColumns.of(TraceColumns.of(trace, op_ms), unit))
    exact = build_pool(choices)
    best = dict(zip(exact.discarded_bytes.tolist(), exact.time.tolist(), strict=True))
    for cut in (build_pool(choices, states_limit=2), build_pool(choices, choices_limit=0)):
        found = set(zip(cut.discarded_bytes.tolist(), cut.time.tolist(), strict=True))
        assert {(corner.discarded_bytes, corner.time) for corner in hull_corners(choices)} <= found or cut.exact
        for discarded, time in found:
            assert time >= min(t for d, t in best.items() if d >= discarded)


@examples(100)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=60), st.integers(2, 30))
def test_thinning_keeps_the_ends_and_the_hull(steps: list[tuple[int, int]], points: int) -> None:
    x = np.cumsum([0, *(dx for dx, _ in steps)])
    y = np.cumsum([0, *(dy for _, dy in steps)])
    kept = thin_out(x, y, points)
    corners = lower_hull(x, y)
    assert len(kept) <= points and len(set(kept.tolist())) == len(kept)
    assert kept[0] == 0 and kept[-1] == len(x) - 1
    if len(corners) <= points:
        assert set(corners.tolist()) <= set(kept.tolist())
        assert len(kept) == min(points, len(x))
    else:
        assert set(kept.tolist()) <= set(corners.tolist())


def test_a_hull_with_too_many_corners_loses_the_flattest_first() -> None:
    x = np.array([0, 10, 20, 30, 40])
    y = np.array([0, 1, 3, 5 + 1, 100])
    assert len(lower_hull(x, y)) == 5
    assert thin_out(x, y, 3).tolist() == [0, 3, 4]


def test_of_equal_policies_the_one_that_saves_earlier_ops_is_taken() -> None:
    problem = UnitColumns(
        signature=np.zeros((3, 1), np.int64),
        ms=np.ones(3),
        view=np.zeros(3, bool),
        random=np.zeros(3, bool),
        workspace=np.zeros(3, np.int64),
        forced=np.zeros(3, bool),
        fixed=np.zeros(3, bool),
        ties=np.zeros((0, 2), np.int64),
        size=np.full(3, 8),
        alloc_at=np.arange(3),
        ends=np.full(3, 3),
        role=np.full(3, Role.DISCARDABLE),
        need=np.full(3, 2),
        gone=np.array([0, 2, 2]),
        input_size=np.zeros(0, np.int64),
        input_ends=np.zeros(0, np.int64),
    )
    policies = build_frontier(problem).policies
    assert [policy.saved for policy in policies] == [(0, 1, 2), (0, 1), (0,), ()]
    assert pairs(policies) == [(0, 0.0), (8, 1.0), (16, 2.0), (24, 3.0)]


def test_dropping_a_storage_without_bytes_may_spare_what_would_be_newly_held() -> None:
    """Op 0 is needed by op 1, which is random like op 2: saved, they would newly hold the result of op 1."""
    problem = UnitColumns(
        signature=np.zeros((3, 1), np.int64),
        ms=np.ones(3),
        view=np.zeros(3, bool),
        random=np.array([False, True, True]),
        workspace=np.zeros(3, np.int64),
        forced=np.zeros(3, bool),
        fixed=np.zeros(3, bool),
        ties=np.zeros((0, 2), np.int64),
        size=np.array([8, 8, 0]),
        alloc_at=np.arange(3),
        ends=np.array([3, 2, 3]),
        role=np.array([Role.DISCARDABLE, Role.FRESH, Role.DISCARDABLE]),
        need=np.array([1, -1, 2]),
        gone=np.array([0, 2, 2]),
        input_size=np.zeros(0, np.int64),
        input_ends=np.zeros(0, np.int64),
    )
    policies = build_frontier(problem).policies
    assert pairs(policies) == [(0, 0.0), (8, 3.0)]
    assert policies[1].dropped == ((0, 0), (2, 0)) and policies[1].stop == 2


def test_equal_layers_share_one_frontier() -> None:
    shape = Shape(layers=8, hidden=64, heads=4, key_value_heads=2, feed_forward=128, vocabulary=256)
    trace = memfit.trace(training_step(shape, length=32), target="h100-sxm")
    found = build_frontiers(trace, times_of(trace))
    layers = [found[f"layers.{index}"] for index in range(8)]
    assert all(layer is layers[0] for layer in layers)
    assert layers[0].exact and 2 < len(layers[0].policies) <= 24
    assert found["layers.0.attention"] is found["layers.7.attention"] is not found["layers.0.feed_forward"]
    assert found.distinct < 16 < len(found)
    thin = build_frontiers(trace, times_of(trace), points=3)["layers.0"].policies
    ends = (layers[0].policies[0], layers[0].policies[-1])
    assert len(thin) == 3 and (thin[0], thin[-1]) == ends


def test_layers_of_other_times_do_not_share() -> None:
    shape = Shape(layers=2, hidden=64, heads=4, key_value_heads=2, feed_forward=128, vocabulary=256)
    trace = memfit.trace(training_step(shape, length=32), target="h100-sxm")
    op_ms = times_of(trace)
    op_ms[trace.calls[next(i for i, call in enumerate(trace.calls) if call.module == "layers.1")].begin] *= 2
    found = build_frontiers(trace, op_ms)
    assert found["layers.0"] is not found["layers.1"]


def test_sizes_are_rounded_as_the_allocator_of_the_device_does() -> None:
    shape = Shape(layers=1, hidden=64, heads=4, key_value_heads=2, feed_forward=100, vocabulary=256)
    trace = memfit.trace(training_step(shape, length=33), target="h100-sxm")
    for frontier in build_frontiers(trace, times_of(trace)).values():
        assert all(policy.discarded_bytes % 512 == 0 for policy in frontier.policies)


@pytest.mark.parametrize("bad", [[0.0], "negative", "endless"])
def test_times_that_are_no_times_are_refused(bad: object) -> None:
    shape = Shape(layers=1, hidden=64, heads=4, key_value_heads=2, feed_forward=128, vocabulary=256)
    trace = memfit.trace(training_step(shape, length=32), target="cpu")
    op_ms = times_of(trace)
    if bad == "negative":
        op_ms[3] = -1.0
    elif bad == "endless":
        op_ms[3] = np.inf
    else:
        op_ms = op_ms[:1]
    with pytest.raises(InputError):
        build_frontiers(trace, op_ms)
    with pytest.raises(InputError, match="points"):
        build_frontiers(trace, times_of(trace), points=1)
