"""Steps to verify, and plans for them with a budget between the smallest that works and the baseline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import memfit
from memfit.capture import Step
from memfit.plans import Plan


class Block(nn.Module):
    """A feed-forward block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.nn.functional.gelu(self.up(x))))


class Stack(nn.Module):
    """Blocks, a head and the loss."""

    def __init__(self, kind: type[nn.Module] = Block, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


class Counting(Block):
    """Gives something else each time it is called."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x * (1 + self.calls / 8))


_count = [0]


class Forgetful(Block):
    """Gives something else each time, and nobody can put it back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _count[0] += 1
        return super().forward(x * torch.tensor(1 + _count[0] / 8))


class Hoarding(Block):
    """Holds memory that is not there while ops are being looked at, as in a capture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        if _get_current_dispatch_mode() is None:
            self.hoard = torch.empty(1 << 16)
        return found


class Failing(Block):
    """Fails in a call that is to come."""

    fails_in = 10**6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _get_current_dispatch_mode() is None:
            Failing.fails_in -= 1
        if Failing.fails_in < 0:
            raise ZeroDivisionError("this block fails")
        return super().forward(x)


def find_step(kind: type[nn.Module] = Block, **options: Any) -> Step:
    torch.manual_seed(0)
    batch = (torch.randn(64, 32), torch.randint(0, 10, (64,)))
    return Step(Stack(kind), batch, **options)


def planned(step: Step, part: float = 0.0) -> Plan:
    """A plan for a budget so far between the smallest and the baseline."""
    trace = memfit.trace(step, target="cpu")
    least = memfit.plan(trace, budget="1B", progress=False)
    assert least.minimum_budget_bytes is not None
    low, high = least.minimum_budget_bytes, least.baseline.peak_bytes
    return memfit.plan(trace, budget=low + int((high - low) * part), progress=False)
