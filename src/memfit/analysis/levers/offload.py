"""Levers of offloading to host memory: optimizer state, parameters, saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from memfit.analysis.levers.case import Case, Effect, Lever
from memfit.analysis.levers.replanned import wrapped
from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Parameter, Phase
from memfit.cost import Collective, Runtime
from memfit.sharding import HostStep, ShardDtypes, shard, shard_bytes
from memfit.units import display_bytes


def offload(case: Case) -> Iterator[Lever]:
    """Yield the levers of offloading, where the device has memory of its own."""
    if case.target.device.type == "cpu":
        return
    if case.target.ranks == 1:
        yield from _optimizer(case)
    elif case.report.problem.options.shard.parallel == "fsdp" and "cpu_offload" not in case.decided:
        yield from _shards(case)
    if "offload" not in case.decided:
        yield from _activations(case)


def _optimizer(case: Case) -> Iterator[Lever]:
    """Yield the lever of stepping on the host: gradients are copied there, and parameters come back."""
    state = case.row(Category.OPTIMIZER_STATE)
    if not state.any():
        return
    temporaries = np.where(case.in_optimizer, case.row(Category.TEMPORARY), 0)
    left = case.timeline.during_bytes - state - temporaries
    trained = [each for each in case.trace.parameters if each.trainable]
    moved = sum(case.trace.storages[each.storage].bytes for each in trained)
    host = HostStep.of(moved, sum(_state_bytes(case, each) for each in trained))
    named = case.trace.optimizer.split(", ")[0] or "AdamW"
    yield case.lever(
        "optimizer on the host",
        f"host = [p.detach().cpu() for p in model.parameters()]; optimizer = torch.optim.{named}(host, ...); "
        "each step: h.grad = p.grad.cpu(), optimizer.step(), p.data.copy_(h)",
        Effect(
            peak_bytes=int(left.max()),
            step_ms=case.step_ms - _device_step_ms(case) + 2 * _link_ms(case, moved) + host.step_ms,
        ),
        "estimated",
        assumes=f"{display_bytes(moved)} of gradients over {_link(case)} and parameters back, nothing hidden; {host}",
    )


def _shards(case: Case) -> Iterator[Lever]:
    """Yield the lever of FSDP2's CPU offload: shards of parameters, gradients and state are on the host.

    Each all-gather copies a unit's shards to the device first, each reduction its gradients to the host, which steps.
    """
    given = case.report.problem
    runtime = Runtime.of(case.trace, case.cost)
    sharding = shard(given.timeline, runtime, case.target, given.options.shard, on_host=True)
    changed = replace(given, sharding=sharding)
    dtypes = ShardDtypes.of(case.trace, given.options.shard)
    trained = [each for each in case.trace.parameters if each.trainable]
    kept = {each: shard_bytes(each, case.target.ranks, dtypes.kept(each)) for each in trained}
    state = sum(_state_bytes(case, each) * kept[each] // max(1, _whole_bytes(case, each)) for each in trained)
    host = HostStep.of(sum(kept.values()), state)
    waits_ms = sharding.exposed_ms - given.exposed_ms
    steps_ms = given.runtime.by_phase_ms[Phase.OPTIMIZER]
    there = sum(each.host_bytes for each in sharding.transfers if each.kind is Collective.ALL_GATHER)
    back = sum(each.host_bytes for each in sharding.transfers if each.kind is Collective.REDUCE_SCATTER)
    yield case.lever(
        "parameters, gradients and optimizer on the host",
        f"fully_shard(..., offload_policy=CPUOffloadPolicy()) for {wrapped(case)}, on {case.target.ranks} ranks; "
        'init_process_group("cpu:gloo,cuda:nccl")',
        Effect(
            peak_bytes=changed.replay(case.chosen).peak_bytes,
            step_ms=case.step_ms + waits_ms - steps_ms + host.step_ms,
        ),
        "estimated",
        assumes=f"{display_bytes(there)} over {_link(case)} for gathers and {display_bytes(back)} back, "
        f"beside compute where there is enough of it; {host}",
    )


def _activations(case: Case) -> Iterator[Lever]:
    """Yield the lever of offloading what only autograd holds until its backward begins."""
    timeline, trace = case.timeline, case.timeline.trace
    table = timeline.allocations
    first = _first_backward_ops(case)
    at = timeline.step_instants
    change = np.zeros(table.instants + 2, np.int64)
    moved = 0
    for number in range(len(table.alloc_at)):
        storage = int(table.storage[number])
        if storage == NO_INDEX or int(table.remade[number]) != NO_INDEX:
            continue
        found = trace.storages[storage]
        if found.category is not Category.ACTIVATION or found.alloc_at == BEFORE_STEP or not found.saved_by:
            continue
        back = min((first[op] for op in found.saved_by if op in first), default=NO_INDEX)
        released = found.released if found.released != AFTER_STEP else len(trace.ops)
        gone = max(released, found.alloc_at)
        if back == NO_INDEX or back <= gone + 1:
            continue
        begins, ends = int(at[gone]) + 1, min(int(at[back]), int(table.free_after[number]) + 1)
        if begins < ends:
            change[begins] -= found.bytes
            change[ends] += found.bytes
            moved += found.bytes
    if not moved:
        return
    left = timeline.during_bytes + np.cumsum(change)[: len(timeline.during_bytes)]
    link = case.target.device.host_link
    yield case.lever(
        "activations on the host",
        "with torch.autograd.graph.saved_tensors_hooks(to_host, to_device): loss = ...  # but for parameters",
        Effect(peak_bytes=int(left.max()), step_ms=case.step_ms + 2 * link.copy_ms(moved)),
        "estimated",
        assumes=f"{display_bytes(moved)} over {_link(case)} and back, nothing hidden",
    )


def _first_backward_ops(case: Case) -> dict[int, int]:
    first: dict[int, int] = {}
    for index, op in enumerate(case.trace.ops):
        if op.phase is Phase.BACKWARD and op.forward_op != NO_INDEX:
            first.setdefault(op.forward_op, index)
    return first


def _device_step_ms(case: Case) -> float:
    """Return the device's time for the optimizer's step, without what runs before it reads a parameter (clipping)."""
    wanted = {number for each in case.trace.parameters for number in (each.storage, *each.state)}
    steps = [index for index, op in enumerate(case.trace.ops) if op.phase is Phase.OPTIMIZER]
    begun = (index for index in steps if any(ref.storage in wanted for ref in case.trace.ops[index].inputs))
    first = next(begun, len(case.trace.ops))
    return float(sum(case.report.runtime.op_ms[index] for index in steps if index >= first))


def _whole_bytes(case: Case, parameter: Parameter) -> int:
    return case.trace.storages[parameter.storage].bytes


def _state_bytes(case: Case, parameter: Parameter) -> int:
    return sum(case.trace.storages[each].bytes for each in parameter.state)


def _link_ms(case: Case, n_bytes: int) -> float:
    return case.target.device.host_link.copy_ms(n_bytes)


def _link(case: Case) -> str:
    link = case.target.device.host_link
    return f"{link.name} ({link.copy_bytes_per_s / 1e9:g} GB/s)"
