"""Which engine runs a plan on a model: `local`, `fsdp2` or `sharded`, and whether the model and the ranks suit it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from memfit.engines.loop_watch import user_level
from memfit.errors import InputError
from memfit.plans import DdpPlan, Engine, Plan, named_modules
from memfit.torch_private.wrappers import is_fully_sharded
from memfit.units import display_bytes

_ENGINES: tuple[Engine, ...] = get_args(Engine)


def resolve_engine(plan: Plan, given: str | None, wrappers: Sequence[str]) -> Engine:
    """Return the engine that was given, else the plan's, else `sharded` for several ranks and `local` for one.

    A plan that names no engine was found for FSDP2; it goes on that where it would be above its budget on `sharded`. An
    engine that does not suit the plan, or that would shard what is sharded already, is refused.
    """
    if given is not None and given not in _ENGINES:
        raise InputError(f"there is no engine {given!r}; write one of {', '.join(map(repr, _ENGINES))}")
    default: Engine = "local"
    if plan.shard is not None:
        default = "fsdp2" if _too_high(plan, "sharded") else "sharded"
    engine = next((each for each in _ENGINES if each == given), None) or plan.engine or default
    if plan.shard is None and engine != "local":
        why = f"replicates the model on {plan.ddp.ranks} ranks" if plan.ddp is not None else "is for one rank"
        raise InputError(
            f"engine {engine!r} shards a model over several ranks, and this plan {why}; leave the engine out, or plan "
            "with ranks=..."
        )
    if plan.shard is not None and engine == "local":
        raise InputError(
            f"engine 'local' runs on one device, and this plan shards the model over {plan.shard.ranks} ranks; write "
            "'fsdp2' or 'sharded', or plan with ranks=1"
        )
    if given is not None and given != "local" and wrappers:
        raise InputError(
            f"engine {given!r} shards the model, and this one is in {', '.join(wrappers)} already: give the plain "
            "model, or leave the engine out, and only the checkpoint policies of the plan are carried out"
        )
    peak_bytes = _too_high(plan, engine)
    if peak_bytes and not wrappers:
        raise InputError(
            f"this plan was made for engine {plan.engine or 'fsdp2'!r}; on {engine!r} it takes "
            f"{display_bytes(peak_bytes)}, above its budget of {display_bytes(plan.budget_bytes)}: plan with "
            f"engine={engine!r}"
        )
    return engine


def _too_high(plan: Plan, engine: Engine) -> int:
    """Return the peak that is predicted on an engine that the plan was not found for, if above the budget, else 0."""
    if plan.shard is None or engine == "local" or engine == (plan.engine or "fsdp2"):
        return 0
    peak_bytes = plan.shard.peak_by_engine.get(engine, 0)
    return peak_bytes if peak_bytes > plan.budget_bytes else 0


def check_ranks(plan: Plan, mesh: DeviceMesh | None) -> None:
    """Refuse a plan for another number of ranks than there are."""
    assert plan.shard is not None
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            f"this plan shards the model over {plan.shard.ranks} ranks, and there is no process group: start the "
            f"script with torchrun --nproc-per-node {plan.shard.ranks}, and call "
            "torch.distributed.init_process_group() first"
        )
    if plan.shard.replicas > 1:
        planned = (plan.shard.replicas, plan.shard.ranks)
        shape = (dist.get_world_size(),) if mesh is None else tuple(mesh.shape)
        if shape != ((plan.ranks,) if mesh is None else planned):
            raise InputError(
                f"this plan has {planned[0]} replicas of {planned[1]} ranks that shard the model, and here are "
                f"{' x '.join(map(str, shape))}; start {plan.ranks}, and leave the mesh out or give one of both"
            )
        return
    ranks = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    if ranks != plan.shard.ranks:
        raise InputError(
            f"this plan shards the model over {plan.shard.ranks} ranks, and here are {ranks}; start as many, or plan "
            f"with ranks={ranks}"
        )


def check_replicas(ddp: DdpPlan, model: nn.Module) -> None:
    """Refuse another number of ranks than the plan has, and a wrapper that keeps other buckets than it counts on.

    The caller wraps the model, before or after: what is not there yet cannot be looked at.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != ddp.ranks:
        ranks = dist.get_world_size()
        raise InputError(
            f"this plan replicates the model on {ddp.ranks} ranks, and here are {ranks}; start as many, or plan with "
            f"ranks={ranks}"
        )
    if not isinstance(model, DistributedDataParallel):
        return
    if ddp.gradient_as_bucket_view and not model.gradient_as_bucket_view:
        raise InputError(
            "this plan counts on gradients that are views of DDP's buckets, and the model keeps both; wrap it with "
            "DistributedDataParallel(model, gradient_as_bucket_view=True), or plan without"
        )


