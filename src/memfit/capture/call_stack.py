"""Where an op is called from: the module call that is running, and the line of the user's source."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn

from memfit.capture.trace_types import NO_INDEX, ModuleCall, Phase
from memfit.capture.wrapped_models import with_wrappers
from memfit.torch_private.frames import frame_above
from memfit.torch_private.wrappers import own_class


def is_container(module: nn.Module) -> bool:
    """Return whether a module only holds others and is never called: several models were given together."""
    return type(module) in (nn.ModuleDict, nn.ModuleList)


def is_trained(chain: Iterable[nn.Module]) -> bool:
    """Return whether the last of these modules, or one of those around it, is in train mode."""
    return any(module.training for module in chain if not is_container(module))


@dataclass(slots=True)
class _OpenCall:
    module: str
    kind: str
    index: int
    parent: int
    phase: Phase
    begin: int
    end: int = NO_INDEX
    backward_begin: int = NO_INDEX
    backward_end: int = NO_INDEX
    inputs: tuple[int, ...] = ()


@dataclass(slots=True)
class CallTracker:
    """Follows `nn.Module.__call__` and gives each execution a number."""

    root: nn.Module
    calls: list[_OpenCall] = field(default_factory=list)
    current: int = NO_INDEX
    _paths: dict[int, list[str]] = field(default_factory=dict)
    in_eval: set[str] = field(default_factory=set)
    """Paths of modules that the forward called in eval mode (`is_trained`)."""
    _no_grad: dict[str, list[int]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    """The model's modules under all of their paths, wrappers aside."""
    wrappers: list[tuple[str, nn.Module]] = field(default_factory=list)
    """The wrappers by the paths of their modules."""
    _wrappers: dict[int, str] = field(default_factory=dict)
    _open_wrappers: list[tuple[int, str]] = field(default_factory=list)
    """Those whose forward runs, by the path of their module, each with the call that it is in."""

    def __post_init__(self) -> None:
        for path, module, inner in with_wrappers(self.root):
            if inner is None:
                self.modules[path] = module
            else:
                self.wrappers.append((path, module))
        self._wrappers = {id(wrapper): path for path, wrapper in self.wrappers}
        for path, module in self.modules.items():
            self._paths.setdefault(id(module), []).append(path)

    @property
    def shared(self) -> dict[str, str]:
        """For each path of a module that has several, the first of them."""
        return {path: paths[0] for paths in self._paths.values() if len(paths) > 1 for path in paths}

    def owns(self, module: nn.Module) -> bool:
        """Return whether the module is part of the model rather than, say, a loss made by the user."""
        return id(module) in self._paths or id(module) in self._wrappers

    def is_wrapper(self, module: nn.Module) -> bool:
        """Return whether the module is DDP or FSDP1 around one of the model's."""
        return id(module) in self._wrappers

    @property
    def in_model(self) -> bool:
        """Whether a call, or a wrapper around the model, is open."""
        return self.current != NO_INDEX or bool(self._open_wrappers)

    def enter_wrapper(self, module: nn.Module) -> None:
        """Begin what DDP or FSDP1 does around its module."""
        self._open_wrappers.append((self.current, self._wrappers[id(module)]))

    def exit_wrapper(self) -> None:
        """End what DDP or FSDP1 does around its module."""
        self._open_wrappers.pop()

    @property
    def path(self) -> str:
        """The path of the module that runs now, or that a wrapper works for."""
        if self._open_wrappers and self._open_wrappers[-1][0] == self.current:
            return self._open_wrappers[-1][1]
        return self.calls[self.current].module if self.current != NO_INDEX else ""

    def enter(self, module: nn.Module, phase: Phase, op: int, inputs: tuple[int, ...]) -> None:
        """Open a call at op index `op`; `inputs` are the storages that it is given."""
        path = self._path_of(module)
        if phase is Phase.FORWARD and torch.is_grad_enabled() and not module.training:
            self.in_eval.update(each for each in self._paths.get(id(module), ()) if not self._is_trained(each))
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        if phase is Phase.FORWARD and not torch.is_grad_enabled():
            self._no_grad.setdefault(path, []).append(index)
        self.calls.append(_OpenCall(path, own_class(module).__name__, index, self.current, phase, op, inputs=inputs))
        self.current = len(self.calls) - 1

    def begin_at(self, op: int) -> None:
        """Let the running call begin at a later op: what ran until now was done for it, and is none of its own."""
        if self.current != NO_INDEX and self.calls[self.current].phase is not Phase.BACKWARD:
            self.calls[self.current].begin = op

    def exit(self, op: int) -> None:
        """Close the running call; `op` is the first op after it."""
        call = self.calls[self.current]
        call.end = op
        self.current = call.parent

    def backward(self, call: int, op: int) -> None:
        """Note that backward op `op` belongs to `call` and to those that enclose it."""
        while call != NO_INDEX:
            open_call = self.calls[call]
            if open_call.backward_end == op + 1:
                return
            if open_call.backward_begin == NO_INDEX:
                open_call.backward_begin = op
            open_call.backward_end = op + 1
            call = open_call.parent

    def freeze(self) -> tuple[ModuleCall, ...]:
        """Return the calls as records."""
        names = ModuleCall.__struct_fields__
        return tuple(ModuleCall(**{name: getattr(call, name) for name in names}) for call in self.calls)

    @property
    def no_grad_calls(self) -> dict[str, tuple[int, ...]]:
        """The calls with gradients disabled of modules that are called with gradients too, by path."""
        some = (path for path, indices in self._no_grad.items() if len(indices) < self._counts[path])
        return {path: tuple(self._no_grad[path]) for path in some}

    def replicate(self, template: str, others: Sequence[str]) -> None:
        """Note of blocks that were passed by what was noted of the one that ran in their place, and inside of it."""

        def inside(paths: Iterable[str]) -> list[str]:
            return [path for path in paths if path == template or path.startswith(f"{template}.")]

        for path in inside(self.in_eval):
            self.in_eval.update(other + path[len(template) :] for other in others)
        for path in inside(self._counts):
            for other in others:
                own = other + path[len(template) :]
                self._counts[own] = self._counts[path]
                if path in self._no_grad:
                    self._no_grad[own] = list(self._no_grad[path])

    def _is_trained(self, path: str) -> bool:
        parts = path.split(".") if path else []
        return is_trained(self.modules[".".join(parts[:count])] for count in range(len(parts) + 1))

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
def module_calls(enter: Any, leave: Any, failed: Any = None, around: Any = None) -> Iterator[None]:
    """Call `enter(module, args, kwargs)` before and `leave(module, result)` after every module execution.

    When it raises, `failed(error)` is called before `leave`, whose result is then None. All of it is done by
    `around(module, args, kwargs, run)`, when there is one, in that it calls `run()`.
    """
    original = nn.Module.__call__
    here = threading.get_ident()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return original(self, *args, **kwargs)
        if around is not None:
            return around(self, args, kwargs, functools.partial(run, self, args, kwargs))
        return run(self, args, kwargs)

    def run(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


# -- The user's source line behind an op ------------------------------------------------------------------------------


_COMMAND = os.path.join(os.path.dirname(os.path.dirname(__file__)), "cli", "command.py")
"""What is further out than the command is the program that started it, and no line of the user's."""
_OWN = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(torch.__file__) + os.sep)
_TYPED = ("<stdin>", "<python-input-", "<ipython-input-")
"""What Python and IPython call code that was typed at their prompts."""


