"""Calls and ops that engines and captures count alike: without gradients, and tensors made of Python lists."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import nn

import memfit
from memfit.solve import SolveOptions
from memfit.verify.state import tensors_in

pytestmark = pytest.mark.usefixtures("frozen_heap")

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Recurrent(nn.Module):
    """Runs its blocks without gradients first, and trains the last rounds only."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for trains in (False, True, False, False, True):
            with torch.set_grad_enabled(trains):
                for block in self.blocks:
                    x = block(x)
        return x.square().mean()


class Chooses(Block):
    """Indexes with a Python list, of which torch makes a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x)).view(-1, 16, 8)
        return x + self.b((h * h[:, [-2]] + h[:, [3]]).flatten(1))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chooses() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("kind", [Recurrent, Stack])
@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_plan_is_run_as_it_was_made(kind: type[nn.Module], part: float) -> None:
    step = memfit.Step(kind(), X)
    tight = memfit.plan(step, target="cpu", budget="1B", progress=False)
    least, most = tight.minimum_budget_bytes, tight.baseline.peak_bytes
    assert least is not None and least < most
    plan = memfit.plan(step, target="cpu", budget=int(least + part * (most - least)), progress=False)
    assert plan.checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = plan.verify(step, time_tolerance=None)
    assert found.ok, found.findings
    assert found.peak.difference_bytes == 0
    assert found.exactness is not None and found.exactness.equal


def test_blocks_that_are_replicated_count_their_calls_as_the_one_that_ran() -> None:
    trace = memfit.trace(memfit.Step(Recurrent(12), X), target="cpu")
    assert {f"blocks.{number}" for number in range(12)} <= set(trace.no_grad_calls)
    assert set(trace.no_grad_calls.values()) == {(0, 2, 3)}


class ScoresTwice(nn.Module):
    """Calls its head without gradients before the call that its loss is of."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(32, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.head(x).mean().abs() + 1
        logits = self.head(self.block(x)) / scale
        return logits.float().log_softmax(-1).exp().square().mean()


def test_a_loss_inside_of_a_model_begins_after_the_call_that_the_plan_means() -> None:
    step = memfit.Step(ScoresTwice(), X)
    options = SolveOptions(force=("<loss>",), decide=())
    plan = memfit.plan(step, target="cpu", options=options, progress=False)
    (entry,) = (each for each in plan.checkpoint if each.unit == "<loss>")
    assert (entry.after, entry.after_call) == ("head", 1)
    found = plan.verify(step, time_tolerance=None)
    assert found.ok, found.findings
    assert found.peak.difference_bytes == 0


def test_a_call_without_gradients_is_none_of_those_that_a_plan_counts() -> None:
    trace = memfit.trace(memfit.Step(Recurrent(), X), target="cpu")
    assert trace.no_grad_calls["blocks.0"] == (0, 2, 3)
    assert "" not in trace.no_grad_calls, "the model itself runs with gradients only"
    plan = memfit.plan(trace, budget="1B", progress=False)
    plan = memfit.plan(trace, budget=plan.minimum_budget_bytes, progress=False)
    assert {(entry.call, entry.calls) for entry in plan.checkpoint if entry.module == "blocks.0"} <= {(0, 2), (1, 2)}


@dataclasses.dataclass
class Guarded:
    """Refuses to be asked for one of its fields, as configurations of transformers do."""

    shown: torch.Tensor
    hidden: int = 1

    def __getattribute__(self, name: str) -> object:
        if name == "hidden":
            raise RuntimeError("ask for it in another way")
        return super().__getattribute__(name)


@dataclasses.dataclass(init=False)
class Lazy:
    """Has its field behind `__getattr__`, as tensordict's classes do."""

    shown: torch.Tensor

    def __getattr__(self, name: str) -> object:
        if name == "shown":
            return X
        raise AttributeError(name)


def test_an_argument_that_refuses_one_of_its_fields_is_looked_through() -> None:
    assert len(tensors_in(Guarded(X))) == len(tensors_in(Lazy())) == 1

    class Takes(Block):
        def forward(self, x: torch.Tensor, config: Guarded) -> torch.Tensor:
            return super().forward(x) * config.shown.mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Takes()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x, Guarded(x)).square().mean()

    assert memfit.trace(memfit.Step(Model(), X), target="cpu").ops
