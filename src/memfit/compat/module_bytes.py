"""The bytes of a module's statistics, from a timeline: for each call, and for each module over its calls.

Note [Fresh gradients]: a parameter's gradient belongs to `grad_total` of the modules whose backward comes
later, and to `act_grad_per_module` of the one that makes it, which needs room for it. So the peak of a module
counts, of all gradients there are, those made by the innermost module that runs at the peak. PyTorch's tracker
means the same and counts what no hook has seen by then, which forgets the first parameters of a module that
owns several.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.capture import NEVER, Category, Phase, Trace
from memfit.cost.repeats import repeats
from memfit.memory import CallMemory, ModuleMemory, Snapshot, Timeline, module_memory

_FORWARD = (Phase.FORWARD, Phase.LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """The sizes in `ModStats`, one field for each, in its order."""

    parameter_bytes: int
    gradient_bytes: int
    gradient_total_bytes: int
    kept_bytes: int
    backward_activation_bytes: int
    activation_gradient_bytes: int
    activation_total_bytes: int
    input_bytes: int
    output_bytes: int

    @property
    def level_bytes(self) -> int:
        """What the module's backward reaches above the parameters."""
        return self.gradient_total_bytes + self.activation_gradient_bytes + self.activation_total_bytes


def module_bytes(timeline: Timeline) -> tuple[dict[str, ModuleBytes], dict[int, ModuleBytes]]:
    """Of every module that was called in forward, by path, and of every such call, by its number in the trace."""
    trace = timeline.trace
    kept = _kept(timeline)
    levels = _Levels(timeline)
    passes = [span.begin for span in timeline.phases if span.phase is Phase.BACKWARD]
    memory = module_memory(timeline)
    again = _repeated(trace, memory)
    modules: dict[str, ModuleBytes] = {}
    calls: dict[int, ModuleBytes] = {}
    for path, module in memory.items():
        by_pass: dict[int, list[ModuleBytes]] = defaultdict(list)
        for call in module.calls:
            if call.phase is Phase.BACKWARD:
                continue
            backward = again.get(call.call, call)
            calls[call.call] = ModuleBytes(
                parameter_bytes=module.parameter_bytes,
                gradient_bytes=module.gradient_bytes,
                gradient_total_bytes=_of(backward.before_backward, Category.GRADIENT),
                kept_bytes=kept[call.call],
                backward_activation_bytes=levels.left_of_forward(backward),
                activation_gradient_bytes=levels.added_by_backward(backward),
                activation_total_bytes=_of(call.after_forward, Category.ACTIVATION, Category.TEMPORARY),
                input_bytes=call.input_bytes,
                output_bytes=call.output_bytes,
            )
            if not _inside_itself(trace, call):
                by_pass[bisect_right(passes, call.before_forward.op)].append(calls[call.call])
        if by_pass:
            modules[path] = over_calls(list(by_pass.values()))
    return modules, calls


def over_calls(passes: Sequence[Sequence[ModuleBytes]]) -> ModuleBytes:
    """One module from its calls in each forward pass: sizes in sum, levels of the highest call."""
    highest = max((call for calls in passes for call in calls), key=lambda call: call.level_bytes)
    return ModuleBytes(
        parameter_bytes=highest.parameter_bytes,
        gradient_bytes=highest.gradient_bytes,
        gradient_total_bytes=highest.gradient_total_bytes,
        kept_bytes=max(sum(call.kept_bytes for call in calls) for calls in passes),
        backward_activation_bytes=highest.backward_activation_bytes,
        activation_gradient_bytes=highest.activation_gradient_bytes,
        activation_total_bytes=highest.activation_total_bytes,
        input_bytes=max(sum(call.input_bytes for call in calls) for calls in passes),
        output_bytes=max(sum(call.output_bytes for call in calls) for calls in passes),
    )


def _repeated(trace: Trace, memory: Mapping[str, ModuleMemory]) -> dict[int, CallMemory]:
    """Of each call whose backward is that of its recomputation, as with a reentrant checkpoint, the latter."""
    by_number = {call.call: call for module in memory.values() for call in module.calls}
    again = {first: by_number[again] for again, first in repeats(trace).items()}
    return {first: call for first, call in again.items() if call.backward_peak}


