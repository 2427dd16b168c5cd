"""A step is known again: before training and after, with its plan and without, warm and cold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step
from memfit.solve import SolveOptions


def squares(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


MAKERS = {
    "adamw": torch.optim.AdamW,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("name", MAKERS)
def test_training_does_not_change_it(name: str, target: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    optimizer = MAKERS[name](model.parameters())
    step = Step(model, torch.randn(4, 8), loss=squares, optimizer=optimizer)
    before = memfit.trace(step, target=target)
    for _ in range(3):
        step.execute(model, optimizer, "cpu")
    assert memfit.trace(step, target=target).fingerprint == before.fingerprint


def test_a_model_that_runs_a_plan_is_captured_as_without_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), nn.Linear(8, 8))
    step = Step(model, torch.randn(64, 8), loss=squares, optimizer=None)
    before = memfit.trace(step, target="cpu")
    plan = memfit.plan(before, budget="1GiB", options=SolveOptions(force=("0",)), progress=False)
    assert plan.checkpoint
    plan.apply(model)
    assert memfit.trace(step, target="cpu").fingerprint == before.fingerprint
    plan.check(step)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(x.size(-1), dtype=torch.float).sqrt()


class Scripted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scripted(super().forward(x))


def test_scripted_functions_run_the_same_ops_when_they_are_warm() -> None:
    step = Step(Scripted(8, 8), torch.randn(4, 8), loss=squares)
    before = memfit.trace(step, target="cpu").fingerprint
    assert {memfit.trace(step, target="cpu").fingerprint for _ in range(3)} == {before}
    for _ in range(4):  # the first real runs are watched, later ones optimized
        squares(step.model(step.batch), step.batch).backward()
    assert memfit.trace(step, target="cpu").fingerprint == before


def test_a_generator_of_the_steps_own_does_not_change_it() -> None:
    class Noisy(nn.Linear):
        generator: torch.Generator

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.rand(8, generator=self.generator)

    found = set()
    kept = []
    model = Noisy(8, 8)
    for _ in range(2):
        model.generator = torch.Generator()
        kept.append(model.generator)
        found.add(memfit.trace(Step(model, torch.randn(4, 8), loss=squares), target="cpu").fingerprint)
    assert len(found) == 1
