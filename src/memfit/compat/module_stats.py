"""`module_info`: everything about the modules of a step from its trace and the times of its ops.

Note [Names of calls]: the second call of `block` is `block#1`, the third `block#2`, as units are named. What runs
inside has its caller's name in front, `block#1.up#1`, so that names still say which call is inside which.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.capture import AFTER_STEP, NO_INDEX, Category, Phase, Trace, no_garbage_collection
from memfit.compat.graph import ModOrder, ModRuntime, ModStats, ModuleInfo
from memfit.compat.runtime_estimator import CallOrders
from memfit.compat.sac import SACTradeOffStats
from memfit.compat.sac_estimator import SACEstimator
from memfit.compat.tradeoff_curve import tradeoff_curve
from memfit.cost import Runtime, repeats
from memfit.errors import InputError
from memfit.memory import CallMemory, ModuleMemory, Snapshot, Timeline, module_memory
from memfit.tradeoff import call_name


@no_garbage_collection()
def module_info(
    runtime: Runtime,
    *,
    timeline: Timeline | None = None,
    sac: Mapping[str, SACTradeOffStats] | None = None,
    each_call: bool = False,
) -> ModuleInfo:
    """Build the statistics of the modules of one step, by their paths, for `parse_module_info`.

    `timeline` is that of the runtime's trace, by default with sizes rounded as its device does. `sac` has trade-offs
    by the names of units (`path`, `path#1` for a second call), by default all that there are. With `each_call` every
    further call of a module is an entry of its own (Note [Names of calls]).
    """
    trace = runtime.trace
    if timeline is None:
        timeline = Timeline.of(trace, trace.hardware.allocator.rounding_bytes)
    elif timeline.trace is not trace:
        raise InputError("the timeline and the times are of different traces; make both from one")
    if sac is None:
        sac = collect_fits(SACEstimator.of(trace, runtime.op_ms))
    modules, calls = module_bytes(timeline)
    if each_call:
        names = _call_names(trace)
        forward_ms, backward_ms = (each.tolist() for each in runtime.calls)
        sizes = {names[call]: each for call, each in calls.items()}
        times: dict[str, ModRuntime] = {
            names[call]: {"fw": forward_ms[call], "bw": backward_ms[call]} for call in calls
        }
        tradeoffs = {names[call]: each for call, each in by_call(trace, sac).items()}
    else:
        names = [call.module for call in trace.calls]
        sizes = modules
        times = {path: {"fw": each.forward_ms, "bw": each.backward_ms} for path, each in runtime.modules.items()}
        tradeoffs = by_module(trace, sac)
    paths = {module.path for module in trace.modules}
    part_of_model = {name for name, call in zip(names, trace.calls, strict=True) if call.module in paths}
    orders = CallOrders.of(trace)
    order: ModOrder = {
        "fw_pre_order": [names[call] for call in orders.fw_pre_order],
        "bw_pre_order": [names[call] for call in orders.bw_pre_order],
        "fw_post_order": [names[call] for call in orders.fw_post_order],
        "bw_post_order": [names[call] for call in orders.bw_post_order],
    }
    return assemble(restrict_orders(order, part_of_model), sizes, times, tradeoffs)


def restrict_orders(order: ModOrder, names: set[str]) -> ModOrder:
    """Return the orders without the modules that are not named, such as a loss."""
    return {
        "fw_pre_order": [name for name in order["fw_pre_order"] if name in names],
        "bw_pre_order": [name for name in order["bw_pre_order"] if name in names],
        "fw_post_order": [name for name in order["fw_post_order"] if name in names],
        "bw_post_order": [name for name in order["bw_post_order"] if name in names],
    }


def assemble(
    order: ModOrder,
    sizes: Mapping[str, ModuleBytes],
    times: Mapping[str, ModRuntime],
    sac: Mapping[str, SACTradeOffStats],
) -> ModuleInfo:
    """Assemble the statistics of the modules in forward pre-order, all given by the names in the orders."""
    names = dict.fromkeys(order["fw_pre_order"])
    return {"mod_order": order, "mod_stats": [_stats(name, sizes[name], times[name], sac.get(name)) for name in names]}


def _stats(name: str, size: ModuleBytes, time: ModRuntime, tradeoff: SACTradeOffStats | None) -> ModStats:
    return {
        "fqn": name,
        "param_per_module": size.parameter_bytes,
        "grad_per_module": size.gradient_bytes,
        "grad_total": size.gradient_total_bytes,
        "act_fw_per_module": size.kept_bytes,
        "act_bw_per_module": size.backward_activation_bytes,
        "act_grad_per_module": size.activation_gradient_bytes,
        "act_total": size.activation_total_bytes,
        "input_per_module": size.input_bytes,
        "output_per_module": size.output_bytes,
        "fw_runtime_per_module": time["fw"],
        "bw_runtime_per_module": time["bw"],
        "is_leaf": tradeoff is None,
        "sac_runtime": tradeoff.sac_runtime if tradeoff else 0.0,
        "sac_memory": tradeoff.sac_memory if tradeoff else 0,
        "n_segments": tradeoff.n_segments if tradeoff else 0,
        "slopes": list(tradeoff.slopes) if tradeoff else [],
        "intercepts": list(tradeoff.intercepts) if tradeoff else [],
        "breakpoints": list(tradeoff.fit_breaks) if tradeoff else [],
        "tradeoff_curve": OrderedDict(tradeoff.tradeoff_curve) if tradeoff else OrderedDict(),
    }


def _call_names(trace: Trace) -> list[str]:
    """Return a name for each call: its parent's, what its path adds to that, and its number (Note [Names of calls])."""
    numbers = call_numbers(trace)
    names: list[str] = []
    for index, call in enumerate(trace.calls):
        name = call.module
        if call.parent != NO_INDEX:
            outer, outer_name = trace.calls[call.parent].module, names[call.parent]
            if outer and name.startswith(outer + "."):
                name = outer_name + name[len(outer) :]
            elif not outer and outer_name:
                name = f"{outer_name}.{name}"
        names.append(call_name(name, numbers.get(index, 0)))
    return names


