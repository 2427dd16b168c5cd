"""The greedy order is a way through real policies, and the frontier is never worse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memfit
from memfit.compat import SACStats, greedy_order
from memfit.compat.sac import SACTable, group_of
from memfit.tradeoff import build_frontier, find_units
from memfit.tradeoff.policy import Role, UnitColumns
from tests.zoo import zoo_models


@st.composite
def statistics(draw: st.DrawFn) -> SACStats:
    """Any module: views, random ops, in-place ops with or without a maker inside."""
    count = draw(st.integers(1, 12))
    views = [op for op in range(count) if draw(st.integers(0, 4)) == 0]
    written: list[tuple[int, int]] = []
    for op in range(count):
        if op not in views and draw(st.integers(0, 3)) == 0:
            heads = [head for head in range(op) if head not in {each for each, _ in written}]
            written.append((op, draw(st.sampled_from([op, *heads]))))
    random = [op for op in range(count) if op not in views and draw(st.integers(0, 4)) == 0]
    sizes = draw(st.lists(st.sampled_from((0, 1, 2, 8, 30)), min_size=count, max_size=count))
    return SACStats(
        func_names=[f"op{op}" for op in range(count)],
        runtimes=draw(st.lists(st.sampled_from((0.0, 0.125, 1.0, 2.5)), min_size=count, max_size=count)),
        memory=[0 if op in views else size for op, size in enumerate(sizes)],
        view_like_ops=views,
        rand_ops=random,
        saved_autograd_ops=[],
        inplace_ops=written,
        force_store_random=draw(st.booleans()),
    )


def problem_of(stats: SACStats) -> UnitColumns:
    """The same decisions under the frontier's rules: everything is discardable, the whole module runs again.

    What writes to something that no op of the module made cannot run again, nor can random ops that have no input.
    """
    count = len(stats.memory)
    view = np.isin(np.arange(count), stats.view_like_ops)
    forced = np.zeros(count, bool)
    forced[[op for op, maker in stats.inplace_ops if op == maker or view[maker]]] = True
    if stats.force_store_random:
        forced[stats.rand_ops] = True
    random = np.isin(np.arange(count), stats.rand_ops)
    makers = np.flatnonzero(~view)
    return UnitColumns(
        signature=np.zeros((count, 1), np.int64),
        ms=np.array(stats.runtimes),
        view=view,
        random=random,
        workspace=np.zeros(count, np.int64),
        forced=forced & ~view,
        fixed=np.zeros(count, bool),
        ties=np.array([pair for pair in stats.inplace_ops if not view[pair[1]]], np.int64).reshape(-1, 2),
        size=np.array(stats.memory, np.int64)[makers],
        alloc_at=makers,
        ends=np.full(len(makers), count),
        role=np.full(len(makers), Role.DISCARDABLE),
        need=np.full(len(makers), count - 1),
        gone=np.array(makers),
        input_size=np.zeros(0, np.int64),
        input_ends=np.zeros(0, np.int64),
    )


@settings(max_examples=300, deadline=None)
@given(statistics())
def test_no_prefix_of_the_greedy_order_is_better_than_the_frontier(stats: SACStats) -> None:
    compare(stats)


@pytest.mark.parametrize("name", ["mlp", "vit", "resnet", "gpt2"])
def test_no_prefix_of_the_greedy_order_of_a_real_unit_is_better_than_the_frontier(name: str) -> None:
    trace = memfit.trace(zoo_models.STEPS[name](), target="cpu")
    op_ms = [0.0 if op.view else 0.001 + (op.read_bytes + op.written_bytes) / 1e6 for op in trace.ops]
    table = SACTable(trace, op_ms)
    assert sum(compare(table.stats(unit)) for unit in find_units(trace) if unit.end - unit.begin <= 40) > 20


def compare(stats: SACStats) -> int:
    """Check every prefix of the greedy order; says how many there are."""
    greedy = greedy_order(stats)
    frontier = build_frontier(problem_of(stats), points=10**6)
    assert frontier.exact
    discarded = 0
    spent = sum(stats.runtimes[op] for op in stats.view_like_ops)
    for candidate in greedy.msps_meta:
        discarded += candidate.memory
        spent += candidate.runtime
        best = frontier.fastest(discarded)
        assert best is not None, "the prefix is no policy"
        assert best.recompute_ms <= spent + 1e-9
    return len(greedy.msps_meta)


@settings(max_examples=300, deadline=None)
@given(statistics())
def test_every_op_is_in_exactly_one_group(stats: SACStats) -> None:
    greedy = greedy_order(stats)
    groups = [group_of(greedy, each.op_idx) for each in greedy.msps_meta]
    groups += [group_of(greedy, head) for head in greedy.stored_ops]
    groups += [{op} for op in greedy.recomputed_ops]
    everything = [op for group in groups for op in group]
    assert sorted(everything) == list(range(len(stats.memory)))


@settings(max_examples=100, deadline=None)
@given(statistics())
def test_the_order_is_by_bytes_per_millisecond(stats: SACStats) -> None:
    greedy = greedy_order(stats)
    rates = [each.msps for each in greedy.msps_meta]
    assert rates == sorted(rates, reverse=True)
    if stats.rand_ops and stats.force_store_random:
        stored = set().union(*(group_of(greedy, head) for head in greedy.stored_ops))
        assert set(stats.rand_ops) <= stored
