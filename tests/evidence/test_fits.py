"""A plan that says it fits runs four steps at the limit of what a rank has; `make evidence` holds more plans to it."""

from __future__ import annotations

import pytest

from memfit.analysis import Report
from memfit.hardware import Target
from tests.evidence.fits import PLANS, README, STEPS, Asked, outcome_of, run_at

pytestmark = pytest.mark.slow

SLICE = (README, Asked(shape="gpt2", target="rtx-3090", ranks=2, batch=16), Asked(shape="gpt2", target="t4", batch=8))


@pytest.mark.parametrize("asked", SLICE, ids=lambda each: each.name)
def test_a_plan_that_says_it_fits_neither_fails_nor_empties_its_cache(asked: Asked) -> None:
    found = outcome_of(asked)
    assert found.says_fits and found.fits and len(found.emptied) == STEPS
    assert found.needed_bytes <= found.plan.target.memory_total_bytes
    assert found.plan.predicted is not None
    assert found.reserved_bytes <= found.plan.predicted.peak_reserved_bytes


def test_the_same_steps_do_not_run_on_less() -> None:
    """The trial can fail: with no more than the tensors need, a cache is emptied or an allocation fails."""
    found = outcome_of(SLICE[1])
    report = Report(problem=found.problem, plan=found.plan)
    assert report.planned is not None and found.plan.predicted is not None
    target = Target.parse(found.asked.target, ranks=found.asked.ranks)
    _, _, failed_step = run_at(report.planned, target, int(found.plan.predicted.peak_bytes * 0.9))
    assert failed_step is not None
    _, emptied, failed_step = run_at(report.planned, target, found.plan.predicted.peak_bytes)
    assert failed_step is not None or any(emptied)


def test_the_plans_are_of_many_shapes() -> None:
    assert len(PLANS) - 5 >= 20 and len({each.shape for each in PLANS}) >= 15
