"""Plans around accelerate's `Accelerator.prepare`: the step of its loop, and FSDP2's settings from a plan.

    plan = memfit.plan(step(accelerator, model, batch, optimizer), target="h100-sxm", budget="60GiB")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    plan.apply(model, optimizer)                      # before prepare or after it

Note [FSDP2 by accelerate]: `prepare` wraps modules by class, the input embedding, and the final norm with the output
layer as one group, each by itself. A plan has its units by name. Where `plan.apply(model, optimizer, engine="fsdp2")`
comes first, `prepare` finds a model that is sharded already and leaves it so, just as planned (its plugin names no
classes then). Where `prepare` comes first, the plan brings its checkpoint policies and says what is sharded otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfit.capture import Step
from memfit.errors import InputError
from memfit.integrations.planned_training import load, patched_attributes, unwrap_optimizer
from memfit.plans import Plan

OLDEST = "1.10"
accelerate = load("accelerate", OLDEST)
_FIXED = "SolveOptions(fixed=('reshard', 'prefetch'))"


def step(accelerator: Any, model: Any, batch: Any, optimizer: Any, **options: Any) -> Step:
    """Return the step of accelerate's loop, with its accumulation, its autocast and the batch that it fetches ahead.

    Model and optimizer may have been through `prepare`, unless that shards them. `options` are those of `memfit.Step`:
    `loss` where the model does not compute it, `clip_grad_norm`, `keep_output=False` for a loop that keeps the loss.
    """
    if not isinstance(accelerator, accelerate.Accelerator):
        raise InputError(f"this is a {type(accelerator).__name__}; give an accelerate.Accelerator")
    inner = accelerator.unwrap_model(model, keep_fp32_wrapper=True)
    options = {"accumulation_steps": accelerator.gradient_accumulation_steps, "resident_batches": 2, **options}
    made = Step(inner, batch, optimizer=unwrap_optimizer(optimizer), **options)
    if not accelerator.native_amp or getattr(inner, "_is_accelerate_prepared", False):
        return made
    if made.run is not None:
        raise InputError("a step with run= calls the model itself: prepare the model first, which adds its autocast")

    def run(model: nn.Module, optimizer: Any, batch: Any) -> None:
        with autocast_forward(accelerator, model):
            made.with_batch(batch).execute(model, optimizer, accelerator.device.type)

    return Step(inner, batch, optimizer=made.optimizer, run=run, resident_batches=made.resident_batches)


@contextlib.contextmanager
def autocast_forward(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Run the model under autocast with outputs in float32, as `Accelerator.prepare` makes it."""
    forward = model.forward

    def cast(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return forward(*args, **kwargs)

    with patched_attributes(model, forward=accelerate.utils.convert_outputs_to_fp32(cast)):
        yield


def fsdp_plugin(plan: Plan, model: nn.Module, **settings: Any) -> Any:
    """Return the plugin with which `Accelerator` shards a model as its plan says: `Accelerator(fsdp_plugin=...)`.

    `settings` are further ones of `FullyShardedDataParallelPlugin`. Refused is what it cannot say: units that are some
    modules of a class and not all, or that differ in `reshard_after_forward`, and more or less than one gathered ahead.
    """
    if plan.shard is None:
        raise InputError("this plan shards nothing; plan with ranks=... and without parallel='ddp'")
    if plan.shard.replicas > 1:
        raise InputError("this plan has replicas; give Accelerator a ParallelismConfig of its own for a hybrid mesh")
    units = {unit.module: unit.reshard_after_forward for unit in plan.shard.units if unit.module}
    kinds = {type(model.get_submodule(name)) for name in units}
    others = [name for name, module in model.named_modules() if type(module) in kinds and name not in units]
    if others:
        raise InputError(
            f"accelerate shards by class, and {others[0]!r} is of the class of a unit and none itself; call "
            "plan.apply(model, optimizer, engine='fsdp2') before prepare, which needs no plugin of the plan's"
        )
    reshards = set(units.values()) or {True}
    if len(reshards) > 1 or not isinstance(reshard := reshards.pop(), bool):
        raise InputError(
            "accelerate has one reshard_after_forward for all units, True or False, and this plan has others; call "
            f"plan.apply(model, optimizer, engine='fsdp2') before prepare, or plan with {_FIXED}"
        )
    if plan.shard.prefetch != 1:
        raise InputError(
            f"accelerate gathers one unit ahead, and this plan {plan.shard.prefetch}; call "
            f"plan.apply(model, optimizer, engine='fsdp2') before prepare, or plan with {_FIXED}"
        )
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshard,
        auto_wrap_policy="transformer_based_wrap" if kinds else "no_wrap",
        transformer_cls_names_to_wrap=sorted(kind.__name__ for kind in kinds) or None,
        mixed_precision_policy=_mixed_precision(plan),
        **{"cpu_ram_efficient_loading": False, "activation_checkpointing": False, **settings},
    )


def _mixed_precision(plan: Plan) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    assert plan.shard is not None
    names = (plan.shard.param_dtype, plan.shard.reduce_dtype)
    param, reduce = (None if name is None else getattr(torch, name) for name in names)
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce) if param or reduce else None


__all__ = ["fsdp_plugin", "step"]
