"""A step as allocator events, and what the caching allocator of a device reserves for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import torch
from hypothesis import given
from torch import nn

from memfit import Step, spec, trace
from memfit.capture import AFTER_STEP, BEFORE_STEP, Category, Phase, Trace
from memfit.capture.step import WarmUp, ZeroGrad
from memfit.hardware import Target
from memfit.memory import AllocationTable, Reserved, Timeline, allocator_config, events, reserved
from memfit.memory.allocator import FREE, AllocatorConfig, simulate
from memfit.memory.steady_state import MOST_STEPS, ProcessEvents, Row
from tests.memory.synthetic import make, op, storage, traces

MIB = 1 << 20
H100 = Target.parse("h100-sxm").device
CPU = Target.parse("cpu").device


def test_events_come_as_residents_outputs_workspace_deaths() -> None:
    step = make(
        ops=(op(workspace=7), op()),
        storages=(
            storage(1),
            storage(2, alloc_at=0, free_after=1),
            storage(3, alloc_at=0, free_after=0),
            storage(4, alloc_at=2),
        ),
    )
    assert [tuple(event) for event in events(step)] == [
        (0, 1, 0),
        (1, 2, 0),
        (2, 3, 0),
        (4, 7, 0),
        (4, FREE, 0),
        (2, FREE, 0),
        (1, FREE, 0),
        (3, 4, 0),
    ]


@given(traces())
def test_allocator_agrees_with_the_timeline(trace: Trace) -> None:
    result = simulate(events(trace))
    assert result.peak_requested_bytes == Timeline.of(trace).peak_bytes
    exact = simulate(events(trace), AllocatorConfig(small_segment_bytes=MIB))
    # Every block here is small, so all that is left of one is split off and a block is its rounded size.
    assert exact.peak_allocated_bytes == Timeline.of(trace, 512).peak_bytes
    assert result.peak_reserved_bytes >= result.peak_allocated_bytes


@given(traces())
def test_the_table_of_a_trace_has_its_levels(trace: Trace) -> None:
    for rounding_bytes in (1, 512):
        timeline = Timeline.of(trace, rounding_bytes)
        before, during = AllocationTable.of(trace).levels(rounding_bytes)
        assert before.tolist() == timeline.before_by_row.tolist()
        assert during.tolist() == timeline.during_by_row.tolist()


def test_a_table_may_come_from_elsewhere() -> None:
    """Two instants: 8 bytes before the step, 5 of the first instant alone, and a workspace of 3 in the second."""
    table = AllocationTable(
        op=np.arange(3),
        run=np.full(3, -1),
        storage=np.arange(2),
        remade=np.full(2, -1),
        stream=np.zeros(2, np.int64),
        size_bytes=np.array([8, 5]),
        row=np.array([0, 3]),
        alloc_at=np.array([-1, 0]),
        free_after=np.array([-1, 0]),
        workspace_bytes=np.array([0, 3]),
        first_use=np.full(2, -1),
        warm_up_frees=np.full(2, -1),
        states_made=2,
        product_thread=np.full(2, -1),
        first_made_at=np.full(2, -1),
    )
    expected = [(0, 8, 0), (1, 5, 0), (1, FREE, 0), (2 + 1, 3, 0), (2 + 1, FREE, 0)]
    assert [tuple(event) for event in events(table)] == expected
    assert table.levels()[1].sum(axis=0).tolist() == [13, 11, 8]
    assert reserved(table, CPU).peak_reserved_bytes == 13
    assert reserved(table, H100).peak_reserved_bytes == 2 * MIB


@given(traces())
def test_any_step_can_be_repeated_until_it_settles(trace: Trace) -> None:
    result = reserved(trace, H100)
    assert result.peak_requested_bytes <= Timeline.of(trace).peak_bytes + sum(
        s.bytes for s in trace.storages if s.category is Category.OPTIMIZER_STATE
    )
    assert result.peak_reserved_bytes >= result.first_step_reserved_bytes
    assert result.out_of_memory_op is None


@given(traces())
def test_every_step_of_a_process_leaves_what_the_first_left(trace: Trace) -> None:
    table = AllocationTable.of(trace)
    process = ProcessEvents(table)
    resident = set(np.flatnonzero(table.alloc_at == BEFORE_STEP).tolist())
    freed = set(np.flatnonzero((table.alloc_at == BEFORE_STEP) & (table.free_after != AFTER_STEP)).tolist())
    left = set(np.flatnonzero((table.alloc_at != BEFORE_STEP) & (table.free_after == AFTER_STEP)).tolist())
    there: set[int] = set()
    after = []
    for stream in process.steps():
        for _, key, requested_bytes in stream:
            assert (key in there) == (requested_bytes == FREE)
            there ^= {key}
        after.append(frozenset(there))
    # Gradients that the next step begins with stay as well, all else that a step leaves is replaced.
    assert len(after) == MOST_STEPS and set(after) == {frozenset(resident - freed | left - set(process.left))}


def _reserved_with(zero_grad: ZeroGrad, *, set_to_none: bool = True) -> Reserved:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1000, 3000), nn.GELU(), nn.Linear(3000, 3000), nn.GELU(), nn.Linear(3000, 1000))

    step = Step(
        build, spec((4096, 1000)), loss=lambda output, _: output.sum(), optimizer=torch.optim.Adam, zero_grad=zero_grad,
        set_to_none=set_to_none,
    )  # fmt: skip
    return reserved(trace(step, target="a100-sxm-40gb"), H100)


def test_zero_grad_first_or_last_reserves_the_same() -> None:
    assert _reserved_with("before_forward") == _reserved_with("after_step")


def test_a_new_process_has_no_gradients_in_its_first_forward() -> None:
    """Whatever the loop does with gradients later, the first forward and backward are the same."""
    last = _reserved_with("after_step").first_step_reserved_bytes
    for zero_grad in ("before_forward", "before_backward", "never"):
        assert _reserved_with(zero_grad).first_step_reserved_bytes == last
    assert _reserved_with("after_step", set_to_none=False).first_step_reserved_bytes == last


def test_gradients_that_a_step_begins_with_are_where_the_step_before_left_them() -> None:
    """30 MiB of gradients, freed by the loss: in no first forward, and in their own block from the second step on."""
    step = make(
        ops=(op(makes=(2,)), op(Phase.LOSS), op(Phase.BACKWARD, reads=(2,), makes=(3,))),
        storages=(
            storage(40 * MIB, category=Category.PARAMETER),
            storage(30 * MIB, category=Category.GRADIENT, free_after=1),
            storage(50 * MIB, alloc_at=0, free_after=2),
            storage(30 * MIB, category=Category.GRADIENT, alloc_at=2),
        ),
    )
    process = ProcessEvents(AllocationTable.of(step))
    assert process.first() == [(-1, 0, 40 * MIB), (0, 2, 50 * MIB), (2, 3, 30 * MIB), (2, 2, FREE)]
    assert process.later() == [(0, 2, 50 * MIB), (1, 3, FREE), (2, 3, 30 * MIB), (2, 2, FREE)]
    assert reserved(step, H100).peak_reserved_bytes == 120 * MIB


def test_configuration_of_a_device_is_that_of_torch() -> None:
    assert allocator_config(H100) == AllocatorConfig()
    assert allocator_config(H100, limit_bytes=5).limit_bytes == 5


def test_cpu_has_no_cache_so_reserved_is_allocated() -> None:
    step = make(ops=(op(workspace=7),), storages=(storage(10), storage(5, alloc_at=0)))
    result = reserved(step, CPU)
    assert result.peak_allocated_bytes == result.peak_reserved_bytes == 22


def test_optimizer_state_takes_blocks_of_activations_in_the_first_step() -> None:
    """Note [Steady state]: 30 MiB activation in step one, then a 24 MiB state sits in its block for ever."""
    step = make(
        ops=(op(makes=(2,)), op(Phase.BACKWARD, reads=(2,)), op(Phase.OPTIMIZER, reads=(0, 1))),
        storages=(
            storage(40 * MIB, category=Category.PARAMETER),
            storage(24 * MIB, category=Category.OPTIMIZER_STATE),
            storage(30 * MIB, alloc_at=0, free_after=1),
        ),
    )
    result = reserved(step, H100)
    assert result.first_step_reserved_bytes == 70 * MIB
    assert result.peak_allocated_bytes == 94 * MIB
    assert result.peak_reserved_bytes == 100 * MIB
    assert result.steps == 3


def test_limit_names_the_op_that_fails() -> None:
    step = make(ops=(op(), op(workspace=50 * MIB)), storages=(storage(40 * MIB),))
    assert reserved(step, H100, limit_bytes=80 * MIB).out_of_memory_op == 1
    assert reserved(step, H100, limit_bytes=90 * MIB).out_of_memory_op is None


def test_limit_can_be_met_by_emptying_the_cache() -> None:
    """20 and 30 MiB one after the other fit into 40 MiB when the first segment is given back."""
    step = make(
        ops=(op(makes=(0,)), op(makes=(1,))),
        storages=(storage(20 * MIB, alloc_at=0, free_after=0), storage(30 * MIB, alloc_at=1, free_after=1)),
    )
    free, tight = reserved(step, H100), reserved(step, H100, limit_bytes=40 * MIB)
    assert (free.peak_reserved_bytes, free.retries) == (50 * MIB, 0)
    assert tight.out_of_memory_op is None
    assert tight.retries > 0


def test_real_step_reserves_at_least_what_it_allocates() -> None:
    step = Step(
        lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))),
        spec((256, 1024)),
        loss=lambda out, _: out.sum(),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
    )
    captured = trace(step, target="h100-sxm")
    result = reserved(captured, H100)
    assert result.peak_requested_bytes == Timeline.of(captured).peak_bytes
    assert Timeline.of(captured, 512).peak_bytes <= result.peak_allocated_bytes <= result.peak_reserved_bytes
    expandable = replace(H100, allocator=replace(H100.allocator, expandable_segments=True))
    page_bytes = H100.allocator.large_segment_bytes  # what an expandable segment grows by
    assert reserved(captured, expandable).peak_reserved_bytes < result.peak_reserved_bytes + page_bytes


def test_what_runs_before_the_first_step_stays_in_the_cache() -> None:
    """A forward with gradients on holds all activations, an evaluation one at a time; neither changes the step."""

    def captured(warm_up: WarmUp) -> Trace:
        layers = [nn.Linear(2000, 2000) for _ in range(6)]
        step = Step(
            lambda: nn.Sequential(*layers), spec((8192, 2000)), loss=lambda output, _: output.sum(), warm_up=warm_up
        )
        return trace(step, target="a100-sxm-40gb")

    steps: dict[WarmUp, Trace] = {name: captured(name) for name in get_args(WarmUp)}
    assert len({step.fingerprint for step in steps.values()}) == 1
    rows = {name: ProcessEvents(AllocationTable.of(step)).first() for name, step in steps.items()}
    before = {name: _peak(row for row in rows[name] if row[0] == BEFORE_STEP) for name in rows}
    activation, state = 8192 * 2000 * 4, 6 * (2000 * 2000 + 2000) * 4 + 8192 * 2000 * 4
    assert before["none"] == state
    assert before["evaluation"] == state + 2 * activation
    assert before["forward"] == state + 6 * activation
    assert all(reserved(step, H100).out_of_memory_op is None for step in steps.values())


def _peak(rows: Iterable[Row]) -> int:
    """The most bytes that events hold at once."""
    held, most = dict[int, int](), 0
    for _, key, requested_bytes in rows:
        if requested_bytes == FREE:
            del held[key]
        else:
            held[key] = requested_bytes
        most = max(most, sum(held.values()))
    return most
