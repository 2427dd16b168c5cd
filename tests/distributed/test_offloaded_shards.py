"""FSDP2 with `CPUOffloadPolicy` on a CPU target, where host and device are one memory, against Gloo: to the byte."""

from __future__ import annotations

from typing import Any

import pytest

import memfit
from memfit import spec
from memfit.capture import check_trace
from memfit.memory import Timeline
from tests.distributed import offload_ranks, parallel_case
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def measured(two_ranks: Ranks) -> list[dict[str, list[Any]]]:
    return two_ranks.run(parallel_case.measure, offload_ranks.CASES)


@pytest.mark.parametrize("name", offload_ranks.CASES)
def test_peaks_are_those_of_every_rank_to_the_byte(name: str, measured: list[dict[str, list[Any]]]) -> None:
    case = offload_ranks.CASES[name]
    for rank, answer in enumerate(measured):
        trace = memfit.trace(case.step(case.build, spec), target="cpu", mesh=case.sizes, rank=rank)
        check_trace(trace)
        timeline = Timeline.of(trace, 1)
        # the two bounds are equal, unless the profiler missed a free on a thread of Gloo's in every one of the steps
        step = min(answer[name], key=lambda each: each["missing_bytes"])
        assert step["peak_bytes"][0] <= timeline.peak_bytes - timeline.start_bytes <= step["peak_bytes"][1], rank
