"""Modules: the tables in which `nn.Module` keeps what belongs to it (torch/nn/modules/module.py).

Public methods give copies or iterators; memfit swaps entries, as `torch.func.functional_call` does.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

from torch import Tensor, nn

CALL_CODE: CodeType = nn.Module._call_impl.__code__
"""The code of a module's call, by which a frame of it is known (torch/nn/modules/module.py)."""


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module by name, to be changed in place (`Module._parameters`)."""
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module by name, to be changed in place (`Module._buffers`)."""
    return module._buffers


def module_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the children of a module by name, those that are None too (`Module._modules`)."""
    return module._modules


def modules_by_path(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module once, by its first path, in the order of `Module.named_modules` and some times faster."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    left: list[tuple[str, nn.Module]] = [("", model)]
    while left:
        path, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((path, module))
        if children := module._modules:
            prefix = f"{path}." if path else ""
            left += [(prefix + name, child) for name, child in children.items() if child is not None][::-1]
    return found


def forward_hooks(module: nn.Module) -> Any:
    """Return the hooks after a module's forward, in order (`Module._forward_hooks`)."""
    return module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> Any:
    """Return the hooks before a module's forward, in order (`Module._forward_pre_hooks`)."""
    return module._forward_pre_hooks


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called (`Module._compiled_call_impl`)."""
    return module._compiled_call_impl is not None


def compiled_call(module: nn.Module) -> Any:
    """Return what a module's call runs since `module.compile()`, None without (`Module._compiled_call_impl`)."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Replace what the call of a compiled module runs (`Module._compiled_call_impl`)."""
    module._compiled_call_impl = call
