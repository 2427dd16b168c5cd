"""Modules that only wrap another one: units and parameters of a plan are named without them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from memfit.capture import innermost, names_of_wrappers, own_modules
from memfit.torch_private.modules import module_table, parameter_table
from memfit.torch_private.wrappers import INNER_NAMES

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
    return innermost(module, wrapped_module)


def named_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module inside its wrappers by its path without them; a module that has several, under each."""
    return own_modules(model, prefix, wrapped_module)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter by its name without wrappers; one that has several, under each."""
    for path, module in named_modules(model):
        for name, parameter in parameter_table(module).items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, parameter


def wrappers_of(model: nn.Module) -> list[str]:
    """Name what a model is wrapped in or sharded by, the outermost first, as captures name it (`Plan.wrappers`).

    That of a capture has only what changes a captured step, this also torch.compile, checkpoint wrappers, libraries'.
    """
    return list(names_of_wrappers(model, wrapped_module))
