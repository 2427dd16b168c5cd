"""Small models, each with one property that module statistics must get right."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.act = nn.GELU()
        self.down = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(x).chunk(3, dim=-1)
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        return self.out(weights @ value)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(16)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(16)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Prefixes(nn.Module):
    """`a.b` and `aa.b`: each name is a part of the other's text, and neither module is inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential()
        self.a.add_module("b", MLP())
        self.aa = nn.Sequential()
        self.aa.add_module("a", nn.Sequential())
        self.aa.a.add_module("b", MLP())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.aa(self.a(x))


class Twice(nn.Module):
    """One block called twice, with a layer between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block = MLP()
        self.between = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.between(self.block(x)))


class Frozen(nn.Module):
    """The first layer is frozen, so the second one's input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MLP().requires_grad_(False)
        self.second = MLP()
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


class Tied(nn.Module):
    """The last layer has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.middle = MLP()
        self.last = nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Half(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(16, 16)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.own(x))


class Shared(nn.Module):
    """Two halves with one module inside both."""

    def __init__(self) -> None:
        super().__init__()
        inner = MLP()
        self.left = Half(inner)
        self.right = Half(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


class ManyWeights(nn.Module):
    """One module that owns two weights, so that its peak comes when the first one's gradient is done."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(16, 2048))
        self.large = nn.Parameter(torch.ones(2048, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.small).relu() @ self.large


class Opaque:
    """A result that nothing looks into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def sum(self) -> torch.Tensor:
        return self.value.sum()


class ReturnsOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()

    def forward(self, x: torch.Tensor) -> Opaque:
        return Opaque(self.inner(x))


class WithIdentity(nn.Module):
    """A module that runs no op, and one that runs only where no gradient is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.ReLU()
        self.first = MLP()
        self.nothing = nn.Identity()
        self.second = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.nothing(self.first(self.scale(x))))


Model = Callable[[], nn.Module]
SHAPE = (4, 8, 16)
BYTES = 4 * math.prod(SHAPE)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Forward, backward, optimizer step and zero_grad, as both sides run it."""
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
