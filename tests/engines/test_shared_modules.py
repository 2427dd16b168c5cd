"""A module that several others hold: its calls are told apart under a plan, whichever path they take."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memfit
from memfit.solve import SolveOptions
from tests.engines.engine_cases import plan_for

pytestmark = pytest.mark.usefixtures("frozen_heap")

X = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, activation: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.activation(self.a(self.norm(x))))


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * torch.tanh(x)


class Shared(nn.Module):
    """All blocks hold the same activation and the same norm."""

    def __init__(self) -> None:
        super().__init__()
        activation, norm = Gate(), nn.LayerNorm(16)
        self.blocks = nn.ModuleList(Block(activation, norm) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Siamese(nn.Module):
    """Two branches hold the same encoder; one of them runs it twice."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.Sequential(*(Block(Gate(), nn.LayerNorm(16)) for _ in range(3)))
        self.left = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(16, 8)})
        self.right = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(16, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.left["head"](self.left["encoder"](x))
        right = self.right["head"](self.right["encoder"](self.right["encoder"](x * 2)))
        return (left - right).square().mean()


def train(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for number in range(3):
        torch.manual_seed(number)
        model(X).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("kind", [Shared, Siamese])
def test_a_plan_of_the_planners_own_is_applied_and_exact(kind: type[nn.Module], part: float) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    plan = plan_for(memfit.Step(model, X, optimizer=None), part)
    assert plan.checkpoint
    plan.apply(model)
    assert all(map(torch.equal, train(plain), train(model)))
    plan.remove(model)


@pytest.mark.filterwarnings("error")
def test_each_call_of_a_shared_module_has_a_policy_of_its_own() -> None:
    model = Shared()
    names = ("blocks.1.activation", "blocks.3.activation")
    others = tuple(f"blocks.{number}" for number in range(4))
    options = SolveOptions(force=names, forbid=(*others, "", "blocks.0.activation", "blocks.2.activation"))
    plan = plan_for(memfit.Step(model, X, optimizer=None), 0.5, options)
    assert {entry.module: (entry.call, entry.calls) for entry in plan.checkpoint if entry.module in names} == {
        "blocks.1.activation": (1, 4),
        "blocks.3.activation": (3, 4),
    }
    check = plan.verify(memfit.Step(model, X, optimizer=None), time_tolerance=None)
    assert check.ok, str(check)
