"""Training on two ranks of which one runs out of memory under a real limit (RLIMIT_AS), as a script for both ranks.

`python guarded_ranks.py RANK STORE [ENGINE [WHERE]]`: all cases run one after the other in one process group, whose
connections each fault cuts and the guard makes anew. Rank 0 prints the outcomes of both as JSON. In the last case rank
1 is killed, which only rank 0 survives.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit.engines.recompute import is_recomputing
from memfit.recovery import OutOfMemory
from memfit.sharded import RankError
from tests.recovery.fault_steps import Block, Limit, differing

RANKS, FAILING, WARM, MORE = 2, 1, 1, 10
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Size:
    """How large a run is; `part` of the baseline's peak is what its plan may take."""

    rows: int
    width: int
    layers: int
    part: float
    foreach: bool = False


ACTIVATIONS = Size(rows=3072, width=64, layers=4, part=0.95)
STATES = Size(rows=64, width=256, layers=12, part=1.0, foreach=True)
CLASSES = 64


@dataclass(frozen=True)
class Case:
    """Where a rank fails, how, and how far above what is mapped its limit is."""

    engine: str
    where: str
    size: Size = ACTIVATIONS
    above_bytes: int = 1 << 20
    warm: int = WARM
    how: str = "memory"
    guard: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.engine}: {self.how} in {self.where}"


CASES = [
    Case("fsdp2", "forward", above_bytes=6 << 20),
    Case("fsdp2", "backward"),
    Case("fsdp2", "optimizer", size=STATES, above_bytes=17 << 20),
    Case("fsdp2", "no way out", above_bytes=6 << 20),
    Case("sharded", "forward", warm=0, above_bytes=6 << 20),
    Case("sharded", "backward"),
    Case("fully_shard", "backward"),
    Case("ddp", "backward"),
    Case("ddp", "backward", how="SIGKILL"),
]


class Model(nn.Module):
    """Running statistics, blocks with dropout, a head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.BatchNorm1d(size.width)
        self.layers = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Run:
    """A model on this rank and its steps; everything follows from the seed and the rank."""

    def __init__(self, size: Size, engine: str, plan: memfit.Plan | None) -> None:
        torch.manual_seed(0)
        self.size, self.where, self.attempts = size, "", 0
        self.act: Callable[..., None] = lambda *_: None
        model: nn.Module = Model(size)
        self.inner = model
        if engine == "ddp":
            model = DistributedDataParallel(model)
        elif engine == "fully_shard":
            for layer in self.inner.layers:
                fully_shard(layer)
            fully_shard(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=size.foreach)
        if plan is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that on wrapped models nothing but policies is carried out
                plan.apply(model, self.optimizer, engine=engine if engine in ("fsdp2", "sharded") else None)
        torch.manual_seed(100 + dist.get_rank())

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(self.size.rows, self.size.width, generator=generator)
        return x, torch.randint(0, CLASSES, (self.size.rows,), generator=generator)

    def step(self, number: int) -> float:
        self.attempts += 1
        x, labels = self.batch(number)
        output = self.model(x)
        loss = F.cross_entropy(output, labels)
        if self.where == "backward":
            self.act()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def place(self, where: str, act: Callable[..., None]) -> None:
        """Call a function at a place in every step."""
        self.act, self.where = act, where.split()[0]
        if self.where == "forward":
            self.inner.layers[-1].register_forward_pre_hook(lambda *_: None if is_recomputing() else act())
        elif where == "no way out":
            self.inner.register_forward_pre_hook(lambda *_: act())
        elif self.where == "optimizer":
            self.optimizer.register_step_pre_hook(act)

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank holds of everything that a step changes and leaves."""
        found = {name: local(each).clone() for name, each in self.model.named_buffers()}
        for name, parameter in self.model.named_parameters():
            found[name] = local(parameter).detach().clone()
            if parameter.grad is not None:
                found[f"gradient of {name}"] = local(parameter.grad).clone()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key} of {name}"] = local(torch.as_tensor(value)).clone()
        found["torch"] = torch.get_rng_state()
        return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


@functools.cache
def captured(size: Size) -> memfit.Trace:
    return memfit.trace(step_of(size), target="cpu")


