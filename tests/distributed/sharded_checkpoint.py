from __future__ import annotations

import os
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from memfit.errors import MemfitError
from memfit.sharded import shard
from memfit.sharded.checkpoint import load, save, saves
from memfit.sharded.state_dict import full_state_dict, load_state_dict, sharded_state_dict
from tests.distributed.sharded_state import adamw, gpt, state_equal, train, trained


def other_gpt(**options: Any) -> nn.Module:
    """The same model with other values."""
    model = gpt(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def save_trained(folder: str) -> dict[str, Any]:
    model, optimizer = trained()
    save(folder, model, optimizer, extra={"step": 2, "rates": (0.1, float("inf"))})
    return full_state_dict(model, optimizer)


def resume(folder: str) -> tuple[dict[str, Any], dict[str, Any], Any, int]:
    """What was loaded, then, after a step, what was saved again; and how many bytes this rank read."""
    model = shard(other_gpt())
    optimizer = adamw(model)
    begin = _read_bytes()
    loaded = load(folder, model, optimizer)
    read = _read_bytes() - begin
    before = full_state_dict(model, optimizer)
    train(model, optimizer, 1, seed=dist.get_world_size())
    save(folder, model, optimizer, extra={"step": 3})
    return before, full_state_dict(model, optimizer), loaded.extra, read


def resumes_bitwise(folder: str) -> None:
    """A resumed run with dropout equals one that was not interrupted."""
    model, optimizer = trained(1, dropout=0.3)
    torch.manual_seed(100 + dist.get_rank())
    train(model, optimizer, 1, seed=1)
    save(folder, model, optimizer)
    train(model, optimizer, 2, seed=2)
    after = torch.rand(3)
    torch.manual_seed(7)
    again = shard(other_gpt(dropout=0.3))
    again_optimizer = adamw(again)
    assert load(folder, again, again_optimizer).rng
    train(again, again_optimizer, 2, seed=2)
    assert state_equal(full_state_dict(again, again_optimizer), full_state_dict(model, optimizer))
    assert torch.equal(torch.rand(3), after)


def other_optimizers_resume(folder: str) -> None:
    """Optimizers with other state than AdamW's, or none, come back; so does what fused ones keep."""
    kinds: dict[str, Any] = {
        "plain": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adagrad": torch.optim.Adagrad,
        "rmsprop": partial(torch.optim.RMSprop, centered=True),
        "amsgrad": partial(torch.optim.Adam, amsgrad=True, betas=(0.8, 0.9)),
        "fused": partial(torch.optim.AdamW, fused=True, lr=torch.tensor(0.01)),
    }
    for name, kind in kinds.items():
        model = shard(gpt())
        optimizer = kind(model.parameters())
        train(model, optimizer, 2)
        save(f"{folder}/{name}", model, optimizer)
        again = shard(other_gpt())
        again_optimizer = kind(again.parameters())
        load(f"{folder}/{name}", again, again_optimizer)
        for one, other in ((model, optimizer), (again, again_optimizer)):
            train(one, other, 1, seed=3)
        assert state_equal(full_state_dict(again, again_optimizer), full_state_dict(model, optimizer)), name


class Own(nn.Module):
    """A buffer that every rank has otherwise, and an ignored parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("fixed", torch.arange(3))
        self.free = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def keeps_what_ranks_have_of_their_own(folder: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return shard(Own(), ignored=["free"])

    model = made()
    with torch.no_grad():
        model.seen += dist.get_rank() + 1
        model.free *= 3 + dist.get_rank()
    save(folder, model)
    again = made()
    load(folder, again)
    assert torch.equal(again.seen, model.seen)
    assert torch.equal(again.free, model.free)
    assert torch.equal(again.fixed, torch.arange(3))


def dcp_round_trips(folder: str) -> dict[str, Any]:
    """memfit -> FSDP2 -> memfit, through torch.distributed.checkpoint."""
    model, optimizer = trained()
    full = full_state_dict(model, optimizer)
    dcp.save(sharded_state_dict(model, optimizer), checkpoint_id=f"{folder}/memfit")

    fsdp = other_gpt()
    for block in fsdp.blocks:
        fully_shard(block)
    fully_shard(fsdp)
    fsdp_optimizer = adamw(fsdp)
    _dcp_load(f"{folder}/memfit", fsdp, fsdp_optimizer)
    assert state_equal(_dcp_full(fsdp, fsdp_optimizer), full)

    train(fsdp, fsdp_optimizer, 1, seed=5)
    found, found_optimizer = get_state_dict(fsdp, fsdp_optimizer)
    dcp.save({"model": found, "optimizer": found_optimizer}, checkpoint_id=f"{folder}/fsdp2")
    again = shard(other_gpt())
    again_optimizer = adamw(again)
    memfit_from_dcp(f"{folder}/fsdp2", again, again_optimizer)
    assert state_equal(full_state_dict(again, again_optimizer), _dcp_full(fsdp, fsdp_optimizer))
    return full


def from_plain_dcp(folder: str) -> dict[str, Any]:
    model = shard(other_gpt())
    optimizer = adamw(model)
    memfit_from_dcp(folder, model, optimizer)
    return full_state_dict(model, optimizer)


def memfit_from_dcp(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = sharded_state_dict(model, optimizer, to_load=True)
    dcp.load(state, checkpoint_id=folder)
    load_state_dict(model, state, optimizer)


def plain_through_dcp(source: str, target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A plain process loads what memfit saved, takes a step, and saves."""
    model = other_gpt()
    optimizer = adamw(model)
    _dcp_load(source, model, optimizer)
    before = _dcp_full(model, optimizer)
    train(model, optimizer, 1)
    found, found_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": found, "optimizer": found_optimizer}, checkpoint_id=target)
    return before, _dcp_full(model, optimizer)


def save_then_one_rank_fails(folder: str, how: str) -> str:
    """Save; then a rank fails or dies in the next save. What the others say."""
    model, optimizer = trained(1)
    save(folder, model, optimizer, extra=1)
    sync = os.fsync

    def fail(file: int) -> None:
        if how == "die":
            os._exit(9)
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        os.fsync = fail
    try:
        save(folder, model, optimizer, extra=2)
    except MemfitError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.fsync = sync
    return "nothing"


def load_extra(folder: str) -> Any:
    model = shard(other_gpt())
    return load(folder, model, adamw(model)).extra


def damage_is_told_on_all_ranks(folder: str) -> str:
    model, optimizer = trained(1)
    where = save(folder, model, optimizer)
    path = where / "rank-1.bin"
    if dist.get_rank() == 0:
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    dist.barrier()
    with pytest.raises(MemfitError) as caught:
        load(folder, model, optimizer)
    assert saves(folder) == ["save-00000001"]
    return str(caught.value)


def _dcp_load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found, found_optimizer = get_state_dict(model, optimizer)
    state = {"model": found, "optimizer": found_optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _dcp_full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found, found_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return deepcopy({"model": dict(found), "optimizer": found_optimizer})  # where nothing is gathered, the very tensors


def _read_bytes() -> int:
    """Bytes that this process has read."""
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("rchar")).split()[1])
