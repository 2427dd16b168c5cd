"""What mixed precision and reduction change in the gradients of a step: casts of parameters, and whole gradients.

Note [Casts]: autocast casts a float32 parameter once for each pass and keeps the copy; its backward casts the gradient
back. A parameter that is gathered in autocast's dtype needs neither, so both copies are taken out of the step, and the
gradient that autocast's copy had is the whole gradient.

Note [Arrivals]: autograd's last act for a gradient is to give it to its parameter. It takes it over (`detach`), copies
it (`clone`) or adds it to what is there (`add_`); the trace notes each as backward of the parameter's first use. Under
sharding a whole gradient is reduced as soon as the backward of its unit ends, so there is nothing to add it to: what
would have been added lives until then. A gradient that a first pass copies, because it is laid out in another way than
the parameter or somebody else holds it, is copied in every pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Op, Parameter, Phase, Trace
from memfit.cost import Runtime
from memfit.sharding.options import ShardDtypes, elements, item_bytes
from memfit.sharding.units import Pass, pass_of

_CAST = "aten._to_copy.default"
_TAKEN = ("aten.detach.default", "aten.alias.default")
_COPIED = ("aten.clone.default", "aten.new_empty_strided.default")
_ADDED = ("aten.add_.Tensor",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGradient:
    """The gradient of a parameter from one backward: made by op `alloc_at`, complete after op `ready`, and given to the
    parameter by op `arrived`.

    `storages` stand for it in the trace. `free_after` is when the step lets go of the parameter's gradient.
    """

    parameter: int
    storages: tuple[int, ...]
    alloc_at: int
    ready: int
    arrived: int
    free_after: int


def casts_of(trace: Trace, dtypes: ShardDtypes) -> dict[int, int]:
    """The ops that cast a parameter to the dtype in which it is gathered, and which parameter that is."""
    by_storage = {parameter.storage: number for number, parameter in enumerate(trace.parameters)}
    found = {}
    for index, op in enumerate(trace.ops):
        if op.name == _CAST and op.inputs and op.inputs[0].storage in by_storage:
            number = by_storage[op.inputs[0].storage]
            parameter = trace.parameters[number]
            if op.outputs[0].dtype == dtypes.gathered(parameter) != parameter.dtype:
                found[index] = number
    return found


def without_casts(runtime: Runtime, casts: Mapping[int, int]) -> Runtime:
    """The step without casts of parameters: their results take no memory, they and their backward no time."""
    if not casts:
        return runtime
    trace, op_ms = runtime.trace, runtime.op_ms.copy()
    storages = list(trace.storages)
    for index in casts:
        made = trace.ops[index].outputs[0].storage
        storages[made] = msgspec.structs.replace(storages[made], bytes=0)
    gone = [index for index, op in enumerate(trace.ops) if index in casts or _casts_back(op, casts)]
    op_ms[np.array(gone, np.int64)] = 0.0
    return Runtime(msgspec.structs.replace(trace, storages=tuple(storages)), op_ms)


def whole_gradients(
    trace: Trace, casts: Mapping[int, int], passes: Sequence[Pass], dtypes: ShardDtypes
) -> list[WholeGradient]:
    """Every gradient that a backward gives to a parameter (Note [Arrivals])."""
    writes: dict[int, list[int]] = defaultdict(list)
    arrivals: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        for ref in op.outputs:
            if ref.storage != NO_INDEX and not op.view and trace.storages[ref.storage].alloc_at == index:
                writes[ref.storage].append(index)
        for storage in op.mutates:
            writes[storage].append(index)
        if op.phase is Phase.BACKWARD and op.forward_op != NO_INDEX and op.name in (*_TAKEN, *_COPIED, *_ADDED):
            arrivals[op.forward_op].append(index)
    uses = _first_uses(trace)
    claimed = {parameter.gradient for parameter in trace.parameters}
    found: list[WholeGradient] = []
    for number, parameter in enumerate(trace.parameters):
        if not parameter.trainable:
            continue
        own: dict[int, tuple[int, int, int]] = {}  # for each pass the op, the storage and the gradient that it joins
        for index in arrivals[uses.get(parameter.storage, NO_INDEX)]:
            place = pass_of(passes, index)
            arrived = _arrived(trace, parameter, index, claimed, passes, is_cast=number in casts.values())
            if arrived is not None and place not in own:
                own[place] = index, *arrived
                claimed.add(arrived[0])
        alloc_at = trace.storages[parameter.gradient].alloc_at if parameter.gradient != NO_INDEX else BEFORE_STEP
        if alloc_at != BEFORE_STEP and alloc_at < len(trace.ops) and trace.ops[alloc_at].phase is Phase.BACKWARD:
            own.setdefault(pass_of(passes, alloc_at), (alloc_at, parameter.gradient, parameter.gradient))
        copied = any(trace.ops[index].name in _COPIED for index, _, _ in own.values())
        for index, storage, kept in own.values():
            whole = _whole(trace, number, index, storage, kept, casts, passes, writes, dtypes)
            if copied and trace.ops[index].name in _ADDED:
                whole = replace(whole, storages=(), alloc_at=index, ready=index, arrived=index)
            found.append(whole)
    return found


def gradients_before(trace: Trace) -> dict[int, int]:
    """The parameters that have a gradient before the step, and the op after which it is freed."""
    return {
        number: trace.storages[parameter.gradient].free_after
        for number, parameter in enumerate(trace.parameters)
        if parameter.gradient != NO_INDEX and trace.storages[parameter.gradient].alloc_at == BEFORE_STEP
    }


def zeroed_gradients(trace: Trace) -> dict[int, int]:
    """The storages of gradients that the step begins with and frees, and the op after which each is freed."""
    return {
        number: storage.free_after
        for number, storage in enumerate(trace.storages)
        if storage.category is Category.GRADIENT
        and storage.alloc_at == BEFORE_STEP
        and storage.free_after != AFTER_STEP
    }


def _arrived(
    trace: Trace, parameter: Parameter, index: int, claimed: set[int], passes: Sequence[Pass], *, is_cast: bool
) -> tuple[int, int] | None:
    """The storage that came with an op of autograd's last act, and the gradient that it became part of.

    Parameters of one op have their first use in common; what is known to be of another is left to that. What is added
    to a gradient of the same pass is a part of it: several ops use the parameter, as where weights are tied. Where some
    of them use a cast of it, that gradient is one of the cast, and is not there.
    """
    op = trace.ops[index]
    made = op.outputs[0]
    if made.shape != parameter.shape or made.dtype != parameter.dtype:
        return None
    storage = op.inputs[-1].storage if op.name in _ADDED else made.storage
    alloc_at = trace.storages[storage].alloc_at if storage != NO_INDEX else BEFORE_STEP
    if alloc_at == BEFORE_STEP or trace.ops[alloc_at].phase is not Phase.BACKWARD:
        return None
    if op.name in _ADDED:
        began = trace.storages[parameter.gradient].alloc_at if parameter.gradient != NO_INDEX else BEFORE_STEP
        earlier = is_cast or began < passes[pass_of(passes, index)].begin
        return (storage, parameter.gradient) if parameter.gradient in op.mutates and earlier else None
    return (storage, storage) if storage == parameter.gradient or storage not in claimed else None


def _whole(
    trace: Trace,
    number: int,
    index: int,
    storage: int,
    kept: int,
    casts: Mapping[int, int],
    passes: Sequence[Pass],
    writes: Mapping[int, list[int]],
    dtypes: ShardDtypes,
) -> WholeGradient:
    parameter, own = trace.parameters[number], passes[pass_of(passes, index)]
    storages: tuple[int, ...] = ()
    alloc_at = index
    if trace.storages[storage].bytes == elements(parameter) * item_bytes(parameter.dtype):
        storages, alloc_at = (storage,), trace.storages[storage].alloc_at
    made = trace.ops[alloc_at]
    if casts.get(made.forward_op) == number and _casts_back(made, casts):
        low = made.inputs[0].storage
        if trace.storages[low].bytes == elements(parameter) * item_bytes(dtypes.gathered(parameter)):
            storages, alloc_at, storage = (*storages, low), trace.storages[low].alloc_at, low
    ready = max((op for op in writes[storage] if alloc_at <= op < own.end), default=alloc_at)
    return WholeGradient(
        parameter=number,
        storages=storages,
        alloc_at=alloc_at,
        ready=ready,
        arrived=max(ready, index),
        free_after=trace.storages[kept].free_after,
    )


def _casts_back(op: Op, casts: Mapping[int, int]) -> bool:
    return op.phase is Phase.BACKWARD and op.name == _CAST and op.forward_op in casts


def _first_uses(trace: Trace) -> dict[int, int]:
    """The first op that reads each parameter."""
    wanted = {parameter.storage for parameter in trace.parameters}
    found: dict[int, int] = {}
    for index, op in enumerate(trace.ops):
        for ref in op.inputs:
            if ref.storage in wanted:
                found.setdefault(ref.storage, index)
    return found
