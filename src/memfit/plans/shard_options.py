"""The options that a plan's sharding was predicted with, for those who predict it again."""

from __future__ import annotations

from memfit.plans.document import Plan
from memfit.plans.record import Engine
from memfit.sharding import ShardOptions


def shard_options_of(plan: Plan, engine: Engine | None = None) -> ShardOptions:
    """Return how a plan divides its step over ranks, on its own engine or on another."""
    if plan.ddp is not None:
        return ShardOptions(
            parallel="ddp",
            bucket_cap_bytes=plan.ddp.bucket_cap_bytes,
            gradient_as_bucket_view=plan.ddp.gradient_as_bucket_view,
        )
    shard = plan.shard
    if shard is None:
        return ShardOptions()
    inner = [unit.reshard_after_forward for unit in shard.units if unit.module]
    alike = inner[0] if len(set(inner)) == 1 else True
    engine = engine or plan.engine
    return ShardOptions(
        units=tuple(unit.module for unit in shard.units if unit.module),
        shard_dtype=shard.shard_dtype,
        param_dtype=shard.param_dtype,
        reduce_dtype=shard.reduce_dtype,
        keep_last=inner.count(False) if alike is True else False,
        reshard_after_forward=alike,
        prefetch=shard.prefetch,
        replicas=shard.replicas,
        cpu_offload=shard.cpu_offload is True,
        engine=None if engine == "local" else engine,
    )
