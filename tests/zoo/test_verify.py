"""Plans of real models on the real models: the same gradients bit for bit, peaks as predicted and within the budget."""

from __future__ import annotations

import warnings

import pytest
import torch

import memfit
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.solve import Problem, minimum_budget_bytes
from tests.zoo.zoo_models import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("frozen_heap")]

SLICE = {"llama", "resnet"}
PARTS = (0, 1 / 3, 2 / 3)
"""Budgets, as parts of the way from the smallest that can be met to the baseline."""

LARGEST_ERROR = 0.01
"""Of the predicted peak of any plan; conftest.py has the bound of the median of all."""


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.zoo_slice] if name in SLICE else []) for name in STEPS]
)
def test_plans_hold_on_the_real_model(name: str, record_property) -> None:
    torch.manual_seed(0)
    step = STEPS[name]()
    step.build_model().train()
    rows, wrong = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = memfit.trace(step, target="cpu")
        problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("cpu"))
        low, high = minimum_budget_bytes(problem), problem.baseline_bytes
        assert low is not None
        for part in PARTS:
            budget = low + int((high - low) * part)
            plan = memfit.plan(trace, budget=budget, progress=False)
            found = plan.verify(step, steps=1, time_tolerance=None)
            exactness = found.exactness
            assert exactness is not None, found.skipped
            row = {
                "name": name,
                "part": part,
                "units": len(plan.checkpoint),
                "predicted_bytes": found.peak.predicted_bytes,
                "measured_bytes": found.peak.measured_bytes,
                "budget_bytes": budget,
                "equal": exactness.equal,
            }
            rows.append(row)
            if not (exactness.equal and found.within_budget and abs(found.peak.error) <= LARGEST_ERROR):
                wrong.append(f"{part:.2f}: {'; '.join(found.findings)}")
    record_property("verified", rows)
    assert not wrong, f"{name}: " + "\n".join(wrong)
