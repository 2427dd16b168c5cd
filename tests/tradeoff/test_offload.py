"""Frontiers with offload are what trying every policy and every subset finds; when copies are hidden."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.capture import Trace
from memfit.hardware import OffloadLink
from memfit.memory import Timeline
from memfit.tradeoff import Policy, Unit, UnitColumns, add_offload, build_frontier, choose_level
from memfit.tradeoff.columns import TraceColumns
from memfit.tradeoff.offload import OffloadWindow, build_offloads, offloadable
from tests.tradeoff.literal_rules import Literal
from tests.tradeoff.random_units import units_in_traces

LINK = OffloadLink(name="link", to_host_bytes_per_s=8e3, to_device_bytes_per_s=4e3)
"""Eight bytes in a millisecond there, four back."""
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def unit_at(name: str, begin: int, end: int, backward_begin: int = 90, backward_end: int = 99) -> Unit:
    return Unit(
        name=name,
        module=name,
        kind="Kind",
        call=0,
        begin=begin,
        end=end,
        backward_begin=backward_begin,
        backward_end=backward_end,
    )


def window_of(forward_ms: float, backward_ms: float, following: Unit | None = None) -> OffloadWindow:
    return OffloadWindow(next=following or unit_at("next", 50, 60), forward_ms=forward_ms, backward_ms=backward_ms)


def staying(literal: Literal, unit: Unit, policy: Policy) -> dict[int, int]:
    """The bytes of each op's results that stay for the unit's backward alone, from the trace itself."""
    storages = literal.trace.storages
    dropped = set(policy.dropped)
    found: dict[int, int] = {}
    for op in literal.inside:
        all_made = [s for s in literal.alloc_at if storages[s].alloc_at == op and literal.made(s)]
        kept = [s for s in all_made if literal.held(s) and not literal.discardable(s)]
        outlive = [s for s in all_made if not literal.held(s) and storages[s].free_after >= unit.end]
        if literal.fixed(op) or kept or outlive:
            continue
        fresh = op - unit.begin <= policy.stop and op - unit.begin in policy.saved
        n_bytes = sum(
            literal.size(storage)
            for place, storage in enumerate(all_made)
            if (literal.discardable(storage) and (op - unit.begin, place) not in dropped)
            or (fresh and not literal.held(storage))
        )
        if n_bytes:
            found[op - unit.begin] = n_bytes
    return found


@SETTINGS
@given(units_in_traces(most_ops=7), st.floats(0, 4), st.floats(0, 8))
def test_the_frontier_is_that_of_every_policy_and_every_subset(
    drawn: tuple[Trace, Unit, np.ndarray], forward_ms: float, backward_ms: float
) -> None:
    trace, unit, times = drawn
    columns = UnitColumns.of(TraceColumns.of(trace, times), unit)
    plain, window = build_frontier(columns, points=1000), window_of(forward_ms, backward_ms)
    found = add_offload(plain, columns, window, LINK, points=1000)
    literal = Literal(trace, unit, times.tolist())
    tried: list[tuple[int, float]] = []
    for policy in plain.policies:
        sizes = list(staying(literal, unit, policy).values())
        for count in range(len(sizes) + 1):
            for subset in combinations(sizes, count):
                n_bytes = sum(subset)
                waits = max(0.0, n_bytes / 8 - forward_ms) + max(0.0, n_bytes / 4 - backward_ms)
                tried.append((policy.discarded_bytes + n_bytes, policy.recompute_ms + waits))
    assert found.exact
    assert set(plain.policies) <= set(found.policies)
    for n_bytes, ms in tried:  # nothing better exists
        assert any(each.freed_bytes >= n_bytes and each.added_ms <= ms + 1e-9 for each in found.policies)
    for policy in found.policies:  # and everything is real
        assert any(n == policy.freed_bytes and abs(ms - policy.added_ms) < 1e-9 for n, ms in tried)


@SETTINGS
@given(units_in_traces(most_ops=7))
def test_what_a_policy_offloads_is_named_by_op_and_found_again(drawn: tuple[Trace, Unit, np.ndarray]) -> None:
    trace, unit, times = drawn
    columns = TraceColumns.of(trace, times)
    unit_columns = UnitColumns.of(columns, unit)
    following = unit_at("next", unit.end, unit.end, unit.backward_begin, unit.backward_begin)
    window = window_of(1.0, 1.0, following)
    for policy in add_offload(build_frontier(unit_columns), unit_columns, window, LINK, points=24).policies:
        offloads = build_offloads(columns, [(unit, policy)], {unit.name: window})
        storages = [] if not offloads else offloads[0].storages.tolist()
        assert {trace.storages[each].alloc_at - unit.begin for each in storages} == set(policy.offload)
        assert sum(int(columns.size[each]) for each in storages) == policy.offloaded_bytes
        assert policy.offloaded_bytes <= int(offloadable(unit_columns, policy).sum())
        if policy.stop < 0 and offloads:
            level = Timeline.of(trace, columns.rounding_bytes, offloads=offloads)
            missing = Timeline.of(trace, columns.rounding_bytes).during_bytes - level.during_bytes
            assert (missing[unit.end : unit.backward_begin] == policy.offloaded_bytes).all()
            assert missing.sum() == policy.offloaded_bytes * (unit.backward_begin - unit.end)


def test_copies_are_hidden_as_far_as_the_next_unit_lasts() -> None:
    window = window_of(2.0, 5.0)
    assert window.hidden_bytes(LINK) == 16
    assert window.exposed_ms(np.array([0, 16, 20, 24]), LINK).tolist() == pytest.approx([0.0, 0.0, 0.5, 2.0])


def test_offload_is_offered_on_the_level_that_hides_most() -> None:
    model, layers = unit_at("model", 0, 20), [unit_at(f"layer{i}", 5 * i, 5 * i + 5) for i in range(4)]
    head = unit_at("head", 20, 22)
    windows = {"model": window_of(1, 1, head)} | {
        one.name: window_of(1, 1, other) for one, other in zip(layers, [*layers[1:], head], strict=True)
    }
    units = [model, *layers]
    inside = choose_level(units, windows, {"model": 10, **{layer.name: 4 for layer in layers}})
    assert set(inside) == {layer.name for layer in layers}
    outside = choose_level(units, windows, {"model": 20, **{layer.name: 4 for layer in layers}})
    assert set(outside) == {"model"}


def test_no_unit_offloads_beside_one_that_contains_another_that_does() -> None:
    first, second, inner, after = unit_at("a", 0, 5), unit_at("b", 5, 12), unit_at("b.x", 5, 8), unit_at("b.y", 8, 12)
    windows = {"a": window_of(1, 1, second), "b.x": window_of(1, 1, after)}
    assert set(choose_level([first, inner], windows, {"a": 9, "b.x": 2})) == {"a"}
    assert set(choose_level([first, inner], windows, {"a": 1, "b.x": 2})) == {"b.x"}
