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


def interrupted(batch: int = 256) -> Step:
    """Ctrl-C, as soon as the batch is large."""
    if batch >= 256:
        raise KeyboardInterrupt
    return step(batch)


class Counting(Block):
    """Computes something else whenever it is run again."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def counting() -> Step:
    torch.manual_seed(0)
    stack = Stack()
    stack.layers = nn.ModuleList(Counting(32) for _ in stack.layers)
    return Step(stack, torch.randn(256, 32))


def needs_seq(seq: int, batch: int = 8) -> Step:
    return Step(Stack(), torch.randn(batch, seq, 32))


def frozen(batch: int = 8) -> Step:
    return Step(Stack().requires_grad_(False), torch.randn(batch, 32), optimizer=None)


def nothing(batch: int = 8) -> None:
    return None


def raises(batch: int = 8) -> Step:
    return _read("nowhere")


def _read(name: str) -> Step:
    raise RuntimeError("the file is empty")


class Asserts(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == 7, "the width must be 7"
        return super().forward(x)


def asserts(batch: int = 8) -> Step:
    return Step(nn.Sequential(Asserts(16)), torch.zeros(batch, 16), loss=lambda output, _: output.sum())


number = 3
