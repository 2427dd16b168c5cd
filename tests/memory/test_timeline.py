"""The timeline against traces worked out by hand, a naive replay, and the CPU allocator's own events."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memfit import Step, trace
from memfit.capture import AFTER_STEP, Category, Phase, Trace
from memfit.errors import InputError
from memfit.memory import Timeline, measured
from tests.memory.synthetic import call, make, op, storage, traces

pytestmark = pytest.mark.usefixtures("frozen_heap")


def small() -> Trace:
    return make(
        ops=(
            op(call=0, source=1),
            op(call=1, workspace=7, source=2),
            op(Phase.LOSS, source=3),
            op(Phase.BACKWARD),
            op(Phase.OPTIMIZER),
        ),
        storages=(
            storage(1000, category=Category.PARAMETER, name="w"),
            storage(10, category=Category.INPUT, free_after=1),
            storage(100, alloc_at=0, free_after=3),
            storage(30, alloc_at=1, free_after=1, category=Category.TEMPORARY),
            storage(50, alloc_at=3, free_after=4, category=Category.GRADIENT),
        ),
        calls=(call("", 0, 2, (3, 4)), call("inner", 1, 2, (3, 4), parent=0)),
        sources=("", "a.py:1", "a.py:2", "a.py:3"),
    )


def test_small_step_is_as_worked_out_by_hand() -> None:
    timeline = Timeline.of(small())
    assert timeline.start_bytes == 1010
    assert timeline.during_bytes.tolist() == [1110, 1147, 1100, 1150, 1050, 1000]
    assert timeline.before_bytes.tolist() == [1010, 1110, 1100, 1100, 1050, 1000]
    assert timeline.by_category[Category.TEMPORARY].tolist() == [0, 37, 0, 0, 0, 0]
    assert (timeline.peak_bytes, timeline.peak_op) == (1150, 3)
    assert list(timeline.peak_by_category.items()) == [
        (Category.PARAMETER, 1000),
        (Category.ACTIVATION, 100),
        (Category.GRADIENT, 50),
    ]
    assert [(span.phase, span.begin, span.end) for span in timeline.phases] == [
        (Phase.FORWARD, 0, 2),
        (Phase.LOSS, 2, 3),
        (Phase.BACKWARD, 3, 4),
        (Phase.OPTIMIZER, 4, 5),
    ]


def test_place_of_the_peak_is_module_and_line() -> None:
    timeline = Timeline.of(
        make(
            ops=(op(call=0, source=1), op(call=1, workspace=5000, source=2)),
            calls=(call("", 0, 2), call("inner", 1, 2, parent=0)),
            sources=("", "a.py:1", "a.py:2"),
        )
    )
    assert (timeline.peak_op, timeline.peak_module, timeline.peak_source) == (1, "inner", "a.py:2")


def test_rounding_is_per_storage_and_nothing_stays_nothing() -> None:
    timeline = Timeline.of(
        make(ops=(op(workspace=1),), storages=(storage(0), storage(1), storage(512), storage(513, alloc_at=0))),
        512,
    )
    assert timeline.start_bytes == 1024
    assert timeline.peak_bytes == 1024 + 1024 + 512
    with pytest.raises(InputError, match="rounding_bytes"):
        Timeline.of(small(), 0)


def test_storage_noted_after_the_last_op_counts_at_the_end() -> None:
    timeline = Timeline.of(make(ops=(op(),), storages=(storage(5), storage(70, alloc_at=1))))
    assert timeline.during_bytes.tolist() == [5, 75]
    assert timeline.peak_op == 1
    assert (timeline.peak_module, timeline.peak_source) == ("", "")
    assert timeline.alive_at(1).tolist() == [0, 1]


def test_step_without_ops_has_its_residents_as_peak() -> None:
    timeline = Timeline.of(make(storages=(storage(5), storage(6))))
    assert (timeline.start_bytes, timeline.peak_bytes, timeline.end_bytes) == (11, 11, 11)
    assert timeline.phases == ()


def test_largest_storages_come_first_and_older_before_equal() -> None:
    timeline = Timeline.of(make(ops=(op(),), storages=(storage(5), storage(9), storage(5), storage(99, alloc_at=1))))
    assert [each.storage for each in timeline.largest_at(0, 2)] == [1, 0]
    with pytest.raises(InputError, match="op 7"):
        timeline.largest_at(7)


@given(traces(), st.sampled_from((1, 512)))
def test_timeline_is_a_replay_of_births_and_deaths(trace: Trace, rounding: int) -> None:
    timeline = Timeline.of(trace, rounding)

    def rounded(n: int) -> int:
        return -(-n // rounding) * rounding

    for index in range(len(trace.ops) + 1):
        expected = dict.fromkeys(Category, 0)
        alive = []
        for number, each in enumerate(trace.storages):
            if each.alloc_at <= index and (each.free_after == AFTER_STEP or each.free_after >= index):
                expected[each.category] += rounded(each.bytes)
                alive.append(number)
        if index < len(trace.ops):
            expected[Category.TEMPORARY] += rounded(trace.ops[index].workspace_bytes)
        assert timeline.by_category_during(index) == {c: n for c, n in expected.items() if n}
        assert timeline.during_bytes[index] == sum(expected.values())
        assert timeline.alive_at(index).tolist() == alive
        between = sum(
            rounded(each.bytes)
            for each in trace.storages
            if each.alloc_at < index and (each.free_after == AFTER_STEP or each.free_after >= index)
        )
        assert timeline.before_bytes[index] == between
    assert timeline.peak_bytes == timeline.during_bytes.max()
    together = sum(timeline.by_category.values(), np.zeros(len(trace.ops) + 1))
    assert together.tolist() == timeline.during_bytes.tolist()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Dropout(0.1))


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


@pytest.mark.parametrize("build", [mlp, transformer])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_captured_peak_is_the_measured_one_to_the_byte(build: object, optimizer: object) -> None:
    model, batch = build(), torch.randn(4, 16, 64)  # type: ignore[operator]
    step = Step(model, batch, loss=lambda output, _: output.square().mean(), optimizer=optimizer)  # type: ignore[arg-type]
    timeline = Timeline.of(trace(step, target="cpu"))
    bound = step.build_optimizer(model)
    for _ in range(2):
        step.execute(model, bound, "cpu")
    with measured() as truth:
        step.execute(model, bound, "cpu")
    assert timeline.peak_bytes - timeline.start_bytes == truth.peak_bytes


def test_garbage_of_earlier_code_is_no_part_of_a_measurement() -> None:
    gc.disable()
    try:
        with measured():  # the profiler knows the size of what it saw allocated
            cycle: list[object] = [torch.empty(1000)]
            cycle.append(cycle)
            del cycle
        with measured() as truth:
            gc.collect()
            held = torch.empty(16)
        assert truth.end_bytes == held.nbytes
    finally:
        gc.enable()


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
def test_captured_step_ends_with_what_it_began_with(target: str) -> None:
    """Parameters, optimizer state and the batch outlive the step; gradients were set to None."""
    step = Step(mlp(), torch.randn(4, 16, 64), loss=lambda output, _: output.square().mean())
    timeline = Timeline.of(trace(step, target=target))
    assert (timeline.before_by_row[:, len(timeline.trace.ops)] == timeline.before_by_row[:, 0]).all()
