"""What each process of the tensor parallel tests runs, and the models that it trains."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from memfit import Step
from tests.distributed.fsdp2_ranks import _MEASURED, _STEP, _WARMUP, _levels, _steps

WIDTH, HIDDEN, TOKENS = 64, 192, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    """Columns and rows: one all-reduce of each block in the forward, one in the backward."""
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sequence_parallel(mesh: DeviceMesh) -> nn.Module:
    """Norms work on a part of the tokens: all-gathers and reduce-scatters instead."""
    model = Model()
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


def sharded_tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel blocks that are sharded over the other dimension of the mesh."""
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


CASES: dict[str, tuple[Callable[[DeviceMesh], nn.Module], dict[str, int]]] = {
    "tensor parallel": (tensor_parallel, {"tp": 2}),
    "sequence parallel": (sequence_parallel, {"tp": 2}),
    "sharded tensor parallel": (sharded_tensor_parallel, {"dp": 2, "tp": 2}),
}


def step_of(model: Any, batch: torch.Tensor) -> Step:
    return Step(model, batch, loss=_loss, optimizer=_adamw)


def _loss(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def measure(rank: int, ranks: int, folder: str) -> None:
    """Train every case over Gloo and write down how high its steps are."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        trained = {}
        for name, (build, sizes) in CASES.items():
            if math.prod(sizes.values()) != ranks:
                continue
            torch.manual_seed(0)
            model = build(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
            step = step_of(model, torch.zeros(4, TOKENS, WIDTH))
            optimizer = step.build_optimizer(model)
            for _ in range(_WARMUP):
                step.execute(model, optimizer, "cpu")
            trained[name] = step, model, optimizer
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        with profiler:
            for name, (step, model, optimizer) in trained.items():
                for _ in range(_MEASURED):
                    with torch.profiler.record_function(f"{_STEP}{name}"):
                        step.execute(model, optimizer, "cpu")
        found: dict[str, list[Any]] = {}
        for name, events in _steps(profiler):
            found.setdefault(name, []).append(_levels(events))
        Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()
