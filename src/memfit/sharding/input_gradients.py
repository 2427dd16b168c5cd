"""Gradients of a unit's inputs that FSDP2 holds until those of all inputs have come.

Note [Held input gradients]: `RegisterPostBackwardFunction` (torch/distributed/fsdp/_fully_shard/_fsdp_state.py) is one
autograd node between a unit and all of its inputs. It runs, and the unit's post-backward with it, when the gradients of
all inputs have come; the engine holds what has come before. Where an input is read by other units too, as an encoder's
output is by every block of a decoder, the step as it was captured adds each gradient to the sum so far at once. Under
FSDP2 the sum waits: it and the gradient are both there until the unit's backward has ended.

What is added here is that gradient, from the op that adds it in the captured step to the end of the unit's backward.
A unit adds the gradients of one input by itself first, so it holds one for each input. Units in units hold it until the
outermost one that the sum so far is from outside of has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memfit.capture import NO_INDEX, Category, Op, Phase, Trace
from memfit.sharding.gradients import WholeGradient
from memfit.sharding.units import ShardCall, ShardUnit

_IN_PLACE, _ADDED = "aten.add_.Tensor", "aten.add.Tensor"


class HeldGradient(NamedTuple):
    """Bytes that a unit holds from op `begin` on until op `end`."""

    module: str
    category: Category
    size_bytes: int
    begin: int
    end: int


def held_input_gradients(
    trace: Trace, units: Iterable[ShardUnit], gradients: Iterable[WholeGradient]
) -> list[HeldGradient]:
    """Return what FSDP2 holds of the gradients of units' inputs, that the captured step does not."""
    inputs = {(call.module, call.begin): frozenset(call.inputs) for call in trace.calls}
    runs = [
        (unit.module, call, inputs.get((unit.module, call.begin), frozenset()))
        for unit in units
        if unit.module and unit.parameters  # one whose parameters are all in units inside it has no such node
        for call in unit.calls
        if call.reduces and call.backward_begin != NO_INDEX
    ]
    of_parameters = {each.gradient for each in trace.parameters}
    of_parameters.update(storage for gradient in gradients for storage in gradient.storages)
    seen: set[tuple[str, int, int]] = set()
    found = []
    for index, op in enumerate(trace.ops):
        if op.phase is not Phase.BACKWARD or op.name not in (_IN_PLACE, _ADDED) or len(op.inputs) != 2:
            continue
        total, part = op.inputs
        if total.storage == NO_INDEX or part.storage == NO_INDEX or op.forward_op == NO_INDEX:
            continue
        if total.storage in of_parameters or part.storage in of_parameters:
            continue
        if op.name == _ADDED and trace.storages[total.storage].free_after != index:
            continue  # others hold it: there are two tensors in any case
        read = {each.storage for each in trace.ops[op.forward_op].inputs if each.shape == part.shape}
        holding: list[tuple[int, str]] = []
        for module, call, given in runs:
            if not call.backward_begin <= index < call.backward_end or not call.begin <= op.forward_op < call.end:
                continue
            own = read & given
            if not own or not _waits(trace, call, index, op):
                continue
            key = module, call.begin, min(own)
            if key not in seen:
                seen.add(key)
                holding.append((call.backward_end, module))
        if holding:
            end, module = max(holding)
            held = trace.storages[part.storage]
            if index + 1 < end:
                found.append(HeldGradient(module, held.category, held.bytes, index + 1, end))
    return found


def _waits(trace: Trace, call: ShardCall, index: int, op: Op) -> bool:
    """Return whether a run's backward has made what an op adds to a sum from outside of it.

    The gradient of the run's output is from outside, too, but the run's backward has read that.
    """
    total, part = (each.storage for each in op.inputs)
    made, came = trace.storages[part].alloc_at, trace.storages[total].alloc_at
    if not call.backward_begin <= made < index or came >= call.backward_begin:
        return False
    return not any(_reads(each, total) for each in trace.ops[call.backward_begin : index])


def _reads(op: Op, storage: int) -> bool:
    return op.name not in (_IN_PLACE, _ADDED) and any(each.storage == storage for each in op.inputs)
