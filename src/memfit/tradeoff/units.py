"""Units: the module calls, and the region of the loss, that a plan may checkpoint."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from memfit.capture import NO_INDEX, ModuleCall, Phase, Trace
from memfit.memory import Unit

LOSS = "<loss>"
"""The name of the loss region; it is no module, so its `call` is `NO_INDEX`."""

FORWARD = (Phase.FORWARD, Phase.LOSS)


def find_units(trace: Trace) -> tuple[Unit, ...]:
    """Return every call that has ops and a backward, outer ones before those inside them, then the loss of each pass.

    A call that computes gradients itself cannot be recomputed as a whole and is left out.
    """
    runs = _backward_runs(trace)
    found = [
        _in_one_run(unit, runs)
        for unit in forward_calls(trace)
        if unit.backward_begin >= unit.end and not any(first < unit.end and last >= unit.begin for first, last in runs)
    ]
    unpacking = _unpacking_ops(trace)
    return tuple(_from_first_unpack(unit, unpacking) for unit in (*found, *_losses(trace, runs)))


def _unpacking_ops(trace: Trace) -> list[tuple[int, int]]:
    """Return backward ops that ask for a tensor that autograd saved, each with the forward op that saved it."""
    packing: set[int] = set()
    for number, storage in enumerate(trace.storages):
        packing.update(op for op in storage.saved_by if not _is_number(trace, number, op))
    return [
        (index, op.forward_op)
        for index, op in enumerate(trace.ops)
        if op.phase is Phase.BACKWARD and op.forward_op in packing
    ]


def _is_number(trace: Trace, storage: int, op: int) -> bool:
    """Return whether a storage is a number that an op keeps for its backward, which no hook sees."""
    refs = (*trace.ops[op].outputs, *trace.ops[op].inputs)
    return trace.storages[storage].alloc_at == op and all(ref.storage != storage for ref in refs)


def _from_first_unpack(unit: Unit, unpacking: list[tuple[int, int]]) -> Unit:
    """Return the unit with its backward from the first op on that asks for a saved tensor: there it is recomputed."""
    place = bisect_left(unpacking, (unit.backward_begin, NO_INDEX))
    for index, forward_op in unpacking[place:]:
        if index >= unit.backward_end:
            break
        if unit.begin <= forward_op < unit.end:
            return replace(unit, backward_begin=index)
    return unit


def forward_calls(trace: Trace) -> list[Unit]:
    """Return every call of the forward that has ops, also those without a backward, in the order they began."""
    counts: dict[str, int] = defaultdict(int)
    found = []
    for index, call in enumerate(trace.calls):
        if call.phase is not Phase.FORWARD:
            continue
        number = counts[call.module]
        counts[call.module] += 1
        if call.begin < call.end:
            found.append(
                Unit(
                    name=call_name(call.module, number),
                    module=call.module,
                    kind=call.kind,
                    call=index,
                    begin=call.begin,
                    end=call.end,
                    backward_begin=call.backward_begin,
                    backward_end=call.backward_end,
                )
            )
    return found


def _in_one_run(unit: Unit, runs: list[tuple[int, int]]) -> Unit:
    """Return the unit with the backward of its own pass alone.

    A trace counts the accumulation of a parameter's gradient in later passes as backward of its first use.
    """
    last = next(last for first, last in runs if first <= unit.backward_begin <= last)
    return replace(unit, backward_end=min(unit.backward_end, last + 1))


def call_name(name: str, number: int) -> str:
    """Return the name of a module's call: `layer` for the first, `layer#1` for the second."""
    return f"{name}#{number}" if number else name


def _losses(trace: Trace, runs: list[tuple[int, int]]) -> Iterable[Unit]:
    """Yield the loss region of each pass that has one.

    It is what runs between the model's forward and the backward. Where autograd saves nothing of that, because
    the model computes its loss itself, it is what the model runs after its last child.
    """
    if trace.pipelines:
        return  # forwards of other micro-batches run between a loss and its backward, and the schedule calls it
    outermost = [call for call in trace.calls if call.parent == NO_INDEX and call.phase is Phase.FORWARD]
    number = 0
    for first, last in runs:
        before = [call for call in outermost if call.end <= first]
        if not before:
            continue
        model = before[-1]
        if any(trace.ops[op].phase not in FORWARD for op in range(model.end, first)):
            continue  # this backward belongs to no forward of its own
        after = (model.end, first)
        inside = (_last_child_end(trace, model), model.end)
        region = next((each for each in (after, inside) if _saves(trace, *each)), None)
        if region is None:
            region = next((each for each in (after, inside) if each[0] < each[1]), None)
        backward = [] if region is None else _backward_of(trace, *region, first, last)
        if region is None or not backward:
            continue
        yield Unit(
            name=call_name(LOSS, number),
            module="",
            kind="loss",
            call=NO_INDEX,
            begin=region[0],
            end=region[1],
            backward_begin=backward[0],
            backward_end=backward[-1] + 1,
        )
        number += 1


def _backward_runs(trace: Trace) -> list[tuple[int, int]]:
    """Return the contiguous runs of backward ops, as first and last op; those of two micro-batches are two."""
    runs: list[tuple[int, int]] = []
    begin = NO_INDEX
    actions = {action.begin for run in trace.pipelines for action in run.actions}
    for index, op in enumerate(trace.ops):
        if begin != NO_INDEX and index in actions:
            runs.append((begin, index - 1))
            begin = NO_INDEX
        if op.phase is Phase.BACKWARD:
            begin = index if begin == NO_INDEX else begin
        elif begin != NO_INDEX:
            runs.append((begin, index - 1))
            begin = NO_INDEX
    if begin != NO_INDEX:
        runs.append((begin, len(trace.ops) - 1))
    return runs


def _last_child_end(trace: Trace, model: ModuleCall) -> int:
    """Return where the last of the model's own modules ends; one made on the fly, such as a loss, is none of them."""
    inside = (call for call in trace.calls if call is not model and model.begin <= call.begin and call.end <= model.end)
    own = (call.end for call in inside if not call.module.rpartition(".")[2].startswith("<"))
    return max(own, default=model.begin)


def _saves(trace: Trace, begin: int, end: int) -> bool:
    """Return whether autograd keeps a result that an op of the region made."""
    return any(trace.ops[op].saved and not trace.ops[op].view for op in range(begin, end))


def _backward_of(trace: Trace, begin: int, end: int, first: int, last: int) -> list[int]:
    return [op for op in range(first, last + 1) if begin <= trace.ops[op].forward_op < end]
