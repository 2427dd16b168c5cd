"""Faults on a hybrid mesh, in torch's own checkpoints and state dicts: each function runs on every rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit.sharded import FlatDTensor, full_state_dict, shard
from memfit.sharded.comm import ShardComm
from tests.distributed.sharded_faults import boom, kill, plain, stop, train_step
from tests.distributed.sharded_state import state_equal

TIMEOUT_S = 5.0
"""Of memfit's collectives."""

GROUP_TIMEOUT_S = 20.0
"""Of the process group, which torch's own checkpoints use; with time for a slow machine."""

Built = tuple[nn.Module, torch.optim.Optimizer]

_meshes: list[DeviceMesh] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The error of a rank, and how long after the start of what failed it came."""

    kind: str
    text: str
    seconds: float


def hybrid() -> Built:
    """A model on replicas that shard within; made with a mesh that is made once."""
    if not _meshes:
        _meshes.append(init_device_mesh("cpu", (2, dist.get_world_size() // 2)))
    model = shard(plain(), mesh=_meshes[0], timeout=timedelta(seconds=TIMEOUT_S))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def fails(what: str, rank: int, how: str, folder: str) -> None:
    """Write what this rank was told, and end, as a script does with an error; that tells those who wait for it."""
    told = _told(what, rank, how, folder)
    Path(f"{folder}.told.{dist.get_rank()}").write_text(json.dumps(asdict(told)))
    os._exit(1)


def told_by(folder: str, rank: int) -> Told | None:
    """Return what a rank was told, None where it died before."""
    path = Path(f"{folder}.told.{rank}")
    return Told(**json.loads(path.read_text())) if path.exists() else None


def _told(what: str, rank: int, how: str, folder: str) -> Told:
    """Train, save, and then let one rank die, stop or do something else in what all others do."""
    model, optimizer = hybrid()
    train_step(model, optimizer, 0)
    save_by_dcp(folder, model, optimizer)
    act = {"kill": kill, "stop": stop, "raise": boom}.get(how, kill)
    here = dist.get_rank() == rank
    began = time.monotonic()
    try:
        if how == "trains instead" and here:
            train_step(model, optimizer, 1)
        elif how == "saves instead" and here:
            save_by_dcp(f"{folder}.other", model, optimizer)
        else:
            if here:
                _PREPARE[what](act)
            _ACTIONS[what](f"{folder}.again" if what == "dcp.save" else folder, model, optimizer)
    except BaseException as error:  # torch's CheckpointException is no Exception
        return Told(kind=type(error).__name__, text=str(error), seconds=time.monotonic() - began)
    return Told(kind="none", text="", seconds=time.monotonic() - began)


def save_by_dcp(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save as FSDP2's recipe does."""
    state, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)


def load_by_dcp(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load as FSDP2's recipe does."""
    state, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=of_optimizer)


def _whole(_: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gather the whole state and go on: the other replica has it without the rank that fails, and meets it later."""
    get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    train_step(model, optimizer, 1)


def _step(_: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train_step(model, optimizer, 1)


_ACTIONS: dict[str, Callable[[str, nn.Module, torch.optim.Optimizer], None]] = {
    "dcp.save": save_by_dcp,
    "dcp.load": load_by_dcp,
    "whole state": _whole,
    "all-reduce": _step,
}


def _at_fsync(act: Callable[[], None]) -> None:
    real = os.fsync

    def acting(file: int) -> None:
        os.fsync = real
        act()
        real(file)

    os.fsync = acting


def _at_read(act: Callable[[], None]) -> None:
    real = torch.load

    def acting(*args: Any, **kwargs: Any) -> Any:
        torch.load = real
        act()
        return real(*args, **kwargs)

    torch.load = acting


def _at_gather(act: Callable[[], None]) -> None:
    """Act at the third parameter that is gathered whole."""
    real, left = FlatDTensor.full_tensor, [2]

    def acting(value: FlatDTensor, **kwargs: Any) -> torch.Tensor:
        if left[0] == 0:
            FlatDTensor.full_tensor = real
            act()
        left[0] -= 1
        return real(value, **kwargs)

    FlatDTensor.full_tensor = acting


def _at_all_reduce(act: Callable[[], None]) -> None:
    """Act when gradients of a unit are being summed over the replicas."""
    real = ShardComm.sum_replicas

    def acting(link: ShardComm, *args: Any, **kwargs: Any) -> Any:
        begun = real(link, *args, **kwargs)
        ShardComm.sum_replicas = real
        act()
        return begun

    ShardComm.sum_replicas = acting


_PREPARE: dict[str, Callable[[Callable[[], None]], None]] = {
    "dcp.save": _at_fsync,
    "dcp.load": _at_read,
    "whole state": _at_gather,
    "all-reduce": _at_all_reduce,
}


def errors_of_one_rank_leave_a_usable_model(folder: str) -> list[str]:
    """One rank cannot write or read its part: all are told, the model is as it was, and the next try works."""
    model, optimizer = hybrid()
    train_step(model, optimizer, 0)
    wanted = full_state_dict(model, optimizer)
    told: list[str] = []
    for number, (action, prepare) in enumerate(((save_by_dcp, _at_fsync), (load_by_dcp, _at_read))):
        if dist.get_rank() == 3 - number:
            prepare(boom)
        try:
            action(folder, model, optimizer)
            told.append("nothing")
        except dcp.CheckpointException as error:
            told.append(str(error))
        assert state_equal(full_state_dict(model, optimizer), wanted)
        action(folder, model, optimizer)
    train_step(model, optimizer, 1)
    after = full_state_dict(model, optimizer)
    other, other_optimizer = hybrid()
    load_by_dcp(folder, other, other_optimizer)
    assert state_equal(full_state_dict(other, other_optimizer), wanted)
    train_step(other, other_optimizer, 1)
    assert state_equal(full_state_dict(other, other_optimizer), after)
    assert Path(folder, ".metadata").exists()
    return told
