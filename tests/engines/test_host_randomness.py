"""A recomputed forward draws the same numbers from Python, from numpy and from generators that modules hold."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.capture.random_numbers import host_state, set_host_state
from memfit.solve import SolveOptions
from tests.engines.engine_cases import plan_for

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
RNG = np.random.default_rng(5)


class Block(nn.Module):
    """Scales what it returns, before the last saved tensor, with a number that a function draws."""

    of_class: ClassVar[list[np.random.Generator]] = [np.random.default_rng(4)]

    def __init__(self, draw: Callable[[Block], float]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)
        self.draw = draw
        self.random = random.Random(3)
        self.generator = np.random.default_rng(3)
        self.generators = {"state": np.random.RandomState(3), "torch": torch.Generator().manual_seed(3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.sigmoid(self.a(x * self.draw(self))))


class Blocks(nn.Module):
    def __init__(self, draw: Callable[[Block], float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(draw) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def sometimes(_: Block) -> float:
    return random.random() if random.random() < 0.5 else 0.5


def normal_numbers(_: Block) -> float:
    return float(np.random.randn()) if np.random.rand() < 0.7 else 1.0


DRAWS: dict[str, Callable[[Block], float]] = {
    "random.random": lambda _: random.random(),
    "random.gauss": lambda _: random.gauss(1.0, 0.1),
    "sometimes": sometimes,
    "np.random.rand": lambda _: float(np.random.rand()),
    "np.random.randn": normal_numbers,
    "a Random of its own": lambda block: block.random.random(),
    "a Generator of its own": lambda block: float(block.generator.random()),
    "a RandomState of its own": lambda block: float(block.generators["state"].randn()),
    "a torch.Generator of its own": lambda block: torch.rand((), generator=block.generators["torch"]).item(),
    "a Generator of the file": lambda _: float(RNG.random()),
    "a Generator of the class": lambda block: float(block.of_class[0].random()),
}


def train(model: nn.Module) -> list[Any]:
    """Run some steps; return gradients, and numbers that are drawn after each."""
    random.seed(7)
    np.random.seed(7)
    for generator in (RNG, *Block.of_class):
        generator.bit_generator.state = np.random.default_rng(7).bit_generator.state
    found: list[Any] = []
    for number in range(4):
        torch.manual_seed(number)
        model(X).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        found += [torch.tensor([random.random(), np.random.rand(), np.random.randn(), RNG.random()])]
        model.zero_grad()
    return found


@pytest.mark.parametrize("name", DRAWS)
def test_gradients_of_a_recomputed_unit_are_those_without_a_plan(name: str) -> None:
    model = Blocks(DRAWS[name])
    plain = copy.deepcopy(model)
    step = memfit.Step(model, X, optimizer=None)
    plan = plan_for(step, 0.0, SolveOptions(force=("blocks.0", "blocks.1", "blocks.2")))
    assert {entry.module for entry in plan.checkpoint} >= {"blocks.0", "blocks.1"}
    plan.apply(model)
    assert all(map(torch.equal, train(plain), train(model)))


def test_a_capture_leaves_generators_of_the_model_as_they_were() -> None:
    for draw in DRAWS.values():
        model = Blocks(draw)
        alike = copy.deepcopy(model)
        memfit.trace(memfit.Step(model, X, optimizer=None), target="cpu")
        block, other = model.blocks[0], alike.blocks[0]
        assert block.random.random() == other.random.random()
        assert block.generator.random() == other.generator.random()
        assert block.generators["state"].randn() == other.generators["state"].randn()
        first, second = (each.generators["torch"] for each in (block, other))
        assert torch.equal(torch.rand(3, generator=first), torch.rand(3, generator=second))


def test_numpys_state_is_put_back_also_when_it_keeps_a_second_normal_number() -> None:
    for draws in range(4):
        np.random.seed(0)
        for _ in range(draws):
            np.random.randn()
        state = host_state()
        expected = [np.random.randn() for _ in range(3)]
        set_host_state(state)
        assert [np.random.randn() for _ in range(3)] == expected
        np.random.randn()
        host_state()
        set_host_state(state)
        assert [np.random.randn() for _ in range(3)] == expected