# -- The bytes of a module's statistics, from a timeline: for each call, and for each module over its calls -----------
#
# Note [Fresh gradients]: a parameter's gradient belongs to `grad_total` of the modules whose backward comes later,
# and to `act_grad_per_module` of the one that makes it, which needs room for it. So the peak of a module counts, of
# all gradients there are, those made by the innermost module that runs at the peak. PyTorch's tracker means the same
# and counts what no hook has seen by then, which forgets the first parameters of a module that owns several.


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
    """Return the bytes of every module called in forward, by path, and of every such call, by its index."""
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
    """Combine the calls of one module in each forward pass: sizes in sum, levels of the highest call."""
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
    """Map each call whose backward is that of its recomputation, as with a reentrant checkpoint, to the latter."""
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
            free_after = len(trace.ops) if storage.free_after == AFTER_STEP else storage.free_after
            if storage.category is Category.TEMPORARY and maker.phase in _FORWARD:
                change[storage.alloc_at] += size
                change[max(free_after, storage.alloc_at - 1) + 1] -= size
            elif storage.category is Category.GRADIENT:
                self._gradients[maker.call].append((storage.alloc_at, free_after, size))
        self._forward_temporary: list[int] = np.cumsum(change).tolist()

    def left_of_forward(self, call: CallMemory) -> int:
        """Return what the forward left that is there at the peak of the call's backward."""
        peak = call.backward_peak
        return _of(peak, Category.ACTIVATION) + self._forward_temporary[peak.op] if peak else 0

    def added_by_backward(self, call: CallMemory) -> int:
        """Return what the call's backward added by its peak (Note [Fresh gradients])."""
        peak, before = call.backward_peak, call.before_backward
        if peak is None or before is None:
            return 0
        made = self._gradients.get(self._ops[peak.op].call, ())
        fresh = sum(size for alloc_at, free_after, size in made if alloc_at <= peak.op <= free_after)
        return fresh + self._made_by_backward(peak) - self._made_by_backward(before)

    def _made_by_backward(self, snapshot: Snapshot) -> int:
        return _of(snapshot, Category.TEMPORARY) - self._forward_temporary[snapshot.op]


