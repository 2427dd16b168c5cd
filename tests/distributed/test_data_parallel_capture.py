"""Steps in DistributedDataParallel and FSDP1, captured as they are, against real processes over Gloo: to the byte."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import memfit
from memfit import spec
from memfit.capture import Phase, Trace
from memfit.memory import Timeline
from memfit.plans import Plan
from tests.distributed import data_parallel_ranks
from tests.distributed.data_parallel_ranks import BATCHES, CASES, IN_CI, PLANNED, PLANNED_IN_CI
from tests.distributed.measured_steps import GAP, bounds_of, check_peak
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def captured(name: str) -> Trace:
    case = CASES[name]
    return memfit.trace(case.step(case.build, case.batch()), target="cpu", mesh=case.sizes)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.zoo) for name in CASES])
def test_peaks_are_those_of_every_rank_to_the_byte(name: str, request: pytest.FixtureRequest) -> None:
    count = math.prod(CASES[name].sizes.values())
    ranks: Ranks = request.getfixturevalue("two_ranks" if count == 2 else "four_ranks")
    ranks.begin(data_parallel_ranks.measure, name)
    trace = captured(name)
    timeline = Timeline.of(trace, 1)
    backward = next(index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
    forward_bytes = int(timeline.during_bytes[:backward].max()) - timeline.start_bytes
    measured = ranks.results()
    assert len(measured) == count
    for steps in measured:
        # the hook's casts are freed where the future of a collective is done: on a thread of Gloo, in most steps
        gap = 0.1 if CASES[name].options.get("hook") is not None else GAP
        check_peak(timeline.peak_bytes - timeline.start_bytes, bounds_of(steps), gap=gap)
        check_peak(forward_bytes, bounds_of(steps, "forward_peak_bytes"))


@pytest.mark.parametrize("names", [PLANNED_IN_CI, pytest.param(PLANNED, marks=pytest.mark.zoo)], ids=["some", "more"])
def test_plans_of_wrapped_steps_train_to_the_same_bits_within_their_budget(
    names: tuple[str, ...], two_ranks: Ranks, tmp_path: Path
) -> None:
    rows = 16
    files: dict[str, str] = {}
    plans: dict[str, Plan] = {}
    start_bytes: dict[str, int] = {}
    for name in names:
        case = CASES[name]
        shape, dtype = BATCHES[case.model]
        step = case.step(case.build, spec((rows, *shape[1:]), dtype))
        trace = memfit.trace(step, target="cpu", mesh=case.sizes)
        least = memfit.plan(trace, ranks=2, budget=1, progress=False).minimum_budget_bytes
        plan = memfit.plan(trace, ranks=2, budget=least, progress=False)
        assert plan.checkpoint and plan.predicted.peak_bytes < plan.baseline.peak_bytes
        files[name] = str(tmp_path / f"{len(files)}.json")
        plan.save(files[name])
        start_bytes[name], plans[name] = Timeline.of(trace, 1).start_bytes, plan
    for levels in two_ranks.run(data_parallel_ranks.train_planned, files, rows):
        for name, steps in levels.items():
            predicted = plans[name].predicted.peak_bytes
            assert predicted <= plans[name].budget_bytes
            check_peak(predicted - start_bytes[name], bounds_of(steps), name)
