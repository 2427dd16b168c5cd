"""Bubbles of pipelines: what a stage waits for the others, beside the known figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import memfit
from memfit.capture import PipelineAction, PipelineRun, Trace
from memfit.cost import Roofline, Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.sharding.bubbles import Bubble, StageTimes, find_bubbles, find_stage_times
from memfit.solve import Problem
from tests.capture.test_pipelines import captured


def bubble(trace: Trace, forward_ms: float, backward_ms: float, transfer_ms: float = 0.0) -> Bubble:
    """The bubble where each forward and each backward takes so long."""
    times = np.zeros(len(trace.ops))
    (run,) = trace.pipelines
    for action in run.actions:
        times[action.begin] = forward_ms if action.kind == "F" else backward_ms
    return alone(run, Runtime(trace, times), {}, transfer_ms)


def alone(run: PipelineRun, runtime: Runtime, waits: dict[int, float], transfer_ms: float) -> Bubble:
    """The bubble of a rank of which alone the times are known."""
    found = find_stage_times(run, runtime, waits, transfer_ms)
    assert found is not None
    return find_bubbles([found])[0]


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("rank", [0, 3])
def test_equal_stages_wait_for_the_known_part_of_the_step(schedule: Any, rank: int) -> None:
    found = bubble(captured(schedule, rank), 1.0, 2.0)
    stages, batches = 4, 4
    assert found.run_ms == pytest.approx((batches + stages - 1) * 3.0)
    assert found.waited_ms / found.run_ms == pytest.approx((stages - 1) / (batches + stages - 1))


def test_stages_that_alternate_between_ranks_wait_less() -> None:
    found = bubble(captured(ScheduleInterleaved1F1B, 0, stages=2, parts=2), 1.0, 2.0)
    # (p - 1) / v forwards and backwards of a rank, whose v stages each take 1 and 2
    assert found.waited_ms == pytest.approx(3.0)
    assert found.run_ms == pytest.approx(4 * 2 * 3.0 + 3.0)


def test_transfers_lengthen_the_run_where_a_stage_waits_for_them() -> None:
    still, moving = (bubble(captured(ScheduleGPipe, 1), 1.0, 2.0, transfer_ms) for transfer_ms in (0.0, 0.25))
    assert moving.run_ms == pytest.approx(still.run_ms + 6 * 0.25), "three hops there and three back"


def test_waits_inside_of_a_micro_batch_are_part_of_it() -> None:
    trace = captured(ScheduleGPipe, 1)
    (run,) = trace.pipelines
    runtime = Runtime(trace, np.zeros(len(trace.ops)))
    waits = {action.begin + 1: 1.0 for action in run.actions if action.kind == "F"}
    assert alone(run, runtime, waits, 0.0).waited_ms == pytest.approx(3.0)


def test_the_bubble_is_part_of_the_step_and_named() -> None:
    trace = captured(Schedule1F1B, 0)
    target = Target.parse("h100-sxm", ranks=4)
    problem = Problem.of(Runtime.of(trace, Roofline.of(target)), target)
    sharding = problem.sharding
    assert sharding is not None and sharding.exposed_ms == sharding.bubble_ms > 0.0
    assert not sharding.transfers, "what stages send is waited for in the bubble, and nowhere else"
    assert sharding.communication_ms > 0.0
    plan = memfit.plan(trace, progress=False)
    assert plan.mesh == {"pp": 4} and plan.rank == 0
    assert plan.baseline.step_ms == pytest.approx(problem.runtime.total_ms + sharding.bubble_ms)


def test_a_schedule_that_cannot_end_is_refused() -> None:
    run = PipelineRun(
        schedule="Own",
        stages=2,
        microbatches=1,
        rank=0,
        ranks=2,
        order=(("0B0", "0F0"), ("1F0", "1B0")),
        actions=(PipelineAction(kind="F", stage=0, microbatch=0, begin=0, end=1),),
    )
    trace = captured(ScheduleGPipe, 0)
    with pytest.raises(InputError, match="never ends"):
        alone(run, Runtime(trace, np.zeros(len(trace.ops))), {}, 0.0)


def test_a_schedule_without_an_order_has_no_bubble() -> None:
    run = PipelineRun(schedule="Own", stages=2, microbatches=1, rank=0, ranks=2, order=(), actions=())
    trace = captured(ScheduleGPipe, 0)
    assert find_stage_times(run, Runtime(trace, np.zeros(len(trace.ops))), {}) is None


def times_of(schedule: Any, rank: int, forward_ms: float, backward_ms: float) -> StageTimes:
    (run,) = captured(schedule, rank).pipelines
    kinds = {"F": forward_ms, "B": backward_ms, "I": backward_ms / 2, "W": backward_ms / 2}
    return StageTimes(run=run, by_stage={rank: kinds})


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_a_slow_last_stage_is_waited_for_by_those_that_are_not(schedule: Any) -> None:
    """Four stages and micro-batches: the others fill and drain the pipeline once, the slow one works all the time."""
    first, last = find_bubbles([times_of(schedule, 0, 1.0, 2.0), times_of(schedule, 3, 2.0, 4.0)])
    assert first.run_ms == last.run_ms == pytest.approx(3 * (1.0 + 2.0) + 4 * (2.0 + 4.0))
    assert last.waited_ms == pytest.approx(3 * (1.0 + 2.0))
    assert first.waited_ms == pytest.approx(first.run_ms - 4 * (1.0 + 2.0))
    (alike,) = find_bubbles([times_of(schedule, 3, 2.0, 4.0)])
    assert alike.run_ms == pytest.approx(7 * (2.0 + 4.0)), "where no other is known, all are as slow"


def test_a_stage_that_nobody_captured_is_like_those_that_are_not_the_last() -> None:
    known = [times_of(ScheduleGPipe, rank, ms, ms) for rank, ms in ((0, 1.0), (1, 3.0), (3, 9.0))]
    guessed = find_bubbles(known)
    told = find_bubbles([*known, times_of(ScheduleGPipe, 2, 2.0, 2.0)])
    assert [each.run_ms for each in guessed] == [each.run_ms for each in told[:3]]
    assert guessed[0].run_ms != find_bubbles([*known, times_of(ScheduleGPipe, 2, 5.0, 5.0)])[0].run_ms


def test_what_a_rank_recomputes_is_part_of_its_backwards() -> None:
    first, last = times_of(Schedule1F1B, 0, 1.0, 2.0), times_of(Schedule1F1B, 3, 1.0, 2.0)
    slower = find_bubbles([first, last.with_recompute(4 * 0.5)])
    assert slower[0].run_ms == pytest.approx(3 * 3.0 + 4 * 3.5)


def test_ranks_of_other_schedules_are_refused() -> None:
    with pytest.raises(InputError, match="different schedules"):
        find_bubbles([times_of(Schedule1F1B, 0, 1.0, 2.0), times_of(ScheduleGPipe, 3, 1.0, 2.0)])