def _kept(timeline: Timeline) -> list[int]:
    """Return, for each call, the activations that it leaves for backward and that are not among its outputs."""
    trace = timeline.trace
    sizes: list[int] = timeline.allocation_bytes.tolist()
    last_read = [NO_INDEX] * len(trace.storages)
    for index, op in enumerate(trace.ops):
        if op.phase in _FORWARD:
            for ref in op.inputs:
                if ref.storage != NO_INDEX:
                    last_read[ref.storage] = index
    kept = [0] * len(trace.calls)
    silent = [True] * len(trace.calls)
    for number, storage in enumerate(trace.storages):
        if not 0 <= storage.alloc_at < len(trace.ops) or trace.ops[storage.alloc_at].phase not in _FORWARD:
            continue
        free_after = len(trace.ops) if storage.free_after == AFTER_STEP else storage.free_after
        call = storage.call
        while call != NO_INDEX and trace.calls[call].end <= free_after:
            if last_read[number] >= trace.calls[call].end:
                silent[call] = False
            elif storage.category is Category.ACTIVATION:
                kept[call] += sizes[number]
            call = trace.calls[call].parent
    for number in (number for number, nothing_reads_it in enumerate(silent) if nothing_reads_it):
        kept[number] -= _left_by_last_op(trace, number, sizes)
    return kept


def _left_by_last_op(trace: Trace, number: int, sizes: Sequence[int]) -> int:
    """Return the activations among the outputs of a call whose outputs no later op reads in forward."""
    call = trace.calls[number]
    if call.begin == call.end or call.phase is Phase.BACKWARD:
        return 0
    storages = {ref.storage for ref in trace.ops[call.end - 1].outputs if ref.storage != NO_INDEX}
    return sum(
        sizes[storage]
        for storage in storages
        if trace.storages[storage].category is Category.ACTIVATION
        and trace.storages[storage].alloc_at >= call.begin
        and (trace.storages[storage].free_after == AFTER_STEP or trace.storages[storage].free_after >= call.end)
    )


def _of(snapshot: Snapshot | None, *categories: Category) -> int:
    return sum(snapshot.by_category.get(category, 0) for category in categories) if snapshot else 0


def _inside_itself(trace: Trace, call: CallMemory) -> bool:
    return any(trace.calls[outer].module == call.module for outer in trace.ancestors(call.call)[1:])


# -- The trade-offs of checkpointing that module statistics hold: fitted, by call, and by module over its calls -------


def collect_fits(estimator: Any) -> dict[str, SACTradeOffStats]:
    """Return what a SAC estimator, PyTorch's or memfit's, has fitted, and fits of the rest, by its module names.

    Equal layers are fitted once. PyTorch's own fit needs another package.
    """
    known: dict[str, SACTradeOffStats] = {}
    found: dict[str, SACTradeOffStats] = dict(estimator.sac_mod_tradeoff_stats)
    for name, stats in estimator.sac_mod_stats.items():
        if name not in found:
            key = repr(stats)
            if key not in known:
                known[key] = tradeoff_curve(stats, estimator.sac_mod_greedy_order_meta[name])
            found[name] = known[key]
    return found


def call_numbers(trace: Trace) -> dict[int, int]:
    """Return, for each call of the forward, how many calls of the same module came before it."""
    counts: Counter[str] = Counter()
    numbers: dict[int, int] = {}
    for index, call in enumerate(trace.calls):
        if call.phase is not Phase.BACKWARD:
            numbers[index] = counts[call.module]
            counts[call.module] += 1
    return numbers


def by_call(trace: Trace, sac: Mapping[str, SACTradeOffStats]) -> dict[int, SACTradeOffStats]:
    """Key by call index in the trace what is keyed by the names of units."""
    numbers = call_numbers(trace).items()
    found = {call: sac.get(call_name(trace.calls[call].module, number)) for call, number in numbers}
    return {call: each for call, each in found.items() if each is not None}


def by_module(trace: Trace, sac: Mapping[str, SACTradeOffStats]) -> dict[str, SACTradeOffStats]:
    """Key by path: the shape of the first call's trade-off, the time of all calls, the bytes of those of one pass."""
    calls = by_call(trace, sac)
    members: dict[str, list[int]] = {}
    for call in calls:
        members.setdefault(trace.calls[call].module, []).append(call)
    passes = _backward_begins(trace)
    summed: dict[str, SACTradeOffStats] = {}
    for path, alike in members.items():
        memory: Counter[int] = Counter()
        for call in alike:
            memory[bisect_right(passes, trace.calls[call].begin)] += calls[call].sac_memory
        summed[path] = dataclasses.replace(
            calls[alike[0]],
            sac_memory=max(memory.values()),
            sac_runtime=sum(calls[call].sac_runtime for call in alike),
        )
    return summed


def _backward_begins(trace: Trace) -> list[int]:
    phases = [op.phase for op in trace.ops]
    return [
        index
        for index, phase in enumerate(phases)
        if phase is Phase.BACKWARD and (index == 0 or phases[index - 1] is not Phase.BACKWARD)
    ]
