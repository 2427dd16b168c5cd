"""`aggregate_stats`: module statistics from three trackers, PyTorch's or memfit's in any mixture.

Note [Names]: PyTorch's trackers name the model by its class and what is inside it below that, `Llama.layers.0`;
memfit's go by paths in the model, `layers.0`, and the empty one for the model. The result has the names of the
runtime estimator, whose orders it holds. The others are matched by the module that a name stands for.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from memfit.compat.graph import ModOrder, ModRuntime, ModuleInfo
from memfit.compat.memory_tracker import MemTracker
from memfit.compat.module_stats import (
    ModuleBytes,
    assemble,
    by_module,
    collect_fits,
    module_bytes,
    over_calls,
    restrict_orders,
)
from memfit.compat.runtime_estimator import RuntimeEstimator
from memfit.compat.sac import SACTradeOffStats
from memfit.compat.sac_estimator import SACEstimator
from memfit.errors import InputError

Value = TypeVar("Value")


def aggregate_stats(
    model: nn.Module,
    mem_tracker: Any,
    runtime_estimator: Any,
    sac_estimator: Any,
    dev: torch.device,
) -> ModuleInfo:
    """Aggregate the modules of a step as three trackers saw them; `module_info` does the same from one trace.

    Each tracker may be PyTorch's (`torch.distributed._tools`) or memfit's. `model` is the module that PyTorch's
    ones watched, or one of the same structure; `dev` is the device whose memory counts.
    """
    same = _Aliases(model)
    names = _names(runtime_estimator, model)
    order: ModOrder = {
        "fw_pre_order": list(runtime_estimator.mod_fw_pre_order),
        "bw_pre_order": list(runtime_estimator.mod_bw_pre_order),
        "fw_post_order": list(runtime_estimator.mod_fw_post_order),
        "bw_post_order": list(runtime_estimator.mod_bw_post_order),
    }
    order = restrict_orders(order, set(names))
    if not order["fw_pre_order"]:
        raise InputError(
            f"the runtime estimator has seen no module of this {type(model).__name__}; "
            "run a step of this model under it, and give the model that was called"
        )
    called = {name: names[name] for name in order["fw_pre_order"]}
    sizes = same.matched(called, _sizes(mem_tracker, model, dev))
    missing = [name for name in called if name not in sizes]
    if missing:
        raise InputError(
            f"the memory tracker has not seen {missing[0]!r} and {len(missing) - 1} other modules that the runtime "
            "estimator has; run the same step of this model under both"
        )
    return assemble(
        order,
        sizes,
        _times(runtime_estimator.mod_runtimes, called),
        same.matched(called, _tradeoffs(sac_estimator, model)),
    )


class _Aliases:
    """The paths of each module of a model; one that is used in several places has several."""

    def __init__(self, model: nn.Module) -> None:
        paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            paths.setdefault(id(module), []).append(path)
        self._paths = {path: alike for alike in paths.values() for path in alike}

    def matched(self, paths: Mapping[str, str], table: Mapping[str, Value]) -> dict[str, Value]:
        """Look up by name what a table has by path, under that path or another one of the same module."""
        found: dict[str, Value] = {}
        for name, path in paths.items():
            for alias in (path, *self._paths[path]):
                if alias in table:
                    found[name] = table[alias]
                    break
        return found


def _names(tracker: Any, model: nn.Module) -> dict[str, str]:
    """Return the path of each of the model's modules, by the name that a tracker has for it."""
    paths = model.named_modules(remove_duplicate=False)
    if isinstance(tracker, RuntimeEstimator):
        return {path: path for path, _ in paths}
    watching = getattr(tracker, "_mod_tracker", None)
    root = type(model).__name__
    names: dict[str, str] = {}
    for path, module in paths:
        known = watching.get_known_fqn(module) if watching is not None else None
        names.setdefault(known or (f"{root}.{path}" if path else root), path)
    return names


def _sizes(tracker: Any, model: nn.Module, dev: torch.device) -> Mapping[str, ModuleBytes]:
    if not isinstance(tracker, MemTracker):
        return tracked_bytes(tracker.memory_tracking, model, dev)
    timeline = tracker._captured()
    if torch.device(dev).type != timeline.trace.device_type:
        raise InputError(f"the step was captured for {timeline.trace.device_type}; {dev} has no memory in it")
    return module_bytes(timeline)[0]


def _times(runtimes: Mapping[str, Mapping[str, float]], names: Iterable[str]) -> dict[str, ModRuntime]:
    """Return the times of all modules, given in forward pre-order.

    PyTorch's estimator has none of a module in which no op runs, and no backward time of one whose output it cannot
    look into. The first has 0, the second the sum of its children's.
    """
    times: dict[str, ModRuntime] = {}
    for name in names:
        measured = runtimes.get(name, {})
        times[name] = {"fw": measured.get("fw", 0.0), "bw": measured.get("bw", 0.0)}
    without_backward = {name for name, each in times.items() if not each["bw"]}
    for name in reversed(times):
        parent = _parent(name, times)
        if parent in without_backward:
            times[parent]["bw"] += times[name]["bw"]
    return times


def _parent(name: str, names: Container[str]) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return None


