"""What a step does about its memory by itself is told, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture import Step


class Checkpointed(nn.Module):
    """Blocks, or a function without modules, checkpointed by the model itself."""

    def __init__(self, reentrant: bool | None, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(blocks))
        self.weight = nn.Parameter(torch.ones(8))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.sum()


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.ModuleDict({"last": Function()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner["last"](self.first(x))


class Function(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: y.sigmoid().exp(), x, use_reentrant=False).sum()


def notes(model: nn.Module) -> list[str]:
    return [note for note in memfit.trace(Step(model, torch.ones(2, 8)), target="cpu").notes if "checkpoints" in note]


@pytest.mark.parametrize(
    ("make", "modules"),
    [
        (lambda: Checkpointed(reentrant=False), "modules blocks.0-2"),
        (lambda: Checkpointed(reentrant=True), "modules blocks.0-2"),
        (lambda: Checkpointed(reentrant=False, blocks=1), "module blocks.0"),
        (Within, "module inner.last"),
        (Function, None),
    ],
)
def test_a_model_that_checkpoints_itself_is_told_to_leave_it(
    make: Callable[[], nn.Module], modules: str | None
) -> None:
    model = make() if modules is not None else nn.Sequential(nn.Linear(8, 8), Function())
    (note,) = notes(model)
    assert f"checkpoints {modules or 'module 1'} by itself (torch.utils.checkpoint)" in note
    assert "turn that off" in note and "gradient_checkpointing_disable()" in note


def test_a_plain_model_is_told_nothing() -> None:
    assert not notes(Checkpointed(reentrant=None))


def test_plans_say_it_too() -> None:
    plan = memfit.plan(Checkpointed(reentrant=False), torch.ones(2, 8), target="cpu", progress=False)
    assert "checkpoints modules blocks.0-2 by itself" in " ".join(str(plan).split())


@pytest.mark.parametrize("retain", [True, False])
def test_a_backward_that_keeps_its_graph_is_told_what_that_holds(retain: bool) -> None:
    model, batch = nn.Linear(8, 8), torch.ones(2, 8)

    def train() -> None:
        model(batch).sigmoid().sum().backward(retain_graph=retain)

    found = [note for note in memfit.trace(train, target="cpu").notes if "retain_graph=True" in note]
    assert len(found) == retain
    assert all("test_advice.py" in note and "leave it out" in note for note in found)
