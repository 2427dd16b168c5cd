"""A step that was captured on several ranks as it is (`Trace.mesh`): its collectives, units and times.

Its levels are those of the trace; nothing is added and nothing taken away. What the capture does not say is how long
collectives take and what waits for them: they run beside the ops, one after another, and each is waited for where its
result is first read, where the buffer that it is given is freed, which the runtime does after waiting, or where the
backward that began it ends.
"""

from __future__ import annotations

import math

import numpy as np

from memfit.capture import AFTER_STEP, NO_INDEX, Category, CollectiveCall, Parameter, Phase, Storage, Trace
from memfit.cost import Collective, CollectiveModel, Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.memory import Stream, Timeline
from memfit.paths import around
from memfit.sharding.bubbles import StageTimes, find_bubbles, find_stage_times
from memfit.sharding.mesh_links import group_of
from memfit.sharding.options import padded_elements
from memfit.sharding.result import Sharding
from memfit.sharding.schedule import (
    Event,
    EventKind,
    ShardSchedule,
    Transfer,
    collective_waits,
    slowed_ms,
)
from memfit.sharding.units import ShardUnit

_COPY_OUT = "fsdp.split_with_sizes_copy.default"


def captured_ranks(timeline: Timeline, runtime: Runtime, target: Target) -> Sharding:
    """Return the step of a rank, as it was captured on a mesh of as many ranks as the target has."""
    trace = timeline.trace
    ranks = math.prod(trace.mesh.values())
    if ranks != target.ranks:
        shape = " x ".join(f"{name} {size}" for name, size in trace.mesh.items())
        raise InputError(
            f"the step was captured on {ranks} ranks ({shape}), and the target has {target.ranks}; give ranks={ranks}"
        )
    times = runtime.op_ms.copy()
    times[[each.op for each in trace.collectives]] = 0.0  # they run beside the ops
    runtime = Runtime(trace, times)
    units = _units(trace)
    schedule = _schedule(trace, target, tuple(unit.module for unit in units) or ("",))
    communication_ms, waits = collective_waits(runtime, target, schedule)
    waited_ms = sum(waits.values())
    beside_ms = slowed_ms(schedule.transfers, target, communication_ms, waited_ms)
    sent_ms, pipelines = _pipelined(trace, runtime, target, waits)
    bubble_ms = sum(find_bubbles([each])[0].waited_ms for each in pipelines)
    return Sharding(
        runtime=runtime,
        before_by_row=timeline.before_by_row,
        during_by_row=timeline.during_by_row,
        units=units,
        removed=frozenset(),
        allocations=(),
        schedule=schedule,
        communication_ms=communication_ms + sent_ms,
        exposed_ms=waited_ms + beside_ms + bubble_ms,
        beside_ms=beside_ms,
        shard_dtype=None,
        param_dtype=None,
        reduce_dtype=None,
        bubble_ms=bubble_ms,
        pipelines=pipelines,
    )


def _pipelined(
    trace: Trace, runtime: Runtime, target: Target, waits: dict[int, float]
) -> tuple[float, tuple[StageTimes, ...]]:
    """Return the time of what stages send and receive, and of what this rank's stages compute in each pipeline."""
    model = CollectiveModel(target)
    sent = [each for each in trace.collectives if _is_in_pipeline(trace, each)]
    times = [model.collective_ms(Collective.SEND, each.bytes, group_of(trace.mesh, each, target)) for each in sent]
    transfer_ms = sum(times) / len(times) if times else 0.0
    stages = (find_stage_times(run, runtime, waits, transfer_ms) for run in trace.pipelines)
    return sum(times), tuple(each for each in stages if each is not None)


def _is_in_pipeline(trace: Trace, call: CollectiveCall) -> bool:
    """Return whether a message is one of a schedule's, whose waits are the pipeline's bubble."""
    return call.kind == Collective.SEND.value and any(run.order for run in trace.pipelines)


def _units(trace: Trace) -> tuple[ShardUnit, ...]:
    """Return the modules that gather their parameters in the forward, in the order in which they first do.

    Whole gradients have the dtype of gathered parameters, and their bytes are counted with the padding.
    """
    found: dict[str, list[CollectiveCall]] = {}
    for each in trace.collectives:
        op = trace.ops[each.op]
        if each.kind == Collective.ALL_GATHER.value and op.phase is Phase.FORWARD and op.name.startswith("c10d."):
            found.setdefault(_module(trace, each), []).append(each)
    held: dict[str, list[Parameter]] = {module: [] for module in found}
    for parameter in trace.parameters:
        home = next((path for path in reversed(around(parameter.names[0])) if path in held), None)
        if home is not None:
            held[home].append(parameter)
    units = []
    for module, calls in found.items():
        first = calls[0]
        trained = sum(padded_elements(each, first.ranks) for each in held[module] if each.trainable)
        whole = sum(padded_elements(each, first.ranks) for each in held[module])
        gradient_bytes = first.bytes * trained // whole if whole else 0
        units.append(
            ShardUnit(
                module=module,
                kept=not _gathers_again(trace, first),
                parameters=len(held[module]),
                shard_bytes=first.bytes // first.ranks,
                gathered_bytes=first.bytes,
                gradient_bytes=gradient_bytes,
                reduced_bytes=gradient_bytes,
                calls=(),
            )
        )
    return tuple(units)


