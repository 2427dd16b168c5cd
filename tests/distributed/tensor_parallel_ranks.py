"""Tensor and sequence parallel models, trained on each process of the tests and captured as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.distributed.parallel_case import Case

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


def _hidden(make: Callable[..., torch.Tensor]) -> torch.Tensor:
    return make((4, TOKENS, WIDTH))


CASES = {
    "tensor parallel": Case(tensor_parallel, {"tp": 2}, _hidden),
    "sequence parallel": Case(sequence_parallel, {"tp": 2}, _hidden),
    "sharded tensor parallel": Case(sharded_tensor_parallel, {"dp": 2, "tp": 2}, _hidden),
}
