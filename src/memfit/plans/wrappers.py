"""Modules that only wrap another one: units and parameters of a plan are named without them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from memfit.torch_private.modules import module_table, parameter_table
from memfit.torch_private.wrappers import INNER_NAMES, fully_shard_parameters, was_dtensor

_INNER_OF = {"DistributedDataParallel": "module", "DataParallel": "module", "DeepSpeedEngine": "module"}
"""Where a wrapper keeps its module by class, for names that a model may use itself."""


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module that this one wraps, None when it is no wrapper."""
    for name in INNER_NAMES:
        inner = module_table(module).get(name)
        if inner is not None:
            return inner
    for kind in type(module).__mro__:
        if kind.__name__ in _INNER_OF:
            return module_table(module).get(_INNER_OF[kind.__name__])
    return None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers."""
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def named_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module inside its wrappers by its path without them; a module that has several, under each."""
    module = unwrap(model)
    yield prefix, module
    for name, child in module_table(module).items():
        if child is not None:
            yield from named_modules(child, f"{prefix}.{name}" if prefix else name)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter by its name without wrappers; one that has several, under each."""
    for path, module in named_modules(model):
        for name, parameter in parameter_table(module).items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, parameter


def is_fully_sharded(module: nn.Module) -> bool:
    """Tell whether `fully_shard` was called on a module, without importing what it is in."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def wrappers_of(model: nn.Module) -> list[str]:
    """Name what a model is wrapped in or sharded by, the outermost first: `DistributedDataParallel`, `fully_shard`.

    `DTensor` stands for parameters that are DTensors without `fully_shard`, of a tensor parallel model.
    """
    found: dict[str, None] = {}
    for module in model.modules():
        if wrapped_module(module) is not None:
            found[type(module).__name__] = None
        if is_fully_sharded(module):
            found["fully_shard"] = None
    tensors = sys.modules.get("torch.distributed.tensor")  # imported already where there are any
    own = "FlatDTensor"  # those of memfit's own runtime (`sharded/flat_dtensor.py`), which is no wrapper
    if "fully_shard" in found:
        sharded = (module for module in model.modules() if is_fully_sharded(module))
        if any(was_dtensor(each) for module in sharded for each in fully_shard_parameters(module)):
            found["DTensor"] = None
    elif tensors is not None and any(
        isinstance(each, tensors.DTensor) and type(each).__name__ != own for each in model.parameters()
    ):
        found["DTensor"] = None
    return list(found)
