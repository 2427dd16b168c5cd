"""Trainer, Lightning, accelerate and a plain loop: within the budget in every step, the same bits as without a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memfit
from memfit.errors import PlanDrift
from memfit.plans import Plan
from tests.integrations import training_loops
from tests.integrations.training_loops import ACCUMULATE, EPOCHS, STEPS_IN_EPOCH, Training

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("frozen_heap")]

_SCALARS_BYTES = 1024
"""Losses and counters that libraries keep, beside the step."""

LOOPS: dict[str, tuple[Callable[..., Training], dict[str, Any], bool]] = {
    "plain": (training_loops.train_plain, {}, True),
    "accelerate": (training_loops.train_accelerate, {"resident_batches": 2}, True),
    "transformers": (
        training_loops.train_transformers,
        {"keep_output": False, "clip_grad_norm": 1.0, "resident_batches": ACCUMULATE + 1},
        False,
    ),
    "lightning": (training_loops.train_lightning, {"keep_output": False, "zero_grad": "before_backward"}, False),
}
"""Each with the Step that docs/apply.md gives for it, and whether apply gets the optimizer."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plan_for(part: float, **options: Any) -> Plan:
    """A plan between the smallest budget that can be met (0) and the one that needs nothing (1)."""
    trace = memfit.trace(training_loops.step(**options), target="cpu")
    least = memfit.plan(trace, budget="1B", progress=False)
    assert least.minimum_budget_bytes is not None
    low, high = least.minimum_budget_bytes, least.baseline.peak_bytes
    return memfit.plan(trace, budget=low + int((high - low) * part), progress=False)


def compare(name: str, part: float) -> None:
    train, options, gives_optimizer = LOOPS[name]
    plan = plan_for(part, **options)
    assert plan.checkpoint

    def prepare(model: torch.nn.Module, optimizer: Any) -> None:
        plan.apply(model, optimizer if gives_optimizer else None)

    plain = train(training_loops.build(), lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned = train(training_loops.build(), prepare)
    told = [str(each.message) for each in caught if issubclass(each.category, PlanDrift)]
    assert all("of 4 micro-batches" in each for each in told), "only the incomplete window is no part of the plan"
    assert len(planned.peaks_bytes) == EPOCHS * STEPS_IN_EPOCH
    assert max(planned.peaks_bytes) <= plan.budget_bytes + _SCALARS_BYTES, planned.peaks_bytes
    assert max(plain.peaks_bytes) > plan.budget_bytes, "without the plan it would not have been within the budget"
    assert planned.losses == plain.losses
    assert all(torch.equal(planned.parameters[key], value) for key, value in plain.parameters.items())


@pytest.mark.zoo
@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("name", LOOPS)
def test_every_step_is_within_the_budget_and_the_same(name: str, part: float) -> None:
    compare(name, part)


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_a_slice_of_loops_within_the_budget(name: str) -> None:
    compare(name, 0.5)


@pytest.mark.zoo
def test_a_loop_that_was_not_planned_is_told_what_it_costs() -> None:
    """Lightning's zero_grad between forward and backward, under the step of a plain loop."""
    plan = plan_for(0.5, keep_output=False)
    model = training_loops.build()
    with pytest.warns(PlanDrift, match="gradients of the step before are there while forward runs") as caught:
        training_loops.train_lightning(model, lambda model, _: plan.apply(model))
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    (found,) = [each for each in caught if "gradients of the step before" in str(each.message)]
    assert memfit.units.display_bytes(size) in str(found.message)
    assert found.filename == training_loops.__file__
