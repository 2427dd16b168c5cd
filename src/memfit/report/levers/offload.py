"""The optimizer's state, or what autograd holds, in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memfit.report.levers.case import Case, Effect
from memfit.report.levers.lever import Lever
from memfit.trace import NEVER, Category, Phase
from memfit.units import display_bytes


def offload(case: Case) -> Iterator[Lever]:
    """Both kinds, where the device has memory of its own."""
    if case.target.device.type == "cpu":
        return
    yield from _optimizer(case)
    yield from _activations(case)


def _optimizer(case: Case) -> Iterator[Lever]:
    """The host does the optimizer's step: gradients go there and parameters come back."""
    state = case.row(Category.OPTIMIZER_STATE)
    if not state.any():
        return
    temporaries = np.where(case.in_optimizer, case.row(Category.TEMPORARY), 0)
    left = case.timeline.during_bytes - state - temporaries
    link = case.target.device.host_link
    moved = 2 * _trained_bytes(case)
    yield case.lever(
        "optimizer on the host",
        "fully_shard(..., offload_policy=CPUOffloadPolicy()), or an optimizer over copies of the parameters on the CPU",
        Effect(peak_bytes=int(left.max()), step_ms=case.step_ms + link.transfer_ms(moved)),
        "estimated",
        assumes=f"{display_bytes(moved)} over {_link(case)}, nothing hidden; a host as fast as the device",
    )


def _activations(case: Case) -> Iterator[Lever]:
    """What autograd alone holds goes to the host and comes back when its backward begins."""
    timeline, trace = case.timeline, case.timeline.trace
    lives, planned = timeline.lives, timeline.planned
    first = _first_backward_ops(case)
    at = timeline.step_instants
    change = np.zeros(lives.instants + 2, np.int64)
    moved = 0
    for number in range(len(lives.born)):
        storage = int(planned.storage[number])
        if storage == NEVER or int(planned.remade[number]) != NEVER:
            continue
        found = trace.storages[storage]
        if found.category is not Category.ACTIVATION or found.birth == NEVER or not found.saved_by:
            continue
        back = min((first[op] for op in found.saved_by if op in first), default=NEVER)
        released = found.released if found.released != NEVER else len(trace.ops)
        gone = max(released, found.birth)
        if back == NEVER or back <= gone + 1:
            continue
        begins, ends = int(at[gone]) + 1, min(int(at[back]), int(lives.dies[number]) + 1)
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
        Effect(peak_bytes=int(left.max()), step_ms=case.step_ms + 2 * link.transfer_ms(moved)),
        "estimated",
        assumes=f"{display_bytes(moved)} over {_link(case)} and back, nothing hidden",
    )


def _first_backward_ops(case: Case) -> dict[int, int]:
    first: dict[int, int] = {}
    for index, op in enumerate(case.trace.ops):
        if op.phase is Phase.BACKWARD and op.forward_op != NEVER:
            first.setdefault(op.forward_op, index)
    return first


def _trained_bytes(case: Case) -> int:
    """What one rank has of the parameters that are trained."""
    whole = sum(case.trace.storages[each.storage].bytes for each in case.trace.parameters if each.trainable)
    return -(-whole // case.target.ranks)


def _link(case: Case) -> str:
    link = case.target.device.host_link
    return f"{link.name} ({link.bandwidth_bytes_per_s / 1e9:g} GB/s)"