class SourceTable:
    """Interns `file:line function` strings; a line is the innermost one outside torch and memfit."""

    def __init__(self) -> None:
        self.sources: list[str] = [""]
        self._index: dict[tuple[str, int], int] = {}
        self._foreign: dict[str, bool] = {}

    def here(self, depth: int) -> int:
        """Return the index of the user's line that is running now, seen from `depth` frames up."""
        frame = frame_above(depth)
        foreign = self._foreign
        while frame is not None:
            code = frame.f_code
            filename = code.co_filename
            own = foreign.get(filename)
            if own is None:
                own = self._is_users(filename)
            if own:
                return self._intern(code, frame.f_lineno)
            if filename == _COMMAND:
                return 0
            frame = frame.f_back
        return 0

    def raised(self, error: BaseException) -> int:
        """Return the index of the user's line at which an exception was raised, or that called what raised it."""
        found, entry = 0, error.__traceback__
        while entry is not None:
            code = entry.tb_frame.f_code
            if self._is_users(code.co_filename):
                found = self._intern(code, entry.tb_lineno)
            elif code.co_filename == _COMMAND:
                found = 0
            entry = entry.tb_next
        return found

    def _is_users(self, filename: str) -> bool:
        users = self._foreign.get(filename)
        if users is None:
            users = self._foreign[filename] = filename.startswith(_TYPED) or not filename.startswith((*_OWN, "<"))
        return users

    def _intern(self, code: CodeType, line: int) -> int:
        key = (code.co_filename, line)
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.sources)
            self.sources.append(f"{_shorten(code.co_filename)}:{line} {code.co_name}")
        return index


def _shorten(filename: str) -> str:
    """Shorten a path to begin in the package or, for a file of the user's, in the working folder."""
    for marker in (f"site-packages{os.sep}", f"dist-packages{os.sep}"):
        if marker in filename:
            return filename.split(marker, 1)[1]
    if filename.startswith("<"):
        return filename
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative
