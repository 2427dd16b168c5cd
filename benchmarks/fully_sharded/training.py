"""The ways to train a model on several ranks: PyTorch's DDP, FSDP1 and FSDP2, and memfit's sharded runtime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from fully_sharded.model import Case
from memfit.sharded import Precision, shard

KINDS = ("DDP", "FSDP1", "FSDP2", "memfit")
KEPT = ("FSDP2 kept", "memfit kept")


def trained(case: Case, kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    """Return a model on this rank, its optimizer, and what runs one step and gives the loss."""
    torch.manual_seed(0)
    model = _parallel(case, kind, case.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(torch.distributed.get_rank())
    batch = case.batch()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.half and kind == "DDP"):
            output = model(batch)
        loss = case.loss(output, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, optimizer, step


def _parallel(case: Case, kind: str, model: nn.Module) -> nn.Module:
    dtype = torch.bfloat16 if case.half else None
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "FSDP1":
        logging.getLogger("torch.distributed.fsdp").setLevel(logging.ERROR)
        with warnings.catch_warnings():  # that it is deprecated, and that there is no GPU
            warnings.simplefilter("ignore")
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({case.unit}),
                device_id=torch.device("cpu"),
                mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if case.half else None,
            )
    if kind.startswith("FSDP2"):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if case.half else None)
        for module in model.modules():
            if isinstance(module, case.unit):
                fully_shard(module, mp_policy=policy, reshard_after_forward=kind == "FSDP2")
        return fully_shard(model, mp_policy=policy)  # the root is kept, by default as by memfit
    return shard(model, keep=kind == "memfit kept", precision=Precision(param_dtype=dtype))