def step_of(size: Size) -> memfit.Step:
    return memfit.Step(
        lambda: Model(size),
        memfit.spec((size.rows, size.width)),
        loss=lambda output, _: F.cross_entropy(output, torch.zeros(size.rows, dtype=torch.int64)),
        optimizer=functools.partial(torch.optim.AdamW, foreach=size.foreach),
    )


@functools.cache
def planned(size: Size, engine: str) -> memfit.Plan:
    ranks = 1 if engine == "ddp" else RANKS
    baseline = memfit.plan(captured(size), ranks=ranks, progress=False).baseline.peak_bytes
    return memfit.plan(captured(size), ranks=ranks, budget=int(size.part * baseline), progress=False)


@functools.cache
def reference(size: Size, engine: str) -> dict[int, dict[str, torch.Tensor]]:
    """The states of a run that has the plan and never fails."""
    run = Run(size, engine, planned(size, engine))
    states = {}
    for number in range(WARM + 2 + MORE):
        states[number] = run.state()
        run.step(number)
    return states


class Fault:
    """Raises, or kills this process, the first time it is called while armed."""

    def __init__(self, how: str) -> None:
        self.armed, self._how = False, how

    def __call__(self, *_: Any) -> None:
        if self.armed and self._how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.armed:
            self.armed = False
            raise ValueError("a bad batch")

    def lift(self) -> None:
        """Do nothing: there is no limit."""


def outcome(case: Case) -> dict[str, Any]:
    """A run in which one rank fails once, beside one in which none does."""
    states, plan = reference(case.size, case.engine), planned(case.size, case.engine)
    gc.collect()
    run = Run(case.size, case.engine, plan)
    act = Limit(case.above_bytes) if case.how == "memory" else Fault(case.how)
    if dist.get_rank() == FAILING:
        run.place(case.where, act)
    guard = memfit.guard(plan, run.model, optimizer=run.optimizer, step=captured(case.size), **dict(case.guard))
    found: dict[str, Any] = {}
    with guard, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(case.warm):
            guard.step(run.step, number)
        run.attempts, act.armed = 0, True
        error: Exception | None = None
        began = time.monotonic()
        try:
            guard.step(run.step, case.warm)
        except (OutOfMemory, RankError, ValueError) as failed:
            error = failed
        found |= {
            "seconds": time.monotonic() - began,
            "attempts": run.attempts,
            "armed": act.armed,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "restored": getattr(error, "restored", None),
            "peaks": [plan.predicted.peak_bytes, guard.plan.predicted.peak_bytes],
            "plan": guard.plan.to_json(),
            "foreach": run.optimizer.param_groups[0]["foreach"],
            "warnings": [str(each.message) for each in caught if "out of memory" in str(each.message)],
            "failed ranks": [each.rank for each in guard.faults],
        }
        if case.how == "SIGKILL":
            return found
        if error is not None:
            act.lift()
            if isinstance(error, OutOfMemory):
                found["differs after the failure"] = differing(run.state(), states[case.warm])
            run.optimizer.zero_grad()
        if error is None or found["restored"]:
            for number in range(case.warm + (error is None), case.warm + 1 + MORE):
                guard.step(run.step, number)
            act.lift()  # copies are compared
            found["differs at the end"] = differing(run.state(), states[case.warm + 1 + MORE])
        else:
            found["loss"] = guard.step(run.step, case.warm)  # it goes on
        act.lift()
        total = torch.ones(1)
        dist.all_reduce(total)  # the user's own group works after it
        found["ranks"] = int(total)
    guard.plan.remove(run.model)
    return found


def main(rank: int, store: str, *chosen: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=TIMEOUT)
    found = {}
    for case in CASES:
        if all(each in (case.engine, case.where, case.how) for each in chosen):
            own = outcome(case)
            told: list[Any] = [own]
            if case.how != "SIGKILL":
                told = [None] * RANKS
                dist.all_gather_object(told, own)
            found[case.name] = told
    if rank == 0:
        sys.stdout.write(json.dumps(found))
        sys.stdout.flush()
    os._exit(0)  # without the barrier that Gloo's threads would want, in which the last case leaves rank 0 alone


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
