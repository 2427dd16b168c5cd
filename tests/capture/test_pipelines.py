"""Stages of pipelines, captured with their schedule of micro-batches as any rank of a mesh."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import memfit
from memfit import Step, spec
from memfit.capture import BEFORE_STEP, Category, Trace, check_trace, load_trace, save_trace
from memfit.errors import InputError
from memfit.memory import Timeline
from tests.distributed.pipeline_ranks import CASES, MICRO_BATCHES, TOKENS, WIDTH, build

STAGES = 4
MESSAGE_BYTES = 2 * TOKENS * WIDTH * 4


@functools.cache
def captured(schedule: Any, rank: Any = None, target: str = "h100-sxm", stages: int = STAGES, **options: Any) -> Trace:
    def make(mesh: Any) -> Any:
        return build(mesh, schedule=schedule, **options)

    return memfit.trace(CASES["gpipe"].step(make, spec), target=target, mesh={"pp": stages}, rank=rank)


def actions(trace: Trace) -> list[str]:
    (run,) = trace.pipelines
    return [f"{each.kind}{each.microbatch}" for each in run.actions]


def test_micro_batches_run_in_the_order_of_the_schedule() -> None:
    forwards, backwards = [f"F{n}" for n in range(4)], [f"B{n}" for n in range(4)]
    assert actions(captured(ScheduleGPipe)) == [*forwards, *backwards]
    assert actions(captured(Schedule1F1B)) == [*forwards, *backwards], "as many stages as micro-batches"
    assert actions(captured(Schedule1F1B, 2)) == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    assert actions(captured(Schedule1F1B, 3)) == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_what_a_rank_computes_is_what_the_schedule_says_of_it(rank: int) -> None:
    for schedule in (ScheduleGPipe, Schedule1F1B):
        trace = captured(schedule, rank)
        check_trace(trace)
        (run,) = trace.pipelines
        assert run.rank == rank and run.stages == run.ranks == STAGES and run.microbatches == MICRO_BATCHES
        assert tuple(f"{each.stage}{each.kind}{each.microbatch}" for each in run.actions) == run.order[rank]


def test_ranks_hold_several_stages_of_an_interleaved_schedule() -> None:
    (run,) = captured(ScheduleInterleaved1F1B, 1, stages=2, parts=2).pipelines
    assert {each.stage for each in run.actions} == {1, 3} and run.stages == 4
    assert tuple(f"{each.stage}{each.kind}{each.microbatch}" for each in run.actions) == run.order[1]


@pytest.mark.parametrize(("rank", "neighbours"), [(0, 1), (1, 2), (3, 1)])
def test_a_stage_sends_and_receives_each_micro_batch_and_its_gradient(rank: int, neighbours: int) -> None:
    trace = captured(Schedule1F1B, rank)
    sent = [each for each in trace.collectives if trace.ops[each.op].name == "c10d.send.default"]
    received = [each for each in trace.collectives if trace.ops[each.op].name == "c10d.recv_.default"]
    assert len(sent) == len(received) == neighbours * MICRO_BATCHES
    assert {(each.kind, each.bytes, each.ranks) for each in trace.collectives} == {("send", MESSAGE_BYTES, STAGES)}
    buffers = [each for each in trace.storages if each.category is Category.COMMUNICATION]
    assert [each.bytes for each in buffers] == [MESSAGE_BYTES] * len(received)
    assert {each.alloc_at for each in buffers} == {BEFORE_STEP}, "what is received into stays between steps"


def test_earlier_stages_hold_more_micro_batches_and_gpipe_holds_all() -> None:
    def activations(trace: Trace) -> int:
        timeline = Timeline.of(trace, 1)
        return max(int(each) for each in timeline.during_bytes) - timeline.start_bytes

    # stages 1 and 2 are alike; the first warms up with three micro-batches, the second with two
    assert activations(captured(Schedule1F1B, 1)) > activations(captured(Schedule1F1B, 2))
    assert activations(captured(ScheduleGPipe, 2)) > activations(captured(Schedule1F1B, 2))


def test_shapes_that_stages_are_given_are_those_that_they_learn() -> None:
    learnt, given = (captured(Schedule1F1B, 1, target="cpu", stages=2, given=each) for each in (False, True))
    assert learnt.fingerprint == given.fingerprint


def test_a_trace_says_which_rank_it_is_of(tmp_path: Any) -> None:
    case = CASES["1f1b of sharded parts"]
    traces = [
        memfit.trace(case.step(case.build, spec), target="h100-sxm", mesh=case.sizes, rank=rank)
        for rank in ({"pp": 1}, 3)
    ]
    assert [trace.rank for trace in traces] == [2, 3]
    assert [trace.coordinate for trace in traces] == [{"pp": 1, "dp": 0}, {"pp": 1, "dp": 1}]
    assert {(each.kind, each.stride) for each in traces[0].collectives} >= {("send", 2), ("all_gather", 1)}
    (note,) = (note for note in traces[0].notes if "stage" in note)
    assert "rank 2 of pp 2 x dp 2: stage 1 of 2, 4 micro-batches by Schedule1F1B" in note
    save_trace(traces[0], tmp_path / "trace")
    assert load_trace(tmp_path / "trace") == traces[0]


@pytest.mark.parametrize("rank", [4, -1, True, "0", {"pp": 4}, {"tp": 0}, {"pp": 1.0}])
def test_a_rank_that_the_mesh_does_not_have_is_refused(rank: Any) -> None:
    with pytest.raises(InputError, match="rank"):
        memfit.trace(CASES["gpipe"].step(build, spec), target="cpu", mesh={"pp": STAGES}, rank=rank)


def test_a_rank_without_a_mesh_is_refused() -> None:
    with pytest.raises(InputError, match="give their mesh"):
        memfit.trace(Step(torch.nn.Linear(4, 4), spec((2, 4)), loss=lambda o, _: o.sum()), target="cpu", rank=1)


def test_a_rank_that_waits_for_an_object_which_nobody_sends_is_refused() -> None:
    def make(mesh: Any) -> torch.nn.Module:
        if mesh.get_rank() == 1:
            dist.recv_object_list([None], src=0)
        return torch.nn.Linear(4, 4)

    step = Step(make, spec((2, 4)), loss=lambda output, _: output.sum())
    with pytest.raises(InputError, match="rank 1 waits for an object of rank 0, which sends none"):
        memfit.trace(step, target="cpu", mesh={"pp": 2}, rank=1)


def test_nothing_is_left_of_other_ranks() -> None:
    before = dist.send_object_list, dist.recv_object_list, dist.ProcessGroup.send, PipelineStage.forward_one_chunk
    captured(Schedule1F1B, 2)
    after = dist.send_object_list, dist.recv_object_list, dist.ProcessGroup.send, PipelineStage.forward_one_chunk
    assert before == after and not dist.is_initialized()
