"""Steps of FSDP2 that are captured and measured; a module of its own so that spawned processes can import it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.distributed.fsdp2_cases import WIDTH, Model, Shared
from tests.distributed.parallel_case import Case

ROWS = 96
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def offloaded(mesh: DeviceMesh, model: Callable[[], nn.Module], policy: MixedPrecisionPolicy) -> nn.Module:
    """A model of this kind in units, with shards, gradients and optimizer state on the host; nothing is pinned here."""
    made: Any = model()
    given: Any = {"mesh": mesh, "mp_policy": policy, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for block in made.blocks:
        fully_shard(block, **given)
    return fully_shard(made, **given)


class Reader(nn.Module):
    """Reads a memory after a wide layer, so that the backward has the memory's gradient before that layer's."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.read = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) + self.read(memory)


class Readers(nn.Module):
    """Units with two inputs that need gradients, as a decoder's; the peak is in the first's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.encoder = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(map(Reader, (2048, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, x = self.encoder(x), self.inner(x)
        for block in self.blocks:
            x = block(x, memory)
        return x


def sharded(mesh: DeviceMesh) -> nn.Module:
    """Readers in units."""
    model = Readers()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _batch(make: Callable[..., torch.Tensor]) -> torch.Tensor:
    return make((ROWS, 16))


CASES = {
    "offloaded": Case(partial(offloaded, model=Model, policy=MixedPrecisionPolicy()), {"dp": 2}, _batch),
    "offloaded, bfloat16": Case(partial(offloaded, model=Model, policy=HALF), {"dp": 2}, _batch),
    "offloaded, a block twice": Case(partial(offloaded, model=Shared, policy=HALF), {"dp": 2}, _batch),
    "units with two inputs": Case(sharded, {"dp": 2}, _batch),
}
