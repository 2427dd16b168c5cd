"""Steps of FSDP2 with `CPUOffloadPolicy`; a module of its own so that spawned processes can import it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.distributed.fsdp2_cases import Model, Shared
from tests.distributed.parallel_case import Case

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def offloaded(mesh: DeviceMesh, model: Callable[[], nn.Module], policy: MixedPrecisionPolicy) -> nn.Module:
    """A model of this kind in units, with shards, gradients and optimizer state on the host; nothing is pinned here."""
    made: Any = model()
    given: Any = {"mesh": mesh, "mp_policy": policy, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for block in made.blocks:
        fully_shard(block, **given)
    return fully_shard(made, **given)


def _batch(make: Callable[..., torch.Tensor]) -> torch.Tensor:
    return make((96, 16))


CASES = {
    "offloaded": Case(partial(offloaded, model=Model, policy=MixedPrecisionPolicy()), {"dp": 2}, _batch),
    "offloaded, bfloat16": Case(partial(offloaded, model=Model, policy=HALF), {"dp": 2}, _batch),
    "offloaded, a block twice": Case(partial(offloaded, model=Shared, policy=HALF), {"dp": 2}, _batch),
}
