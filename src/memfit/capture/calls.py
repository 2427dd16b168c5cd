"""Which module call is running, told apart by call, through forward and backward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memfit.capture.record import NEVER, ModuleCall, Phase


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others and is never called: several models were given together."""
    return type(module) in (nn.ModuleDict, nn.ModuleList)


def is_trained(chain: Iterable[nn.Module]) -> bool:
    """Whether the last of these modules, or one of those around it, is in train mode."""
    return any(module.training for module in chain if not is_container(module))


@dataclass(slots=True)
class _OpenCall:
    module: str
    kind: str
    index: int
    parent: int
    phase: Phase
    begin: int
    end: int = NEVER
    backward_begin: int = NEVER
    backward_end: int = NEVER
    inputs: tuple[int, ...] = ()


@dataclass(slots=True)
class CallTracker:
    """Follows `nn.Module.__call__` and gives each execution a number."""

    root: nn.Module
    calls: list[_OpenCall] = field(default_factory=list)
    current: int = NEVER
    _paths: dict[int, list[str]] = field(default_factory=dict)
    in_eval: set[str] = field(default_factory=set)
    """Paths of modules that the forward called in eval mode (`is_trained`)."""
    _counts: dict[str, int] = field(default_factory=dict)
    _modules: dict[str, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = dict(self.root.named_modules(remove_duplicate=False))
        for path, module in self._modules.items():
            self._paths.setdefault(id(module), []).append(path)

    @property
    def shared(self) -> dict[str, str]:
        """For each path of a module that has several, the first of them."""
        return {path: paths[0] for paths in self._paths.values() if len(paths) > 1 for path in paths}

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is part of the model rather than, say, a loss made by the user."""
        return id(module) in self._paths

    @property
    def path(self) -> str:
        """The path of the module that runs now."""
        return self.calls[self.current].module if self.current != NEVER else ""

    def enter(self, module: nn.Module, phase: Phase, op: int, inputs: tuple[int, ...]) -> None:
        """Open a call at op index `op`; `inputs` are the storages that it is given."""
        path = self._path_of(module)
        if phase is Phase.FORWARD and torch.is_grad_enabled() and not module.training:
            self.in_eval.update(each for each in self._paths.get(id(module), ()) if not self._is_trained(each))
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        self.calls.append(_OpenCall(path, type(module).__name__, index, self.current, phase, op, inputs=inputs))
        self.current = len(self.calls) - 1

    def exit(self, op: int) -> None:
        """Close the running call; `op` is the first op after it."""
        call = self.calls[self.current]
        call.end = op
        self.current = call.parent

    def backward(self, call: int, op: int) -> None:
        """Note that backward op `op` belongs to `call` and to those that enclose it."""
        while call != NEVER:
            open_call = self.calls[call]
            if open_call.backward_end == op + 1:
                return
            if open_call.backward_begin == NEVER:
                open_call.backward_begin = op
            open_call.backward_end = op + 1
            call = open_call.parent

    def freeze(self) -> tuple[ModuleCall, ...]:
        """The calls as records."""
        names = ModuleCall.__struct_fields__
        return tuple(ModuleCall(**{name: getattr(call, name) for name in names}) for call in self.calls)

    def _is_trained(self, path: str) -> bool:
        parts = path.split(".") if path else []
        return is_trained(self._modules[".".join(parts[:count])] for count in range(len(parts) + 1))

    def _path_of(self, module: nn.Module) -> str:
        paths = self._paths.get(id(module))
        if paths is None:
            prefix = self.path
            return f"{prefix}.<{type(module).__name__}>" if prefix else f"<{type(module).__name__}>"
        if len(paths) > 1 and self.path:
            for path in paths:
                if path.startswith(self.path + "."):
                    return path
        return paths[0]


@contextlib.contextmanager
def module_calls(enter: Any, leave: Any, failed: Any = None) -> Iterator[None]:
    """Call `enter(module, args, kwargs)` before and `leave(module, result)` after every module execution.

    When it raises, `failed(error)` is called before `leave`, whose result is then None.
    """
    original = nn.Module.__call__
    here = threading.get_ident()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return original(self, *args, **kwargs)
        enter(self, args, kwargs)
        result = None
        try:
            result = original(self, *args, **kwargs)
            return result
        except Exception as error:
            if failed is not None:
                failed(error)
            raise
        finally:
            leave(self, result)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
