"""A step that is quick to plan and can be run, as a user's file has it."""

from __future__ import annotations

import torch
from torch import nn

from memfit import Step

BUDGET = "1000KiB"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def step(batch: int = 256) -> Step:
    torch.manual_seed(0)
    return Step(Stack(), torch.randn(batch, 32))


def nothing() -> None:
    return None


def raises() -> Step:
    return _read("nowhere")


def _read(name: str) -> Step:
    raise RuntimeError("the file is empty")


number = 3
