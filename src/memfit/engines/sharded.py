"""A plan on memfit's own sharded runtime: the model is sharded as the plan says, and its units run their policies."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memfit.engines.optimizer_shards import check_optimizer
from memfit.errors import InputError, MemfitError
from memfit.plans import Plan, ShardedUnit, ShardPlan
from memfit.sharded import (
    Precision,
    Schedule,
    UnitOptions,
    check_agreement,
    device_of,
    make_comms,
    move_optimizer,
    resolve_mesh,
    shard,
)


def shard_as_planned(
    plan: Plan,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: DeviceMesh | None,
    refusal: MemfitError | None = None,
) -> None:
    """Shard a model as planned, and the optimizer's state with it.

    Ranks compare their plans before anything is changed; a rank that refuses, or has refused (`refusal`), says so.
    """
    assert plan.shard is not None
    mesh = resolve_mesh(model, mesh, replicas=plan.shard.replicas)
    precision = Precision()
    try:
        precision = _precision(plan, plan.shard, model)
        for optimizer in optimizers:
            check_optimizer(optimizer, {parameter: name for name, parameter in model.named_parameters()})
    except MemfitError as error:
        refusal = refusal or error
    content = hashlib.sha256(plan.to_json().encode()).hexdigest()[:12]
    settings = [f"a plan for {plan.fingerprint[:12]} with content {content} on engine sharded"]
    if refusal is not None:
        settings.append(f"a refusal ({refusal})".replace("\n", " "))
    try:
        for link in make_comms(mesh, device_of(mesh), None):
            if link is not None:
                check_agreement(link, settings)
    except MemfitError:
        if refusal is None:
            raise
    if refusal is not None:
        raise refusal
    shard(
        model,
        mesh=mesh,
        units={each.module: _unit_options(each) for each in plan.shard.units},
        precision=precision,
        schedule=Schedule(forward_prefetch=plan.shard.prefetch, backward_prefetch=plan.shard.prefetch),
        offload=True if plan.shard.cpu_offload else None,
    )
    for optimizer in optimizers:
        move_optimizer(optimizer)


def _unit_options(unit: ShardedUnit) -> UnitOptions:
    reshards = unit.reshard_after_forward
    if isinstance(reshards, bool):
        return UnitOptions(keep=not reshards)
    return UnitOptions(reshard_ranks=reshards)


def _precision(plan: Plan, planned: ShardPlan, model: nn.Module) -> Precision:
    """Return the plan's dtypes; without autocast a unit's inputs are cast with its parameters."""
    if planned.shard_dtype is not None:
        wanted = getattr(torch, planned.shard_dtype)
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != wanted:
                raise InputError(
                    f"the plan keeps shards in {planned.shard_dtype}, and {name!r} is {parameter.dtype}; call "
                    f"model.to(torch.{planned.shard_dtype}) before apply"
                )
    return Precision(
        param_dtype=None if planned.param_dtype is None else getattr(torch, planned.param_dtype),
        reduce_dtype=None if planned.reduce_dtype is None else getattr(torch, planned.reduce_dtype),
        cast_inputs="none" if plan.trace.autocast is not None else "units",
    )
