"""FSDP2 captured on a CPU target, against Gloo: to the byte.

With `CPUOffloadPolicy`, host and device are one memory here. Units with two inputs keep the gradient that comes first.
"""

from __future__ import annotations

from typing import Any

import pytest

import memfit
from memfit import spec
from memfit.capture import check_trace
from memfit.memory import Timeline
from tests.distributed import parallel_case
from tests.distributed.fsdp2_captured_cases import CASES
from tests.distributed.measured_steps import bounds_of, check_peak
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def measured(two_ranks: Ranks) -> list[dict[str, list[Any]]]:
    return two_ranks.run(parallel_case.measure, CASES)


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_those_of_every_rank_to_the_byte(name: str, measured: list[dict[str, list[Any]]]) -> None:
    case = CASES[name]
    for rank, answer in enumerate(measured):
        trace = memfit.trace(case.step(case.build, spec), target="cpu", mesh=case.sizes, rank=rank)
        check_trace(trace)
        timeline = Timeline.of(trace, 1)
        check_peak(timeline.peak_bytes - timeline.start_bytes, bounds_of(answer[name]), f"rank {rank}")
