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

from memfit.compat.info import assemble, only
from memfit.compat.memory_tracker import MemTracker
from memfit.compat.module_bytes import ModuleBytes, module_bytes
from memfit.compat.runtime_estimator import RuntimeEstimator
from memfit.compat.sac import SACTradeOffStats
from memfit.compat.sac_estimator import SACEstimator
from memfit.compat.stats import ModOrder, ModRuntime, ModuleInfo
from memfit.compat.torch_tracker import tracked_bytes
from memfit.compat.tradeoffs import by_module, fitted
from memfit.errors import InputError

Value = TypeVar("Value")


def aggregate_stats(
    model: nn.Module,
    mem_tracker: Any,
    runtime_estimator: Any,
    sac_estimator: Any,
    dev: torch.device,
) -> ModuleInfo:
    """The modules of a step as three trackers saw them; `module_info` gives the same from one trace.

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
    order = only(order, set(names))
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
        """By name what a table has by path, under that path or another one of the same module."""
        found: dict[str, Value] = {}
        for name, path in paths.items():
            for alias in (path, *self._paths[path]):
                if alias in table:
                    found[name] = table[alias]
                    break
        return found


def _names(tracker: Any, model: nn.Module) -> dict[str, str]:
    """The path of each of the model's modules, by the name that a tracker has for it."""
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
    """Times of all modules, given in forward pre-order.

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
    """By path."""
    if isinstance(estimator, SACEstimator):
        return by_module(estimator._captured(), fitted(estimator))
    names = _names(estimator, model)
    return {names[name]: each for name, each in fitted(estimator).items() if name in names}