class _Levels:
    """What forward left and what backward added, at the peaks of backward."""

    def __init__(self, timeline: Timeline) -> None:
        trace = timeline.trace
        self._ops = trace.ops
        sizes: list[int] = timeline.allocation_bytes.tolist()
        change = np.zeros(len(trace.ops) + 2, np.int64)
        self._gradients: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for storage, size in zip(trace.storages, sizes, strict=True):
            if not 0 <= storage.alloc_at < len(trace.ops):
                continue
            maker = trace.ops[storage.alloc_at]
            free_after = len(trace.ops) if storage.free_after == NEVER else storage.free_after
            if storage.category is Category.TEMPORARY and maker.phase in _FORWARD:
                change[storage.alloc_at] += size
                change[max(free_after, storage.alloc_at - 1) + 1] -= size
            elif storage.category is Category.GRADIENT:
                self._gradients[maker.call].append((storage.alloc_at, free_after, size))
        self._forward_temporary: list[int] = np.cumsum(change).tolist()

    def left_of_forward(self, call: CallMemory) -> int:
        """At the peak of the call's backward."""
        peak = call.backward_peak
        return _of(peak, Category.ACTIVATION) + self._forward_temporary[peak.op] if peak else 0

    def added_by_backward(self, call: CallMemory) -> int:
        """At the peak of the call's backward, over what there was before it (Note [Fresh gradients])."""
        peak, before = call.backward_peak, call.before_backward
        if peak is None or before is None:
            return 0
        made = self._gradients.get(self._ops[peak.op].call, ())
        fresh = sum(size for alloc_at, free_after, size in made if alloc_at <= peak.op <= free_after)
        return fresh + self._made_by_backward(peak) - self._made_by_backward(before)

    def _made_by_backward(self, snapshot: Snapshot) -> int:
        return _of(snapshot, Category.TEMPORARY) - self._forward_temporary[snapshot.op]


def _kept(timeline: Timeline) -> list[int]:
    """For each call the activations that it leaves for backward and that are not among its outputs."""
    trace = timeline.trace
    sizes: list[int] = timeline.allocation_bytes.tolist()
    last_read = [NEVER] * len(trace.storages)
    for index, op in enumerate(trace.ops):
        if op.phase in _FORWARD:
            for ref in op.inputs:
                if ref.storage != NEVER:
                    last_read[ref.storage] = index
    kept = [0] * len(trace.calls)
    silent = [True] * len(trace.calls)
    for number, storage in enumerate(trace.storages):
        if not 0 <= storage.alloc_at < len(trace.ops) or trace.ops[storage.alloc_at].phase not in _FORWARD:
            continue
        free_after = len(trace.ops) if storage.free_after == NEVER else storage.free_after
        call = storage.call
        while call != NEVER and trace.calls[call].end <= free_after:
            if last_read[number] >= trace.calls[call].end:
                silent[call] = False
            elif storage.category is Category.ACTIVATION:
                kept[call] += sizes[number]
            call = trace.calls[call].parent
    for number in (number for number, nothing_reads_it in enumerate(silent) if nothing_reads_it):
        kept[number] -= _left_by_last_op(trace, number, sizes)
    return kept


def _left_by_last_op(trace: Trace, number: int, sizes: Sequence[int]) -> int:
    """The activations among the outputs of a call whose outputs no later op reads in forward."""
    call = trace.calls[number]
    if call.begin == call.end or call.phase is Phase.BACKWARD:
        return 0
    storages = {ref.storage for ref in trace.ops[call.end - 1].outputs if ref.storage != NEVER}
    return sum(
        sizes[storage]
        for storage in storages
        if trace.storages[storage].category is Category.ACTIVATION
        and trace.storages[storage].alloc_at >= call.begin
        and (trace.storages[storage].free_after == NEVER or trace.storages[storage].free_after >= call.end)
    )


def _of(snapshot: Snapshot | None, *categories: Category) -> int:
    return sum(snapshot.by_category.get(category, 0) for category in categories) if snapshot else 0


def _inside_itself(trace: Trace, call: CallMemory) -> bool:
    return any(trace.calls[outer].module == call.module for outer in trace.ancestors(call.call)[1:])
