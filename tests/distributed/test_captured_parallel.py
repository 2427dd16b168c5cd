"""Tensor, pipeline, context and expert parallel steps, captured as they are, against real processes: to the byte."""

from __future__ import annotations

import pytest

import memfit
from memfit import spec
from memfit.capture import Phase, check_trace
from memfit.memory import Timeline
from tests.distributed import (
    context_parallel_ranks,
    expert_parallel_ranks,
    parallel_case,
    pipeline_ranks,
    tensor_parallel_ranks,
)
from tests.distributed.measured_steps import bounds_of, check_peak
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.xdist_group("ranks")]

CASES = {
    **tensor_parallel_ranks.CASES,
    **pipeline_ranks.CASES,
    **context_parallel_ranks.CASES,
    **expert_parallel_ranks.CASES,
}


IN_CI = (
    *tensor_parallel_ranks.CASES,
    *("1f1b", "context parallel", "expert parallel", "1f1b of sharded parts"),
)
"""One of each kind; the others run with `make zoo`."""


def test_a_plan_on_a_pipeline_keeps_its_budget_and_changes_no_bit(two_ranks: Ranks) -> None:
    case = CASES["gpipe"]
    plans, above = [], []
    for rank in range(case.ranks):
        trace = memfit.trace(case.step(case.build, spec), target="cpu", mesh=case.sizes, rank=rank)
        whole = memfit.plan(trace, progress=False)
        plan = memfit.plan(trace, budget=int(0.85 * whole.baseline.peak_bytes), progress=False)
        assert plan.predicted is not None and plan.checkpoint and plan.rank == rank
        above.append(plan.predicted.peak_bytes - Timeline.of(trace, 1).start_bytes)
        plans.append(plan.to_json())
    answers = two_ranks.run(parallel_case.train_planned, case, plans)
    for predicted_bytes, (steps, equal) in zip(above, answers, strict=True):
        assert equal
        check_peak(predicted_bytes, bounds_of(steps))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.zoo) for name in CASES])
def test_peaks_are_those_of_every_rank_to_the_byte(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    ranks: Ranks = request.getfixturevalue("two_ranks" if case.ranks == 2 else "four_ranks")
    for rank, steps in enumerate(answer[name] for answer in ranks.run(parallel_case.measure, {name: case})):
        trace = memfit.trace(case.step(case.build, spec), target="cpu", mesh=case.sizes, rank=rank)
        check_trace(trace)
        timeline = Timeline.of(trace, 1)
        backward = next(index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
        forward_bytes = int(timeline.during_bytes[:backward].max()) - timeline.start_bytes
        check_peak(timeline.peak_bytes - timeline.start_bytes, bounds_of(steps), f"rank {rank}")
        check_peak(forward_bytes, bounds_of(steps, "forward_peak_bytes"), f"rank {rank} in forward")
