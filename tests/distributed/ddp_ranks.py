"""What each process of the DDP tests runs, and the steps that it trains; a module that spawned processes can import."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit import Step
from tests.distributed.fsdp2_ranks import _levels
from tests.distributed.measured_steps import STEP, Event, steps_of

_STEP = "measured step of "
_MEASURED = 4


class Net(nn.Module):
    """Layers above and below the size of a bucket; `norm` has buffers, which DDP sends before each forward."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        sizes = (64, 700, 700, 3000, 3000, 64)
        layers: list[nn.Module] = []
        for into, out in pairwise(sizes):
            layers += [nn.Linear(into, out), nn.BatchNorm1d(out) if norm else nn.Identity(), nn.GELU()]
        self.layers = nn.Sequential(*layers)
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.frozen)


@dataclass(frozen=True, kw_only=True)
class Case:
    model: Callable[[], nn.Module] = Net
    accumulation_steps: int = 1
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: int | None = None
    optimizer: Any = torch.optim.AdamW
    rows: int = 32

    def step(self, model: Any, batch: Any) -> Step:
        return Step(
            model,
            batch,
            loss=_loss,
            optimizer=self.optimizer,
            accumulation_steps=self.accumulation_steps,
        )

    @property
    def wrapping(self) -> dict[str, Any]:
        options: dict[str, Any] = {"gradient_as_bucket_view": self.gradient_as_bucket_view}
        return options if self.bucket_cap_mb is None else {**options, "bucket_cap_mb": self.bucket_cap_mb}


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def normed() -> nn.Module:
    return Net(norm=True)


CASES = {
    "plain": Case(),
    "views": Case(gradient_as_bucket_view=True),
    "small buckets": Case(bucket_cap_mb=2),
    "buffers": Case(model=normed),
    "accumulation": Case(accumulation_steps=2),
    "SGD": Case(optimizer=torch.optim.SGD, rows=512),
    "views, SGD": Case(optimizer=torch.optim.SGD, gradient_as_bucket_view=True, rows=512),
}


def measure(rank: int, ranks: int, folder: str) -> None:
    """Train every case with DDP over Gloo and write down what its allocations were."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    try:
        found: dict[str, Any] = {}
        for name, case in CASES.items():
            found[name] = _measured(name, case)
        Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def _measured(name: str, case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    model = case.model()
    step = case.step(model, torch.randn(case.rows, 64))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        with torch.profiler.record_function(f"{STEP}begin"):
            wrapped = DistributedDataParallel(model, **case.wrapping)
            optimizer = step.build_optimizer(wrapped)
            for _ in range(2):  # buckets are made anew before the second
                step.execute(wrapped, optimizer, "cpu")
        for _ in range(_MEASURED):
            with torch.profiler.record_function(f"{STEP}{name}"):
                step.execute(wrapped, optimizer, "cpu")
        state = [each for held in optimizer.state.values() for each in held.values() if isinstance(each, torch.Tensor)]
        state_bytes = sum(each.untyped_storage().nbytes() for each in state)
        del state
        for _ in range(2):  # a thread of Gloo's may hold a bucket until its next collective, and free it unseen
            dist.barrier()
        time.sleep(0.1)
        with torch.profiler.record_function(f"{STEP}end"):
            del wrapped, optimizer
            gc.collect()
    groups = steps_of(profiler)
    return {
        "kept_bytes": _kept_bytes(groups),
        "state_bytes": state_bytes,
        "parameters": sum(1 for each in model.parameters() if each.requires_grad),
        "steps": [_levels(events) for label, events in groups if label == name],
    }


def _kept_bytes(groups: list[tuple[str, list[Event]]]) -> int:
    """What the first steps leave behind, optimizer state and buckets: freed when wrapper and optimizer go.

    Frees on threads of Gloo are not among the events, so what is not seen to be freed may be gone all the same.
    """
    alive: dict[int, tuple[str, int]] = {}
    kept = 0
    for label, events in groups:
        for event in events:
            made_in, n_bytes = alive.pop(event.address, ("", 0))
            if event.bytes > 0:
                alive[event.address] = label, event.bytes
            elif label == "end" and made_in == "begin":
                kept += n_bytes
    return kept
