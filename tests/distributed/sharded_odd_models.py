"""Models and calls that once failed late, or in silence: each function runs on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.optim import _apply_optimizer_in_backward

from memfit.errors import InputError, StateError
from memfit.sharded import full_parameters, full_state_dict, load_state_dict, shard
from tests.distributed.sharded_behaviour import loss_of
from tests.distributed.sharded_models import GPT
from tests.distributed.sharded_recipes import adamw, assert_same, built, by_memfit, train, whole


def replacements_are_written_back() -> None:
    """What is put in the place of a parameter, or of its data, in `full_parameters` is kept; the wrong shape is not."""
    model = built(by_memfit)
    before = whole(model)
    with full_parameters(model, write_back=True):
        model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
        model.blocks[0].up.weight.data = model.blocks[0].up.weight.data * 3
        model.load_state_dict({"blocks.1.up.bias": torch.full_like(model.blocks[1].up.bias, 5.0)}, False, assign=True)
    wanted = {name: value.clone() for name, value in before.items()}
    shared = [name for name in wanted if name in ("head.weight", "embedding.weight")]
    for name in (
        shared if torch.equal(before["embedding.weight"], before.get("head.weight", before["embedding.weight"])) else []
    ):
        wanted[name] = before[name] * 2
    if "head.weight" in wanted:
        wanted["head.weight"] = before["head.weight"] * 2
    wanted["blocks.0.up.weight"] = before["blocks.0.up.weight"] * 3
    wanted["blocks.1.up.bias"] = torch.full_like(before["blocks.1.up.bias"], 5.0)
    assert_same(whole(model), wanted)
    with pytest.raises(StateError, match="nothing was written"):
        _replace_wrongly(model)
    assert_same(whole(model), wanted)
    train(model, adamw(model.parameters()), range(1))


def _replace_wrongly(model: nn.Module) -> None:
    with full_parameters(model, write_back=True):
        model.blocks[0].up.weight = nn.Parameter(torch.zeros(1))
        model.blocks[1].up.bias.data.zero_()


class _Quantised(nn.Module):
    """A linear layer with frozen integer weights and a scale, and something beside it that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-8, 8, (6, 5), dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(6, 5, dtype=torch.bool), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.1), requires_grad=False)
        self.low = nn.Parameter(torch.randn(6, 2))
        self.high = nn.Parameter(torch.randn(2, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.codes * self.mask * self.scale + self.low @ self.high)


def integer_parameters() -> None:
    """Frozen integers and booleans are sharded and gathered like any other parameter; the rest trains as without."""
    results = []
    for sharded in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(_Quantised(), nn.Tanh(), nn.Linear(5, 6), _Quantised())
        if sharded:
            shard(model, units=[_Quantised])
        optimizer = adamw([each for each in model.parameters() if each.requires_grad])
        for _ in range(2):
            model(torch.ones(3, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(full_state_dict(model)["model"] if sharded else model.state_dict())
    assert_same(*results)


def wrapped_in_checkpoints() -> None:
    """`checkpoint_wrapper` around blocks changes no name: state of a plain model loads, and so does the optimizer's."""
    torch.manual_seed(0)
    wrapped = GPT()
    for number, block in enumerate(wrapped.blocks):
        wrapped.blocks[number] = checkpoint_wrapper(block)
    shard(wrapped)
    plain = built(by_memfit)
    optimizers = [adamw(each.parameters()) for each in (wrapped, plain)]
    for each, optimizer in zip((wrapped, plain), optimizers, strict=True):
        train(each, optimizer, range(2))
    ours, theirs = (full_state_dict(*each) for each in zip((wrapped, plain), optimizers, strict=True))
    assert_same(ours["model"], theirs["model"])
    assert ours["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
    load_state_dict(wrapped, theirs, optimizers[0])
    load_state_dict(plain, ours, optimizers[1])


class _Callable(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


def lists_of_modules() -> None:
    """A list of modules is a unit where it has a forward, and refused where it has none."""
    model = shard(nn.Sequential(_Callable([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 2)), units=[_Callable])
    model(torch.ones(2, 4)).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    with pytest.raises(InputError, match="which has no forward"):
        shard(nn.ModuleList([nn.Linear(4, 4)]))


def optimizers_in_backward() -> None:
    """PyTorch's private way to step a parameter as soon as it has its gradient trains it."""
    ours, theirs = built(by_memfit), built(by_memfit)
    _apply_optimizer_in_backward(torch.optim.SGD, ours.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for number in range(2):
        loss_of(ours, number).backward()
        assert all(each.grad is None for each in ours.parameters())
    train(theirs, optimizer, range(2))
    assert_same(whole(ours), whole(theirs))


def state_of_other_units() -> None:
    """Sharded state of a model with other units is loaded."""
    first, second = built(by_memfit), shard(GPT(), units=[nn.Linear])
    second.load_state_dict(first.state_dict())
    assert_same(whole(first), whole(second))
