"""The largest batch that a search finds is the one that really training under a memory limit finds; one more fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import memfit
from memfit.capture import Step
from tests.zoo import zoo_models
from tests.zoo.zoo_models import STEPS

pytestmark = [pytest.mark.zoo, pytest.mark.usefixtures("frozen_heap")]

SLICE = "gpt2"
FITS_AS_IT_IS = 3
"""The batch size whose peak without a plan is the limit, so that larger ones need one."""


@pytest.fixture(autouse=True)
def sizes_as_before() -> Iterator[None]:
    before = zoo_models.BATCH, zoo_models.LENGTH
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    zoo_models.resize(batch=before[0], length=before[1])


def step_of(name: str, batch: int) -> Step:
    torch.manual_seed(0)
    zoo_models.resize(batch=batch, length=96)
    step = STEPS[name]()
    step.build_model().train()
    return step


def trained_within(name: str, batch: int, limit_bytes: int) -> bool:
    """Train a real step with the plan for the limit, or with the lowest there is, and look at the allocator's peak."""
    step = step_of(name, batch)
    plan = memfit.plan(step, target="cpu", budget=limit_bytes, progress=False)
    if plan.status == "infeasible":
        plan = memfit.plan(step, target="cpu", budget=plan.minimum_budget_bytes, progress=False)
    return plan.verify(step, steps=1, time_tolerance=None).peak.measured_bytes <= limit_bytes


@pytest.mark.parametrize("name", [pytest.param(SLICE, marks=pytest.mark.zoo_slice), "llama", "vit"])
def test_the_largest_batch_is_that_of_really_trying(name: str, record_property) -> None:
    limit_bytes = memfit.plan(step_of(name, FITS_AS_IT_IS), target="cpu", progress=False).baseline.peak_bytes
    found = memfit.search(lambda batch: step_of(name, batch), target="cpu", budget=limit_bytes, progress=False)
    assert found.largest is not None and found.exact
    largest = found.largest.value
    record_property(
        "search", {"name": name, "limit_bytes": limit_bytes, "largest": largest, "captured": found.captured}
    )
    assert largest > FITS_AS_IT_IS, "no plan was needed"
    first = largest if name == SLICE else 1
    assert all(trained_within(name, batch, limit_bytes) for batch in range(first, largest + 1))
    assert not trained_within(name, largest + 1, limit_bytes)