def warn_policies_only(plan: Plan, model: nn.Module, wrappers: Sequence[str]) -> None:
    """Say what a plan does and does not do on a model that something else wraps or shards, unless it counts on that."""
    if plan.mesh or (plan.ddp is not None and all("DistributedDataParallel" in each for each in wrappers)):
        return
    planned, differs = "one device", ""
    if plan.ddp is not None:
        planned = f"DistributedDataParallel on {plan.ddp.ranks} ranks"
    elif plan.shard is not None:
        planned = f"fully_shard over {plan.shard.ranks} ranks"
        if list(wrappers) == ["fully_shard"]:
            found = fully_shard_difference(plan, model)
            if found is None:
                return
            differs = f": {found}"
    advice = ""
    if plan.ddp is None and plan.ranks > 1 and all("DistributedDataParallel" in each for each in wrappers):
        advice = '; for DDP plan with options=SolveOptions(shard=ShardOptions(parallel="ddp")), or --parallel ddp'
    warnings.warn(
        f"the model is in {', '.join(wrappers)}: the plan's checkpoint policies are carried out, and nothing else. Its "
        f"memory was predicted for {planned}{differs or ', without what the wrapper shards, gathers or buckets'}"
        f"{advice}",
        stacklevel=user_level(),
    )


def fully_shard_difference(plan: Plan, model: nn.Module) -> str | None:
    """Say how a model was fully sharded otherwise than planned; None when it was sharded as planned."""
    assert plan.shard is not None
    from torch.distributed.tensor import DTensor  # such a model has loaded it

    from memfit.torch_private.fully_shard import names_prefetched, unit_settings

    sharded = {path: module for path, module in named_modules(model) if is_fully_sharded(module)}
    planned = {unit.module: unit for unit in plan.shard.units}
    for path in (*planned, *sharded):
        if (path in planned) != (path in sharded):
            here, there = ("whole", "a unit") if path in planned else ("a unit", "whole")
            return f"{path or 'the model itself'} is {here} here and {there} in the plan"
    meshes = [each.device_mesh for each in model.parameters() if isinstance(each, DTensor)]
    ranks = {mesh.size(mesh.ndim - 1) for mesh in meshes}
    if ranks != {plan.shard.ranks}:
        return f"it is sharded over {', '.join(map(str, sorted(ranks)))} ranks here and {plan.shard.ranks} in the plan"
    for path, module in sharded.items():
        reshards, *dtypes = unit_settings(module)
        names = [None if each is None else str(each).removeprefix("torch.") for each in dtypes]
        if path and reshards not in (None, bool(planned[path].reshard_after_forward)):
            fixed = 'SolveOptions(fixed=("reshard", "prefetch")) plans for a model that reshards all its units'
            return f"{path} has reshard_after_forward={reshards} here and {not reshards} in the plan ({fixed})"
        if names != [plan.shard.param_dtype, plan.shard.reduce_dtype]:
            wanted = f"{plan.shard.param_dtype} and {plan.shard.reduce_dtype}"
            return f"param_dtype and reduce_dtype are {names[0]} and {names[1]} here and {wanted} in the plan"
    if plan.shard.prefetch != 1 and not any(map(names_prefetched, sharded.values())):
        return f"it gathers 1 unit ahead here and {plan.shard.prefetch} in the plan (set_modules_to_forward_prefetch)"
    return None
