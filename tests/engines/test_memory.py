"""The measured peak of a planned step is the predicted one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step, Trace
from memfit.cost import Runtime
from memfit.hardware import Target
from memfit.solve import Problem, minimum_budget_bytes
from tests.engines.test_exact import Blocks, Remembers, squares

pytestmark = pytest.mark.usefixtures("frozen_heap")


class Flops:
    """Times that make products dear and all else cheap, so that plans save products."""

    def op_ms(self, trace: Trace) -> Any:
        return np.array([op.flops / 1e9 + 1e-6 for op in trace.ops])


class Attends(nn.Module):
    """Attention as plain ops, with a mask that is added in place: torch does so, but not under a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return x + self.out(y.transpose(1, 2).flatten(2))


STEPS = {
    "blocks": lambda: Step(Blocks(), torch.randn(64, 16), loss=squares),
    "a cache": lambda: Step(Remembers(), torch.randn(2, 32, 16), loss=squares),
    "attention": lambda: Step(Attends(), torch.randn(2, 48, 32), loss=squares),
}


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("name", STEPS)
def test_the_measured_peak_is_the_predicted_one(name: str, part: float) -> None:
    torch.manual_seed(0)
    step = STEPS[name]()
    trace = memfit.trace(step, target="cpu")
    problem = Problem.of(Runtime.of(trace, Flops()), Target.parse("cpu"))
    least = minimum_budget_bytes(problem)
    assert least is not None
    budget = least + int((problem.baseline_bytes - least) * part)
    plan = memfit.plan(trace, budget=budget, cost=Flops(), progress=False)
    assert plan.checkpoint
    checked = plan.verify(step, steps=1, time_tolerance=None)
    assert checked.exactness.equal
    assert abs(checked.peak.measured_bytes - checked.peak.predicted_bytes) <= 64
    assert checked.peak.measured_bytes <= budget
