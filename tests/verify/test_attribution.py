"""What fills a measured peak, where torch does not allocate what was captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.solve import SolveOptions

pytestmark = pytest.mark.usefixtures("frozen_heap")


class Channels(nn.Module):
    """Layers on an input that is not contiguous, where torch adds the bias in place unless its ops are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x.transpose(1, 2)).square()
        return self.other(y.transpose(0, 1)).square().sum()


class Two(nn.Module):
    """Two of them, each with a batch of its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Channels(), Channels()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(torch.cat((x, x)))


@pytest.mark.parametrize("force", [(), ("first",)])
def test_a_bias_that_is_added_in_place_changes_no_category(force: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    step = memfit.Step(Two(), torch.randn(4, 64, 128), optimizer=torch.optim.SGD)
    trace = memfit.trace(step, target="cpu")
    assert sum(op.name == "aten.add_.Tensor" for op in trace.ops) >= 4, "the bias is captured as an op of its own"
    plan = memfit.plan(trace, options=SolveOptions(force=force), progress=False)
    found = plan.verify(step, steps=1, time_tolerance=None)
    assert found.peak is not None and found.peak.difference_bytes == 0
    assert [each for each in (*found.by_category, *found.by_module) if each.difference_bytes] == []
