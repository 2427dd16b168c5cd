"""What fully sharded training changes in a step: levels of memory and time of communication, for fixed units.

Each rank keeps a shard of every parameter, gradient and optimizer state, cut along the first dimension and padded to
whole rows. What a unit gathers, reduces and frees, and when, is in Note [Sharded runtime].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memfit.capture import NEVER, Category, Parameter, Phase
from memfit.cost import Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.sharding.allocations import Levels
from memfit.sharding.ddp import replicate
from memfit.sharding.gradients import WholeGradient, casts_of, whole_gradients, without_casts
from memfit.sharding.options import (
    ShardDtype,
    ShardDtypes,
    ShardOptions,
    elements,
    item_bytes,
    on_shards,
    padded_elements,
    shard_bytes,
)
from memfit.sharding.result import Sharding
from memfit.sharding.schedule import ShardedRuntime, Transfer, actings, communication, copies_ms, slowed_ms
from memfit.sharding.units import ShardCall, ShardUnit, find_passes, find_units, members_of, repeated_blocks

__all__ = [
    "ShardCall",
    "ShardDtype",
    "ShardOptions",
    "ShardUnit",
    "Sharding",
    "Transfer",
    "repeated_blocks",
    "shard",
    "shard_bytes",
]


def shard(
    timeline: Timeline,
    runtime: Runtime,
    target: Target,
    options: ShardOptions | None = None,
    *,
    on_host: bool = False,
) -> Sharding:
    """The step as one rank of the target sees it: fully sharded, or replicated where the options say `ddp`.

    With `on_host`, shards, their gradients and the optimizer are in the host's memory, and the device has no part in
    the optimizer's step but its time, which is left as it is.
    """
    options = options or ShardOptions()
    if options.parallel == "ddp":
        if on_host:
            raise InputError("a replicated step (DDP) cannot have its shards on the host; it has none")
        return replicate(timeline, runtime, target, options)
    ranks, dtypes = target.ranks, ShardDtypes.of(timeline.trace, options)
    casts = casts_of(timeline.trace, dtypes)
    runtime = on_shards(without_casts(runtime, casts), target.device, ranks, dtypes)
    trace = runtime.trace
    passes, members = find_passes(trace), members_of(trace, options)
    units = find_units(trace, members, passes, ranks, dtypes)
    levels = Levels(timeline)
    for index in casts:
        levels.take(trace.ops[index].outputs[0].storage)
    gradients = whole_gradients(trace, casts, passes, dtypes)
    home = {number: name for name, numbers in members.items() for number in numbers}
    if on_host:
        _leave_on_host(levels, gradients)
    else:
        for number, parameter in enumerate(trace.parameters):
            _shard_parameter(levels, parameter, home[number], ranks, dtypes)
        _shard_gradients(levels, gradients, ranks, dtypes)
        _shard_optimizer_temporaries(levels, ranks, dtypes)
    sharded = ShardedRuntime(trace, levels, ranks, dtypes, units, list(members.values()), gradients, on_host)
    sharded.run(actings(units, passes))
    before, during = levels.levels()
    communication_ms, waited_ms = communication(runtime, target, sharded.transfers, sharded.program)
    beside_ms = slowed_ms(sharded.transfers, target, communication_ms, waited_ms)
    if target.device.type == "cuda":
        beside_ms += copies_ms(sharded.transfers, units, target.device)
    return Sharding(
        runtime=runtime,
        before_by_row=before,
        during_by_row=during,
        units=units,
        removed=levels.removed,
        allocations=levels.allocations,
        transfers=tuple(sharded.transfers),
        communication_ms=communication_ms,
        exposed_ms=waited_ms + beside_ms,
        beside_ms=beside_ms,
        shard_dtype=dtypes.shard,
        param_dtype=dtypes.param,
        reduce_dtype=dtypes.reduce,
    )


def _leave_on_host(levels: Levels, gradients: Sequence[WholeGradient]) -> None:
    """Shards of parameters, gradients and state are not on the device, nor is what the optimizer's step makes."""
    trace = levels.timeline.trace
    for parameter in trace.parameters:
        levels.take(parameter.storage)
        if parameter.gradient != NEVER:
            levels.take(parameter.gradient)
    for gradient in gradients:
        for storage in gradient.storages:
            levels.take(storage)
    for number, storage in enumerate(trace.storages):
        made = trace.ops[storage.alloc_at].phase if 0 <= storage.alloc_at < len(trace.ops) else None
        if storage.category is Category.OPTIMIZER_STATE or made is Phase.OPTIMIZER:
            levels.take(number)


def _shard_parameter(levels: Levels, parameter: Parameter, module: str, ranks: int, dtypes: ShardDtypes) -> None:
    """Parameter and optimizer state become shards."""
    dtype = dtypes.kept(parameter)
    levels.replace(parameter.storage, Category.PARAMETER, shard_bytes(parameter, ranks, dtype), module)
    scale = item_bytes(dtype) / item_bytes(parameter.dtype)
    for storage in parameter.state:
        whole_bytes = levels.timeline.trace.storages[storage].bytes
        if whole_bytes < elements(parameter):  # a step counter, not a state of each element
            continue
        part = padded_elements(parameter, ranks) / max(1, elements(parameter)) / ranks
        n_bytes = int(np.ceil(whole_bytes * part * scale))
        levels.replace(storage, Category.OPTIMIZER_STATE, n_bytes, module)


def _shard_gradients(levels: Levels, gradients: Sequence[WholeGradient], ranks: int, dtypes: ShardDtypes) -> None:
    """Whole gradients leave the step: the runtime has its own. One that the step began with is a shard throughout."""
    for gradient in gradients:
        for storage in gradient.storages:
            levels.take(storage)
    for parameter in levels.timeline.trace.parameters:
        if parameter.gradient != NEVER and not levels.has_taken(parameter.gradient):
            n_bytes = shard_bytes(parameter, ranks, dtypes.kept(parameter))
            levels.replace(parameter.gradient, Category.GRADIENT, n_bytes)


def _shard_optimizer_temporaries(levels: Levels, ranks: int, dtypes: ShardDtypes) -> None:
    """What the optimizer's ops make is as large as the shards they work on, in proportion to the whole parameters."""
    trace = levels.timeline.trace
    trained = [parameter for parameter in trace.parameters if parameter.trainable]
    whole = sum(trace.storages[parameter.storage].bytes for parameter in trained)
    kept = sum(shard_bytes(parameter, ranks, dtypes.kept(parameter)) for parameter in trained)
    part = kept / whole if whole else 1.0
    for number, storage in enumerate(trace.storages):
        if storage.category is not Category.TEMPORARY or levels.has_taken(number):
            continue
        if 0 <= storage.alloc_at < len(trace.ops) and trace.ops[storage.alloc_at].phase is Phase.OPTIMIZER:
            levels.replace(number, Category.TEMPORARY, int(np.ceil(storage.bytes * part)))
