"""What PyTorch's `MemTracker` knows about each module, read from its snapshots.

Note [Missing backward]: the tracker looks at backward through hooks on a module's output tensors. A module that
returns an object it cannot look into has no such snapshots, although its children run in backward; one whose
outputs need no gradient has none because it has no backward. The first takes its children's: backward begins
where the least gradients exist, and peaks at the highest of their peaks. The second has nothing there, 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from memfit.compat.module_bytes import ModuleBytes, over_calls
from memfit.errors import InputError

_BLOCK_BYTES = 512
Kinds = Mapping[str, int]


def tracked_bytes(tracking: Mapping[nn.Module, Any], model: nn.Module, dev: torch.device) -> dict[str, ModuleBytes]:
    """The sizes of every module of the model that was tracked, by its first path."""
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
        sizes[path] = _sizes(module, statistics[id(module)], calls, device)
    return sizes


def _sizes(module: nn.Module, stats: Any, backward: list[tuple[Kinds, Kinds]], device: torch.device) -> ModuleBytes:
    """Inputs and outputs are known of the last call only, and are taken to be those of every call."""
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
    """Before backward and at its peak, of each call, the last call first."""
    return list(zip(_kinds(stats, "PRE_BW", device), _kinds(stats, "PEAK_BW", device), strict=True))


def _enclosing(inner: list[tuple[Kinds, Kinds]]) -> list[tuple[Kinds, Kinds]]:
    """The backward of a module from those of the modules inside it (Note [Missing backward])."""
    if not inner:
        return []
    begin, _ = min(inner, key=lambda call: call[0].get("Gradient", 0))
    _, peak = max(inner, key=lambda call: call[1].get("Total", 0))
    return [(begin, peak)]


def _kinds(stats: Any, state: str, device: torch.device) -> list[Kinds]:
    snapshots = next((each for key, each in stats.snapshots.items() if key.name == state), ())
    return [{getattr(kind, "value", kind): n for kind, n in each.get(device, {}).items()} for each in snapshots]


def _device(dev: torch.device | str, statistics: Iterable[Any]) -> torch.device:
    """The tracked device meant; a device without an index is the only one of its type."""
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
