"""Models that are trained as they were planned: nothing is said of them."""

from __future__ import annotations

import warnings

import pytest
import torch

import memfit
from memfit.errors import PlanDrift
from tests.zoo.zoo_models import STEPS

_SLICE = ("gpt2", "mlp")


def quiet(name: str) -> None:
    torch.manual_seed(0)
    step = STEPS[name]()
    model = step.build_model()
    optimizer = step.build_optimizer(model)
    trace = memfit.trace(step, target="cpu")
    least = memfit.plan(trace, budget="1B", progress=False).minimum_budget_bytes
    assert least is not None
    plan = memfit.plan(trace, budget=max(least, int(0.8 * memfit.memory.Timeline.of(trace).peak_bytes)), progress=False)
    plan.apply(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanDrift)
        for _ in range(3):
            step.execute(model, optimizer, "cpu")
    plan.remove(model)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in STEPS if name not in _SLICE])
def test_a_loop_as_planned_is_not_warned_of(name: str) -> None:
    quiet(name)


@pytest.mark.parametrize("name", _SLICE)
def test_a_slice_of_loops_as_planned_is_not_warned_of(name: str) -> None:
    quiet(name)
