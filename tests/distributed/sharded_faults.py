"""What ranks do in tests of faults: train, and die, stop or raise at an exact point."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memfit.errors import MemfitError
from memfit.sharded import (
    Precision,
    Reduction,
    Schedule,
    UnitOptions,
    full_parameters,
    full_state_dict,
    load,
    save,
    shard,
)
from memfit.sharded.comm import ShardComm
from tests.distributed.sharded_models import GPT
from tests.distributed.sharded_state import state_equal

LONG_S = 30.0
TIMEOUT_S = 4.0
SAVED_STEP = 2
FAULT_STEP = 3
LAST_STEP = 5
_VOCABULARY = 31

Stop = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error of a rank, how long the step took that ended with it, and the error of the pass after."""

    kind: str
    text: str
    seconds: float
    next_text: str
    next_seconds: float


class Boom(Exception):
    """An error of the user's."""


def made(timeout_s: float = LONG_S, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small sharded model with dropout, and its optimizer."""
    model = shard(plain(dropout=0.2), timeout=timedelta(seconds=timeout_s), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(**options: Any) -> nn.Module:
    torch.manual_seed(11)
    return GPT(vocabulary=_VOCABULARY, **{"width": 8, "layers": 3, **options})


def tokens_of(step: int) -> torch.Tensor:
    """The batch of a step, another one on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(0, _VOCABULARY, (2, 4), generator=generator)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = tokens_of(step)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(folder: str, rank: int | None = None, phase: str = "", how: str = "kill") -> dict[str, Any] | Failure:
    """Train from the last save to the last step; at one step, a rank dies or stops in a phase."""
    model, optimizer = made(LONG_S if how == "kill" else TIMEOUT_S)  # who waits for a dead rank learns of it at once
    first = 0
    torch.manual_seed(100 + dist.get_rank())
    if Path(folder, "latest").exists():
        first = load(folder, model, optimizer).extra["step"]
    began = time.monotonic()
    try:
        for step in range(first, LAST_STEP):
            began = time.monotonic()
            if step == FAULT_STEP and dist.get_rank() == rank:
                prepare(phase, model, optimizer, kill if how == "kill" else stop)
            train_step(model, optimizer, step)
            if step + 1 == SAVED_STEP or (step == FAULT_STEP and phase.startswith("save")):
                save(folder, model, optimizer, extra={"step": step + 1})
    except MemfitError as error:
        return failure_of(error, time.monotonic() - began, lambda: train_step(model, optimizer, LAST_STEP))
    return {"state": full_state_dict(model, optimizer), "random": torch.rand(4)}


def failure_of(error: MemfitError, seconds: float, again: Callable[[], None]) -> Failure:
    """What an error says, and what the next pass does after it was caught."""
    began, text = time.monotonic(), ""
    try:
        again()
    except MemfitError as second:
        text = str(second)
    return Failure(
        kind=type(error).__name__,
        text=str(error),
        seconds=seconds,
        next_text=text,
        next_seconds=time.monotonic() - began,
    )


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def boom() -> None:
    raise Boom("boom")


def prepare(phase: str, model: nn.Module, optimizer: torch.optim.Optimizer, act: Stop) -> None:
    """Make this rank act in a phase of the next step."""
    block = model.get_submodule("blocks.1")
    if phase == "forward":
        _once(model.get_submodule("blocks.0.up").register_forward_pre_hook, act)
    elif phase == "backward":

        def watch(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda _gradient: act())

        _once(block.get_submodule("up").register_forward_hook, watch)
    elif phase == "gather":
        _when_begun("gather", "gather of unit 'blocks.1' in backward", act)
    elif phase == "reduce":
        _when_begun("sum_parts", "reduction of the gradients of unit 'blocks.1'", act)
    elif phase == "optimizer":
        _once(optimizer.register_step_post_hook, act)
    elif phase.startswith("save"):
        _at_write(int(phase.removeprefix("save ")), act)
    elif phase == "parameter hook":
        _once(next(block.parameters()).register_post_accumulate_grad_hook, act)
    elif phase == "user hook":
        _once(block.register_forward_hook, act)
    elif phase == "loss":
        _once(model.register_forward_hook, act)
    elif phase == "before optimizer":
        _once(optimizer.register_step_pre_hook, act)
    else:
        raise AssertionError(phase)


def user_errors(phases: tuple[str, ...]) -> list[str]:
    """Raise in a step on all ranks, save nothing, and run the step again; the phases where the end differs."""
    expected = _with_error("")
    return [phase for phase in phases if not state_equal(_with_error(phase), expected)]


def _with_error(phase: str) -> dict[str, Any]:
    model, optimizer = made()
    for step in range(3):
        if step == 1 and phase:
            before = full_state_dict(model)["model"]
            interrupts = phase.startswith("interrupted ")
            prepare(phase.removeprefix("interrupted "), model, optimizer, interrupt if interrupts else boom)
            torch.manual_seed(step)
            with pytest.raises(KeyboardInterrupt if interrupts else Boom):
                train_step(model, optimizer, step)
            optimizer.zero_grad()
            if not interrupts:
                with full_parameters(model):
                    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
        torch.manual_seed(step)
        train_step(model, optimizer, step)
    return full_state_dict(model, optimizer)


def interrupt() -> None:
    raise KeyboardInterrupt


class Careful(nn.Module):
    """Goes on without a block that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            try:
                x = block(x if not (self.raises and number == 1) else x[:, 1:])
            except RuntimeError:
                self.raises = False
        return x


def caught_inside_of_the_model() -> None:
    """A forward that catches the error of one unit; its step and the next ones are those of a plain model."""
    torch.manual_seed(0)
    model = Careful()
    reference = deepcopy(model)
    shard(model)
    for step in range(3):
        model.raises = reference.raises = step == 1
        x = torch.randn(4, 5)
        for each in (model, reference):
            each(x).square().sum().backward()
        with torch.no_grad():
            for parameter in (*model.parameters(), *reference.parameters()):
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        with full_parameters(model):
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(model.get_parameter(name), parameter)


def one_rank_raises(phase: str) -> Failure:
    """Rank 1 catches an error of its own and goes on with the next step; rank 0 has had no error."""
    model, optimizer = made(TIMEOUT_S)

    def step(number: int) -> None:
        train_step(model, optimizer, number)

    if phase == "loss":  # replicas, which have nothing to gather: only their sums could meet
        model = shard(Turned(), mesh=init_device_mesh("cpu", (2, 1)), timeout=timedelta(seconds=TIMEOUT_S))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int) -> None:
            model(torch.full((2, 4), float(number))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for number in range(2):
        step(number)
    began = time.monotonic()
    try:
        if dist.get_rank() == 1:
            prepare(phase, model, optimizer, boom)
            with pytest.raises(Boom):
                step(2)
            began = time.monotonic()
        for number in range(2, 5):
            step(number)
    except MemfitError as error:
        return failure_of(error, time.monotonic() - began, lambda: step(5))
    raise AssertionError("ranks at different steps went on together")


def mismatches() -> dict[str, str]:
    """What this rank is told where rank 1 gives something else."""
    odd = dist.get_rank() == 1
    sparse = UnitOptions(keep=True) if odd else UnitOptions()
    attempts: dict[str, Callable[[], Any]] = {
        "shape": lambda: shard(plain(width=16 if odd else 8)),
        "layers": lambda: shard(plain(layers=2 if odd else 3)),
        "dtype": lambda: shard(plain().bfloat16() if odd else plain()),
        "frozen": lambda: shard(_frozen(plain(), "head.weight") if odd else plain()),
        "units": lambda: shard(plain(), units=["blocks.0"] if odd else None),
        "unit options": lambda: shard(plain(), units={"blocks.1": sparse}),
        "no such unit": lambda: shard(plain(), units=["blocks.7" if odd else "blocks.0"]),
        "precision": lambda: shard(plain(), precision=Precision(param_dtype=torch.bfloat16 if odd else None)),
        "schedule": lambda: shard(plain(), schedule=Schedule(forward_prefetch=2 if odd else 1)),
        "reduction": lambda: shard(plain(), reduction=Reduction(hook=_hook if odd else None)),
        "offload": lambda: shard(plain(), offload=odd),
        "from_rank_0": lambda: shard(plain(), from_rank_0=odd),
        "buffers": lambda: shard(nn.BatchNorm1d(3, track_running_stats=not odd)),
        "frozen later": lambda: _frozen(shard(plain()), "blocks.0.up.bias" if odd else "head.weight")(tokens_of(0)),
        "first order": lambda: shard(Turned(turned=odd))(torch.randn(2, 4)),
        "order of replicas": lambda: shard(Turned(turned=odd), mesh=init_device_mesh("cpu", (2, 1)))(torch.randn(2, 4)),
    }
    told: dict[str, str] = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            told[name] = "nothing"
        except MemfitError as error:
            told[name] = f"{type(error).__name__}: {error}"
    train_step(*made(reduction=Reduction(hook=_hook)), 0)
    return told


def _hook(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(whole, group=group)
    return whole.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


def _frozen(model: nn.Module, name: str) -> nn.Module:
    model.get_parameter(name).requires_grad_(False)
    return model


class Turned(nn.Module):
    """Two units of one size, in an order that can be turned around, or the second left out."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.order = [1, 0] if turned else [0, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


class Branches(nn.Module):
    """Units of one size side by side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [block(x) for block in self.blocks]


def replicas_train_different_units() -> Failure:
    """Replicas whose losses use different units, so that their gradients come in different orders."""
    model = shard(Branches(), mesh=init_device_mesh("cpu", (2, 1)), timeout=timedelta(seconds=TIMEOUT_S))

    def step() -> None:
        model(torch.randn(2, 4, requires_grad=True))[dist.get_rank()].sum().backward()

    began = time.monotonic()
    try:
        step()
    except MemfitError as error:
        return failure_of(error, time.monotonic() - began, step)
    raise AssertionError("gradients of different units were summed")


def leaves_the_order(how: str) -> Failure:
    """Rank 1 runs its second step otherwise than its first."""
    model = shard(Turned(), timeout=timedelta(seconds=TIMEOUT_S))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = time.monotonic()

    def step() -> None:
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        for number in range(4):
            began = time.monotonic()
            if number == 2 and dist.get_rank() == 1:
                if how == "turned":
                    model.order = [1, 0]
                elif how == "left out":
                    model.order = [0]
                elif how == "twice":
                    model.order = [0, 1, 1]
                elif how == "frozen":
                    _frozen(model, "blocks.0.weight")
                elif how == "saves":
                    save("nowhere", model)
            step()
    except MemfitError as error:
        return failure_of(error, time.monotonic() - began, step)
    raise AssertionError("ranks that do different things went on together")


def _once(register: Callable[..., Any], act: Callable[..., Any]) -> None:
    """Register a hook that goes when it is called."""

    def hook(*args: Any) -> None:
        handle.remove()
        act(*args) if args and act.__name__ == "watch" else act()

    handle = register(hook)


def _when_begun(method: str, about: str, act: Stop) -> None:
    """Act when a collective is under way and not waited for."""
    real = getattr(ShardComm, method)

    def begin(link: ShardComm, tensors: Any, tag: int, what: str) -> Any:
        transfer = real(link, tensors, tag, what)
        if what.startswith(about):
            setattr(ShardComm, method, real)
            act()
        return transfer

    setattr(ShardComm, method, begin)


def _at_write(number: int, act: Stop) -> None:
    """Act at one of the writes of a save, counted from 0; a negative number counts `fsync`s from the first, -1."""
    name = "write" if number >= 0 else "fsync"
    real, left = getattr(os, name), [number if number >= 0 else -1 - number]

    def counted(file: int, *content: Any) -> Any:
        if left[0] == 0:
            setattr(os, name, real)
            if content:
                real(file, content[0][: len(content[0]) // 2])
            act()
        left[0] -= 1
        return real(file, *content)

    setattr(os, name, counted)
