"""What each rank does in the tests of plans on torchtitan's llama3: it trains what torchtitan's code has wrapped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import JobConfig

from memfit.capture import load_trace
from memfit.engines.attachment import attached
from memfit.integrations import torchtitan
from memfit.plans import Plan
from memfit.plans.wrappers import named_modules
from memfit.verify.rank_memory import measure_rank_rise, resident_bytes
from tests.integrations.titan_steps import job

_BATCH, _LENGTH, _STEPS = 2, 192, 3


def config() -> JobConfig:
    """llama3's debug model; AdamW steps one parameter at a time, as in the other tests of ranks."""
    found = job(batch=_BATCH, length=_LENGTH)
    found.optimizer.implementation = "for-loop"
    return found


@dataclass(frozen=True)
class Trained:
    """What some steps on one rank came to."""

    losses: list[float]
    shards: list[torch.Tensor]
    peak_bytes: int


def trained(document: str | None, trace_path: str) -> Trained:
    """Train the wrapped model on this rank's tokens, with a plan or without, and measure a step."""
    settings = config()
    sizes = torchtitan.mesh(settings, ranks=dist.get_world_size())
    step = torchtitan.step(settings)
    assert callable(step.model) and step.run is not None
    torch.manual_seed(0)
    model = step.model(mesh=init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
    assert isinstance(model, FSDPModule)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # torchtitan has FSDP2 divide by 1, which NCCL can do and Gloo cannot
            module.set_force_sum_reduction_for_comms(True)
    optimizer = step.build_optimizer(model)
    assert optimizer is not None
    plan = None if document is None else Plan.from_json(document)
    if plan is not None:
        objects = list(model.parameters())
        plan.apply(model, optimizer)
        units = dict(named_modules(model))
        assert plan.checkpoint and all(attached(units[entry.module]) is not None for entry in plan.checkpoint)
        assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))
    numbers = torch.Generator().manual_seed(dist.get_rank())
    batch = tuple(torch.randint(0, 2048, (_BATCH, _LENGTH), generator=numbers) for _ in range(2))
    losses = [float(step.run(model, optimizer, batch)) for _ in range(_STEPS)]
    with torch.no_grad():
        shards = [getattr(each, "_local_tensor", each).clone() for each in model.parameters()]
    rise = measure_rank_rise(lambda: step.run(model, optimizer, batch) and None, torch.device("cpu"))
    (adamw,) = optimizer.optimizers  # type: ignore[attr-defined]  # torchtitan's container has no state of its own
    resident = resident_bytes(load_trace(trace_path), model, adamw, "cpu", 1)
    if plan is not None:
        plan.remove(model)
    return Trained(losses, shards, resident + rise)
