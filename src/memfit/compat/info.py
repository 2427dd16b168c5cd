"""`module_info`: everything about the modules of a step from its trace and the times of its ops.

Note [Names of calls]: the second call of `block` is `block#1`, the third `block#2`, as units are named. What runs
inside has its caller's name in front, `block#1.up#1`, so that names still say which call is inside which.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from memfit.capture import NEVER, Trace
from memfit.capture.environment import no_garbage_collection
from memfit.compat.module_bytes import ModuleBytes, module_bytes
from memfit.compat.orders import CallOrders
from memfit.compat.sac import SACTradeOffStats
from memfit.compat.sac_estimator import SACEstimator
from memfit.compat.stats import ModOrder, ModRuntime, ModStats, ModuleInfo
from memfit.compat.tradeoffs import by_call, by_module, call_numbers, fitted, numbered
from memfit.cost import Runtime
from memfit.errors import InputError
from memfit.memory import Timeline


@no_garbage_collection()
def module_info(
    runtime: Runtime,
    *,
    timeline: Timeline | None = None,
    sac: Mapping[str, SACTradeOffStats] | None = None,
    each_call: bool = False,
) -> ModuleInfo:
    """The modules of one step, by their paths, for `parse_module_info`.

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
        sac = fitted(SACEstimator.of(trace, runtime.op_ms))
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
    return assemble(only(order, part_of_model), sizes, times, tradeoffs)


def only(order: ModOrder, names: set[str]) -> ModOrder:
    """The orders without the modules that are not named, such as a loss."""
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
    """Statistics of the modules in forward pre-order, all given by the names in the orders."""
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
    """A name for each call: its parent's, what its path adds to that, and its number (Note [Names of calls])."""
    numbers = call_numbers(trace)
    names: list[str] = []
    for index, call in enumerate(trace.calls):
        name = call.module
        if call.parent != NEVER:
            outer, outer_name = trace.calls[call.parent].module, names[call.parent]
            if outer and name.startswith(outer + "."):
                name = outer_name + name[len(outer) :]
            elif not outer and outer_name:
                name = f"{outer_name}.{name}"
        names.append(numbered(name, numbers.get(index, 0)))
    return names
