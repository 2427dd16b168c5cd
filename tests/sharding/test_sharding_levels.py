"""Levels from which storages are taken and to which allocations are added, against counting them one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit import Step, spec
from memfit.capture import AFTER_STEP, Category, Trace
from memfit.memory import CATEGORIES, Timeline
from memfit.sharding.allocations import Levels


@pytest.fixture(scope="module")
def captured() -> Trace:
    step = Step(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), spec((2, 4)), loss=_sum)
    return memfit.trace(step, target="cpu")


def _sum(output, _):
    return output.sum()


def test_a_storage_that_is_taken_is_missed_only_where_it_was(captured: Trace) -> None:
    timeline = Timeline.of(captured, 1)
    for number, storage in enumerate(captured.storages):
        levels = Levels(timeline)
        levels.take(number)
        before, during = levels.levels()
        less_before = timeline.before_bytes - before.sum(axis=0)
        less_during = timeline.during_bytes - during.sum(axis=0)
        last = len(captured.ops) if storage.free_after == AFTER_STEP else storage.free_after
        alive = np.arange(len(captured.ops) + 1)
        assert np.array_equal(less_during, storage.bytes * ((alive >= storage.alloc_at) & (alive <= last)))
        assert np.array_equal(less_before, storage.bytes * ((alive > storage.alloc_at) & (alive <= last)))


def test_a_storage_replaced_by_its_own_size_changes_nothing(captured: Trace) -> None:
    timeline = Timeline.of(captured, 1)
    levels = Levels(timeline)
    for number, storage in enumerate(captured.storages):
        levels.replace(number, storage.category, storage.bytes)
    before, during = levels.levels()
    assert np.array_equal(before, timeline.before_by_row) and np.array_equal(during, timeline.during_by_row)


def test_what_is_made_and_freed_between_two_ops_raises_the_one_before(captured: Trace) -> None:
    timeline = Timeline.of(captured, 1)
    levels = Levels(timeline)
    first = levels.make(Category.COMMUNICATION, 10_000, 5)
    second = levels.make(Category.GATHERED_PARAMETER, 20_000, 5)
    levels.end(first, 5)
    levels.end(second, 7)
    before, during = (each.sum(axis=0) for each in levels.levels())
    assert during[4] == timeline.before_bytes[5] + 30_000
    assert [before[k] - timeline.before_bytes[k] for k in (4, 5, 6, 7)] == [0, 20_000, 20_000, 0]
    assert [during[k] - timeline.during_bytes[k] for k in (3, 5, 6, 7)] == [0, 20_000, 20_000, 0]


intervals = st.lists(
    st.tuples(st.sampled_from(CATEGORIES), st.integers(1, 5000), st.integers(0, 30), st.integers(0, 30), st.booleans()),
    max_size=12,
)


@given(intervals, st.sampled_from([1, 512]))
def test_levels_agree_with_counting(captured: Trace, found: list, rounding: int) -> None:
    timeline = Timeline.of(captured, rounding)
    levels = Levels(timeline)
    ops = len(captured.ops)
    before, during = timeline.before_bytes.copy(), timeline.during_bytes.copy()
    for category, n_bytes, begin, length, by_op in found:
        begin, end = min(begin, ops), min(begin + length + by_op, ops)
        if end < begin + by_op:
            continue
        made = levels.make(category, n_bytes, begin, by_op=by_op)
        levels.end(made, end)
        rounded = -(-n_bytes // rounding) * rounding
        before[begin + by_op : end] += rounded
        during[begin:end] += rounded
    got_before, got_during = (each.sum(axis=0) for each in levels.levels())
    assert np.array_equal(got_before, before)
    assert (got_during >= during).all()
    assert (got_before[1:] <= got_during[:-1]).all(), "a second run begins no higher than the step has been"
    most = timeline.during_bytes.max() + sum(-(-each[1] // rounding) * rounding for each in found)
    assert got_during.max() <= most