def _gathers_again(trace: Trace, call: CollectiveCall) -> bool:
    """Return whether what a call gathers is freed before the backward begins."""
    began = next((index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD), len(trace.ops))
    whole = _gathered(trace, call.op)  # FSDP1 gathers into the parameter
    if not whole:
        copies = (at for at in range(call.op + 1, len(trace.ops)) if trace.ops[at].name == _COPY_OUT)
        whole = _gathered(trace, next(copies))  # FSDP2 fills it from the collective's result
    return any(each.free_after != AFTER_STEP and each.free_after < began for each in whole)


def _gathered(trace: Trace, op: int) -> list[Storage]:
    """Return the gathered parameters that an op reads or writes."""
    storages = (trace.storages[ref.storage] for ref in trace.ops[op].inputs if ref.storage >= 0)
    return [each for each in storages if each.category is Category.GATHERED_PARAMETER]


def _module(trace: Trace, call: CollectiveCall) -> str:
    """Return the module that a collective is for: FSDP1's gathers are outside of all calls of it."""
    whole = _gathered(trace, call.op)
    if whole:
        return whole[0].module
    op = trace.ops[call.op]
    return trace.calls[op.call].module if op.call != NO_INDEX else ""


def _schedule(trace: Trace, target: Target, modules: tuple[str, ...]) -> ShardSchedule:
    """Return when each collective is begun and waited for."""
    readers = _first_readers(trace)
    transfers, events = [], []
    copied_out = False
    for place, each in enumerate(trace.collectives):
        if _is_in_pipeline(trace, each):
            continue
        number = len(transfers)
        op = trace.ops[each.op]
        needed = readers[place]
        forward = op.phase is Phase.FORWARD and each.kind == Collective.ALL_GATHER.value
        module = _module(trace, each)
        unit = modules.index(module) if module in modules else 0
        stream = Stream(each.stream)
        transfers.append(
            Transfer(
                kind=Collective(each.kind),
                module=module,
                size_bytes=each.bytes,
                issued=each.op,
                needed=needed,
                ahead=forward and copied_out and stream is Stream.GATHER,
                stream=stream,
                group=group_of(trace.mesh, each, target),
            )
        )
        if stream is not Stream.COMPUTE:  # what ops wait for at once is between gathers, and not their end
            copied_out = forward
        events.append(Event(each.op, EventKind.BEGIN, unit, each.bytes, stream, number))
        events.append(Event(needed, EventKind.WAIT, unit, each.bytes, Stream.COMPUTE, number))
    # what is waited for before an op comes before what is begun with it
    events.sort(key=lambda event: (event.moment, event.kind is EventKind.BEGIN, event.number))
    return ShardSchedule(modules=modules, buffers=(), transfers=tuple(transfers), events=tuple(events))


def _first_readers(trace: Trace) -> list[int]:
    """Return, for each collective, the op before which it is waited for; the end of the step where none needs it.

    One that a backward begins is waited for when that ends: DDP and both FSDPs do.
    An op on another stream does not hold up the ops: what it writes is not there before the collective's result.
    """
    collective = {each.op for each in trace.collectives}
    waiting: dict[int, list[int]] = {}
    ends = _backward_ends(trace)
    found = [ends[each.op] for each in trace.collectives]
    for number, each in enumerate(trace.collectives):
        op = trace.ops[each.op]
        made = {ref.storage for ref in op.outputs}
        for storage in {ref.storage for ref in op.inputs} - made:
            freed = trace.storages[storage].free_after
            if trace.storages[storage].category is not Category.COMMUNICATION or freed == AFTER_STEP:
                continue
            # FSDP1 frees it at once: the allocator keeps it until the stream is done (`record_stream`)
            if any(index not in trace.op_streams for index in range(each.op + 1, freed + 1)):
                found[number] = min(found[number], freed + 1)
        for storage in made:
            waiting.setdefault(storage, []).append(number)
    for index, op in enumerate(trace.ops):
        if op.view or index in collective:
            continue
        for ref in op.inputs:
            for number in waiting.get(ref.storage, ()):
                if trace.collectives[number].op >= index:
                    continue
                if index not in trace.op_streams:
                    found[number] = min(found[number], index)
                else:
                    for written in {*(made.storage for made in op.outputs), *op.mutates} - {ref.storage}:
                        waiting.setdefault(written, []).append(number)
    return [
        int(np.clip(moment, trace.collectives[number].op + 1, len(trace.ops))) for number, moment in enumerate(found)
    ]


def _backward_ends(trace: Trace) -> list[int]:
    """Return, for each op of a backward, the first one after that backward; for others the end of the step."""
    ends, end = [len(trace.ops)] * len(trace.ops), len(trace.ops)
    for index in range(len(trace.ops) - 1, -1, -1):
        if trace.ops[index].phase is Phase.BACKWARD:
            ends[index] = end
        else:
            end = index
    return ends
