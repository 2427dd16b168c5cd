from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memfit.errors import InputError, StateError
from memfit.sharded import FlatDTensor, shard
from memfit.sharded.checkpoint import load, save
from memfit.sharded.full_parameters import full_parameters
from memfit.sharded.optimizer_state import plain_optimizer_state
from memfit.sharded.state_dict import full_state_dict, load_state_dict, sharded_state_dict
from tests.distributed.sharded_models import GPT

VOCABULARY = 67


class Uneven(nn.Module):
    """Parameters of many sizes: a scalar, an empty one, odd shapes, two dtypes, a frozen one, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.odd = nn.Parameter(torch.randn(5, 7, 3))
        self.long = nn.Parameter(torch.randn(97))
        self.narrow = nn.Parameter(torch.randn(9, 11, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.normal = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normal(x) * self.scale
        total = (x @ self.odd.sum((0, 2))).sum() + (self.long**2).sum() + self.frozen.sum()
        return total + (self.narrow.float() ** 2).sum() + self.nothing.sum()


def gpt(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    return GPT(width=20, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with different settings."""
    every = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [each for name, each in every if "norm" not in name], "weight_decay": 0.1},
            {"params": [each for name, each in every if "norm" in name], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-3,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(steps: int = 2, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shard(gpt(**options))
    optimizer = adamw(model)
    train(model, optimizer, steps)
    return model, optimizer


def equal(first: Any, second: Any) -> bool:
    """Whether two state dicts are the same, bit by bit, dtypes and types of values included."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(first, second)
        )
    if isinstance(first, dict):
        return (
            isinstance(second, dict) and list(first) == list(second) and all(equal(first[k], second[k]) for k in first)
        )
    if isinstance(first, list | tuple):
        return (
            type(first) is type(second)
            and len(first) == len(second)
            and all(equal(a, b) for a, b in zip(first, second, strict=True))
        )
    return type(first) is type(second) and first == second


def state_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """As `equal`; the order of an optimizer's keys is its own affair."""

    def ordered(state: dict[str, Any]) -> dict[str, Any]:
        optimizer = state["optimizer"]
        return {
            "model": dict(state["model"]),
            "state": {name: dict(sorted(each.items())) for name, each in sorted(optimizer["state"].items())},
            "groups": [dict(sorted(group.items())) for group in optimizer["param_groups"]],
        }

    return equal(ordered(first), ordered(second))


def summoned_is_full() -> None:
    torch.manual_seed(0)
    plain = Uneven()
    before = {name: each.detach().clone() for name, each in plain.named_parameters()}
    model = shard(plain)
    shards = dict(model.named_parameters())
    with full_parameters(model):
        inside = {name: each.detach() for name, each in model.named_parameters()}
        assert equal(inside, before)
        assert equal(dict(model.state_dict()), {**model.state_dict(), **before})
        assert {n: p.requires_grad for n, p in model.named_parameters()} == {n: "froz" not in n for n in before}
        with torch.no_grad():
            model.long.add_(1)
    assert all(each is shards[name] for name, each in model.named_parameters())
    with full_parameters(model):
        assert equal({name: each.detach() for name, each in model.named_parameters()}, before)
    assert equal(inside, {**before, "long": before["long"] + 1})  # what was taken out stays valid


def summoned_writes_back() -> None:
    torch.manual_seed(0)
    model = shard(Uneven())
    with full_parameters(model, write_back=True), torch.no_grad():
        for number, each in enumerate(model.parameters()):
            each.fill_(number)
    with full_parameters(model):
        assert all(bool((each == number).all()) for number, each in enumerate(model.parameters()))
    with pytest.raises(ZeroDivisionError), full_parameters(model, write_back=True), torch.no_grad():
        model.long.fill_(1 // int(model.long.fill_(100).sum() - 9700))
    with full_parameters(model):
        assert not bool((model.long == 100).any())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 7)).backward()
    optimizer.step()


def summoned_by_unit() -> None:
    model = shard(gpt())
    with full_parameters(model, units=["blocks.1"]):
        assert model.blocks[1].qkv.weight.shape == (60, 20)
        assert model.blocks[0].qkv.weight.to_local().dim() == 1
        assert type(model.state_dict()["blocks.0.qkv.weight"]) is FlatDTensor
    with pytest.raises(InputError, match=r"no unit of this model"), full_parameters(model, units=["blocks.7"]):
        pass


def summoning_is_refused_while_the_model_runs() -> None:
    model = shard(gpt())
    refused: list[str] = []

    def summon(*_: object) -> None:
        try:
            with full_parameters(model):
                pass
        except StateError as error:
            refused.append(str(error))

    handle = model.blocks[1].register_forward_hook(summon)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    output = model(tokens)
    handle.remove()
    output.register_hook(summon)
    output.sum().backward()
    assert len(refused) == 2 and "between steps" in refused[0]
    with full_parameters(model), pytest.raises(StateError, match="leave full_parameters"):
        model(tokens)
    train(model, adamw(model), 1)


def summoned_after_a_failed_backward() -> None:
    model = shard(gpt())

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.blocks[0].register_full_backward_hook(fail)
    output = model(torch.zeros(2, 8, dtype=torch.long))
    handle.remove()
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    before = full_state_dict(model)["model"]
    with full_parameters(model):
        assert equal({name: each.detach() for name, each in model.named_parameters()}, before)
    train(model, adamw(model), 1)


def model_state_has_original_names() -> None:
    torch.manual_seed(0)
    plain = Uneven()
    expected = {name: each.clone() for name, each in plain.state_dict().items()}
    model = shard(plain)
    state = model.state_dict()
    assert list(state) == list(expected)
    assert {name: each.shape for name, each in state.items()} == {name: each.shape for name, each in expected.items()}
    sharded = {name: each for name, each in state.items() if isinstance(each, FlatDTensor)}
    assert set(sharded) == {name for name, _ in plain.named_parameters()}
    assert equal(
        {name: each.full_tensor() for name, each in sharded.items()}, {name: expected[name] for name in sharded}
    )
    assert equal(full_state_dict(model), {"model": expected})
    only = full_state_dict(model, rank_0_only=True)
    assert equal(only, {"model": expected} if dist.get_rank() == 0 else {})
    assert list(model.normal.state_dict()) == list(nn.BatchNorm1d(7).state_dict())
    other = shard(Uneven())
    assert str(other.load_state_dict(expected)) == "<All keys matched successfully>"
    assert equal(full_state_dict(other), {"model": expected})
    third = shard(Uneven())
    third.load_state_dict(state)
    assert equal(full_state_dict(third), {"model": expected})


def wrong_state_is_refused() -> None:
    model = shard(Uneven())
    full = full_state_dict(model)["model"]
    with pytest.raises(RuntimeError, match=r"long: .*\[12\].* in current model is torch.Size\(\[97\]\)"):
        model.load_state_dict({**full, "long": torch.zeros(12)})
    with pytest.raises(RuntimeError, match=r"Missing key.*\"odd\""):
        model.load_state_dict({name: each for name, each in full.items() if name != "odd"})
    shards = dict(model.named_parameters())
    model.load_state_dict({name: each + 1 if name == "odd" else each for name, each in full.items()}, assign=True)
    assert equal(full_state_dict(model)["model"]["odd"], full["odd"] + 1)
    model.load_state_dict(full)
    assert all(each is shards[name] for name, each in model.named_parameters())
    assert equal(full_state_dict(model)["model"], full)
    value = model.state_dict()["odd"]
    with pytest.raises(StateError, match="Gather first"):
        value[0]
    with pytest.raises(StateError, match="full_state_dict"):
        torch.save(model.state_dict(), io.BytesIO())
    copy = deepcopy(value)
    assert torch.equal(copy.full_tensor(), value.full_tensor())
    assert not value.local.numel() or copy.local.data_ptr() != value.local.data_ptr()
    with pytest.raises(InputError, match="has no 'optimizer'"):
        load_state_dict(model, {"model": full}, torch.optim.SGD(model.parameters()))


def full_state_is_interchangeable() -> dict[str, Any]:
    """Full state goes to a plain process and back; tied names, groups and a scalar parameter included."""
    model, optimizer = trained(tied=True)
    full = full_state_dict(model, optimizer)
    plain = gpt(tied=True)
    plain.load_state_dict(full["model"])
    plain_optimizer = adamw(plain)
    plain_optimizer.load_state_dict(plain_optimizer_state(full["optimizer"]))
    for again in (
        {"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()},
        full,
        sharded_state_dict(model, optimizer),
    ):
        other = shard(gpt(tied=True))
        other_optimizer = adamw(other)
        load_state_dict(other, again, other_optimizer)
        assert state_equal(full_state_dict(other, other_optimizer), full)
    sharded = sharded_state_dict(model, optimizer)
    assert type(sharded["optimizer"]["state"]["embedding.weight"]["exp_avg"]) is FlatDTensor
    return full


def uneven_optimizer_state_is_interchangeable() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Uneven()
        return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])

    plain, plain_optimizer = made()
    x = torch.randn(4, 7)
    plain(x).backward()
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    model, _ = made()
    model = shard(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    load_state_dict(model, {"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()}, optimizer)
    full = full_state_dict(model, optimizer)
    assert equal(full["model"], dict(plain.state_dict()))
    numbered, expected = plain_optimizer_state(full["optimizer"])["state"], plain_optimizer.state_dict()["state"]
    assert equal(
        {n: dict(sorted(s.items())) for n, s in numbered.items()},
        {n: dict(sorted(s.items())) for n, s in expected.items()},
    )
    for each in (plain, model):
        each(x).backward()
    plain_optimizer.step()
    optimizer.step()
    for name, each in full_state_dict(model)["model"].items():
        torch.testing.assert_close(each, plain.state_dict()[name])


def other_groups_are_refused() -> None:
    model, optimizer = trained(1)
    full = full_state_dict(model, optimizer)
    with pytest.raises(InputError, match="groups with different settings"):
        load_state_dict(model, full, torch.optim.AdamW(model.parameters()))
    some = torch.optim.AdamW(model.blocks.parameters())
    with pytest.raises(InputError, match="the saved optimizer state has not"):
        load_state_dict(model, full_state_dict(model, some) | {"model": full["model"]}, optimizer)
    with pytest.raises(InputError, match="is not the model's"):
        sharded_state_dict(model, torch.optim.SGD(gpt().parameters()))


def hybrid_state_is_full(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(gpt(), mesh=mesh)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    full = full_state_dict(model, optimizer)
    save(folder, model, optimizer)
    other = shard(gpt())
    other_optimizer = adamw(other)
    loaded = load(folder, other, other_optimizer)
    assert loaded.ranks == 4
    assert state_equal(full_state_dict(other, other_optimizer), full)
