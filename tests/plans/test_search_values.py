"""Many given values are compared by bounds (Note [Bounds]), with the answers of planning each of them by itself."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step
from memfit.plans import Search, search
from tests.plans.test_searching import H100, Model, loss

pytestmark = pytest.mark.slow


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.GELU())
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(images).mean((2, 3)))


def of_tokens(batch: int) -> Step:
    return Step(functools.partial(Model, layers=3), memfit.spec((batch, 256), torch.int64), loss=loss)


def of_images(batch: int) -> Step:
    images = memfit.spec((batch, 3, 64, 64))
    return Step(Images, images, loss=lambda output, _: output.square().mean(), optimizer=torch.optim.SGD)


def of_length(seq: int) -> Step:
    return Step(Model, memfit.spec((4, seq), torch.int64), loss=loss)


def check_answers(make: Callable[[int], Step], found: Search, values: range, budget: str | None) -> None:
    """Compare a search with plans of all its values."""
    plans = {value: memfit.plan(make(value), target=H100, budget=budget) for value in values}
    fit = {value: plan.predicted for value, plan in plans.items() if plan.predicted is not None}
    assert found.largest is not None and found.largest.value == max(fit)
    rates = {value: value / predicted.step_ms for value, predicted in fit.items() if predicted.room == "enough"}
    rates = rates or {value: value / predicted.step_ms for value, predicted in fit.items()}
    assert found.best is not None and rates[found.best.value] >= max(rates.values()) * (1 - 1e-9)
    for point in found.points:
        plan = plans[point.value]
        assert point.fits == (plan.predicted is not None)
        assert point.baseline_peak_bytes == plan.baseline.peak_bytes
        if point.status == "slower":
            assert plan.predicted is not None and point.least_step_ms is not None
            assert point.least_step_ms <= plan.predicted.step_ms * (1 + 1e-9)
            assert rates.get(point.value, 0.0) <= rates[found.best.value]
        elif plan.predicted is not None:
            assert point.step_ms == pytest.approx(plan.predicted.step_ms, rel=1e-6)
            assert point.peak_bytes == plan.predicted.peak_bytes


@pytest.mark.parametrize(
    ("make", "values", "budget"),
    [
        (of_tokens, range(2, 34, 3), "170MiB"),
        (of_tokens, range(2, 14), "4GiB"),
        (of_tokens, range(2000, 20000, 2000), None),
        (of_images, range(16, 208, 16), "40MiB"),
    ],
)
def test_answers_are_those_of_planning_every_value(
    make: Callable[[int], Step], values: range, budget: str | None
) -> None:
    found = search(make, target=H100, budget=budget, values=values)
    check_answers(make, found, values, budget)
    assert found.captured <= 4


def test_the_longest_of_many_given_sequences_is_that_of_planning_every_one() -> None:
    values = range(128, 1537, 128)
    found = search(of_length, over="seq", target=H100, budget="150MiB", values=values)
    check_answers(of_length, found, values, "150MiB")


def test_values_that_cannot_be_the_best_get_bounds_and_no_plan() -> None:
    found = search(of_tokens, target=H100, budget="170MiB", values=range(2, 34))
    slower = [point for point in found.points if point.status == "slower"]
    assert slower and all(point.step_ms is None and point.peak_bytes is None for point in slower)
    assert found.best is not None and found.best.throughput_per_s is not None
    assert all((point.most_per_s or 0.0) <= found.best.throughput_per_s for point in slower)
    shown = " ".join(str(found).split())
    assert "bounds of values that cannot be the best" in shown and "<= " in shown
    assert found.largest_without_care is not None and found.largest_without_care.status != "slower"