def _tradeoffs(estimator: Any, model: nn.Module) -> dict[str, SACTradeOffStats]:
    """Return the fitted trade-offs by path."""
    if isinstance(estimator, SACEstimator):
        return by_module(estimator._captured(), collect_fits(estimator))
    names = _names(estimator, model)
    return {names[name]: each for name, each in collect_fits(estimator).items() if name in names}


# -- What PyTorch's `MemTracker` knows about each module, read from its snapshots -------------------------------------
#
# Note [Missing backward]: the tracker looks at backward through hooks on a module's output tensors. A module that
# returns an object it cannot look into has no such snapshots, although its children run in backward; one whose
# outputs need no gradient has none because it has no backward. The first takes its children's: backward begins where
# the least gradients exist, and peaks at the highest of their peaks. The second has nothing there, 0.


_BLOCK_BYTES = 512
Kinds = Mapping[str, int]


def tracked_bytes(tracking: Mapping[nn.Module, Any], model: nn.Module, dev: torch.device) -> dict[str, ModuleBytes]:
    """Return the sizes of every module of the model that was tracked, by its first path."""
    tracked = {path: module for path, module in model.named_modules() if module in tracking}
    if not tracked:
        raise InputError(
            f"the memory tracker has seen no module of this {type(model).__name__}; "
            "run a step of this very object under it, and keep it alive"
        )
    statistics = {id(module): tracking[module] for module in tracked.values()}
    device = _device(dev, statistics.values())
    backward = {key: _backward(stats, device) for key, stats in statistics.items()}
    sizes: dict[str, ModuleBytes] = {}
    for path, module in tracked.items():
        calls = backward[id(module)]
        if not calls:
            inner = (call for child in module.modules() for call in backward.get(id(child), ()))
            calls = _enclosing(list(inner))
        sizes[path] = _sizes_of(module, statistics[id(module)], calls, device)
    return sizes


def _sizes_of(module: nn.Module, stats: Any, backward: list[tuple[Kinds, Kinds]], device: torch.device) -> ModuleBytes:
    """Return a module's sizes; its inputs and outputs are known of the last call only, and taken for all calls."""
    nothing: tuple[Kinds, Kinds] = ({}, {})
    frozen_bytes = sum(_allocated(p, device) for p in module.parameters() if not p.requires_grad)
    befores = _kinds(stats, "PRE_FW", device)
    afters = _kinds(stats, "POST_FW", device)
    calls = []
    for number, (before, after) in enumerate(zip(befores, afters, strict=True)):
        last_first = len(befores) - 1 - number
        begin, peak = backward[last_first] if last_first < len(backward) else nothing
        forward_bytes = after.get("Activation", 0) - before.get("Activation", 0)
        calls.append(
            ModuleBytes(
                parameter_bytes=stats.parameter_mem,
                gradient_bytes=stats.parameter_mem - frozen_bytes,
                gradient_total_bytes=begin.get("Gradient", 0),
                kept_bytes=max(0, forward_bytes - stats.output_mem),
                backward_activation_bytes=peak.get("Activation", 0),
                activation_gradient_bytes=peak.get("Temp", 0) - begin.get("Temp", 0),
                activation_total_bytes=after.get("Activation", 0),
                input_bytes=stats.input_mem,
                output_bytes=stats.output_mem,
            )
        )
    return over_calls([calls])


def _backward(stats: Any, device: torch.device) -> list[tuple[Kinds, Kinds]]:
    """Return the snapshots before backward and at its peak of each call, the last call first."""
    return list(zip(_kinds(stats, "PRE_BW", device), _kinds(stats, "PEAK_BW", device), strict=True))


def _enclosing(inner: list[tuple[Kinds, Kinds]]) -> list[tuple[Kinds, Kinds]]:
    """Derive the backward of a module from those of the modules inside it (Note [Missing backward])."""
    if not inner:
        return []
    begin, _ = min(inner, key=lambda call: call[0].get("Gradient", 0))
    _, peak = max(inner, key=lambda call: call[1].get("Total", 0))
    return [(begin, peak)]


def _kinds(stats: Any, state: str, device: torch.device) -> list[Kinds]:
    snapshots = next((each for key, each in stats.snapshots.items() if key.name == state), ())
    return [{getattr(kind, "value", kind): n for kind, n in each.get(device, {}).items()} for each in snapshots]


def _device(dev: torch.device | str, statistics: Iterable[Any]) -> torch.device:
    """Return the tracked device meant; a device without an index is the only one of its type."""
    dev = torch.device(dev)
    seen = {
        device: None
        for stats in statistics
        for snapshots in stats.snapshots.values()
        for snapshot in snapshots
        for device in snapshot
    }
    alike = [each for each in seen if each.type == dev.type and dev.index in (None, each.index)]
    if dev in seen or len(alike) == 1:
        return dev if dev in seen else alike[0]
    raise InputError(f"the memory tracker has nothing on {dev}; give one of {', '.join(map(str, seen)) or 'no device'}")


def _allocated(parameter: nn.Parameter, device: torch.device) -> int:
    n_bytes = parameter.untyped_storage().nbytes()
    return -(-n_bytes // _BLOCK_BYTES) * _BLOCK_BYTES if device.type == "cuda" else n_bytes
