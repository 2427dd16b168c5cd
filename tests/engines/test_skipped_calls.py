"""Calls that a unit skips now and then (LayerDrop), and caches that its first call fills, do not end its plan."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture import Step
from memfit.engines.recompute import RecomputedCall
from memfit.solve import SolveOptions
from tests.engines.engine_cases import plan_for

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)
        self.cache: torch.Tensor | None = torch.ones(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.skips:
            return x
        if self.cache is None:
            self.cache = torch.arange(64).mul(0).add(1).float()
        return x + self.b(torch.tanh(self.a(x) * self.cache))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each run under a recipe went as that says."""
    found: list[bool] = []
    first = RecomputedCall.run_forward

    def noted(self: Any, *args: Any) -> Any:
        result, same = first(self, *args)
        found.append(same)
        return result, same

    monkeypatch.setattr(RecomputedCall, "run_forward", noted)
    return found


def step(model: nn.Module) -> list[torch.Tensor | None]:
    model.zero_grad()
    model(X).backward()
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def equal(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("skipped", [(0,), (0, 1), (2, 3), (1, 4, 5, 7)])
def test_skipped_calls_run_whole_and_the_others_as_planned(skipped: tuple[int, ...], planned: list[bool]) -> None:
    plan = plan_for(Step(Blocks(), X), options=SolveOptions(force=("blocks.1",)))
    model = Blocks()
    plain = copy.deepcopy(model)
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not run as planned.*")
        for number in range(12):
            for each in (model, plain):
                each.blocks[1].skips = number in skipped
            before = len(planned)
            assert equal(step(model), step(plain))
            if number > 9:
                assert planned[before:] and all(planned[before:])


def test_a_cache_that_the_first_call_fills_is_not_for_good(planned: list[bool]) -> None:
    plan = plan_for(Step(Blocks(), X), options=SolveOptions(force=("blocks.0", "blocks.1")))
    model, plain = Blocks(), Blocks()
    for each in (model, plain):
        for block in each.blocks:
            block.cache = None
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            assert equal(step(model), step(plain))
    assert planned[-2:] == [True, True]
