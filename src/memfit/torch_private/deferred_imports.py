"""Load torch's compiler and sympy when something needs them, not because an optimizer steps or a shape is checked.

- torch's optimizers (torch/optim/optimizer.py, `_use_grad_for_differentiable`) and meta kernels (torch/_compile.py,
  `_disable_dynamo`) import `torch._dynamo` only to tell a compiler, if there is one, to stay out.
- Meta kernels import `sympy` (torch/_prims_common/__init__.py, `elementwise_dtypes`) only to ask whether a number is
  one of its expressions, and `torch.fx.experimental.symbolic_shapes` (torch/__init__.py, `_check_with`) to compare
  sizes that might be symbolic. Those of a capture are plain numbers.
- torch itself imports `torch.export` (torch/__init__.py) for those who export models.

Together that takes longer than capturing a model of eight billion parameters. In a process of our own (the `memfit`
command) modules that can do just that stand in their places; anything else that is asked of them loads the real ones.
Without it, commands are slower.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_DYNAMO = "torch._dynamo"
_SYMPY = "sympy"
_SHAPES = "torch.fx.experimental.symbolic_shapes"
_EXPORT = "torch.export"


class _Deferred(types.ModuleType):
    """Stands for a module until something is asked of it that only the real one has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file
            raise AttributeError(name)
        return getattr(_load(self.__name__), name)


class _DeferredConfig:
    """Stands for `torch._dynamo.config`, of which torch/utils/checkpoint.py reads one setting outside of any graph."""

    error_on_nested_fx_trace = True

    def __getattr__(self, name: str) -> Any:
        return getattr(_load(_DYNAMO).config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_load(_DYNAMO).config, name, value)


class _DeferredDynamo(_Deferred):
    """Stands for `torch._dynamo` as long as nothing is compiled."""

    config = _DeferredConfig()

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph. The real one does nothing either outside of a graph."""

    def disable(self, fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return a function that calls another as it is, and keeps a compiler out of it once there is one."""
        if fn is None:
            return _load(_DYNAMO).disable(fn, *args, **kwargs)
        function, disabled = fn, None

        def call(*inputs: Any, **options: Any) -> Any:
            nonlocal disabled
            if disabled is None:
                if not is_loaded(_DYNAMO):
                    return function(*inputs, **options)
                disabled = sys.modules[_DYNAMO].disable(function, *args, **kwargs)
            return disabled(*inputs, **options)

        return call


class _DeferredBasic:
    """Stands for `sympy.Basic`: nothing is an instance of it before sympy is there. To subclass it loads sympy."""

    def __instancecheck__(self, instance: object) -> bool:
        return is_loaded(_SYMPY) and isinstance(instance, sys.modules[_SYMPY].Basic)

    def __subclasscheck__(self, subclass: type) -> bool:
        return is_loaded(_SYMPY) and issubclass(subclass, sys.modules[_SYMPY].Basic)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_load(_SYMPY).Basic,)

    def __or__(self, other: Any) -> Any:
        return _load(_SYMPY).Basic | other

    def __ror__(self, other: Any) -> Any:
        return other | _load(_SYMPY).Basic

    def __getattr__(self, name: str) -> Any:
        return getattr(_load(_SYMPY).Basic, name)


class _DeferredSympy(_Deferred):
    """Stands for `sympy` as long as no shape is symbolic."""

    _basic = _DeferredBasic()

    @property
    def Basic(self) -> Any:  # noqa: N802
        """The class of all its expressions."""
        return _load(_SYMPY).Basic if is_loaded(_SYMPY) else self._basic


def _known(name: str, kind: type) -> Callable[..., Any]:
    """Return the function of that name for a value that is known: it is the answer."""

    def answer(value: Any, *rest: Any) -> Any:
        return value if type(value) is kind else getattr(_load(_SHAPES), name)(value, *rest)

    return answer


def _later(name: str) -> Callable[..., Any]:
    """Return the function of that name, loaded when it is called: torch imports more of them than it calls."""
    return lambda *values: getattr(_load(_SHAPES), name)(*values)


class _DeferredSymbolicShapes(_Deferred):
    """Stands for `torch.fx.experimental.symbolic_shapes` as long as every size is a number."""

    has_guarding_hint = staticmethod(_later("has_guarding_hint"))
    guarding_hint_or_throw = staticmethod(_later("guarding_hint_or_throw"))

    expect_true = staticmethod(_known("expect_true", bool))
    guard_bool = staticmethod(_known("guard_bool", bool))
    guard_int = staticmethod(_known("guard_int", int))
    guard_or_false = staticmethod(_known("guard_or_false", bool))
    guard_or_true = staticmethod(_known("guard_or_true", bool))
    guard_size_oblivious = staticmethod(_known("guard_size_oblivious", bool))
    statically_known_true = staticmethod(_known("statically_known_true", bool))

    @staticmethod
    def free_unbacked_symbols(value: Any) -> Any:
        """Return the symbols in a tensor's sizes."""
        import torch

        if isinstance(value, torch.Tensor) and all(type(size) is int for size in value.shape):
            return set()
        return _load(_SHAPES).free_unbacked_symbols(value)

    @staticmethod
    def is_nested_int(size: Any) -> bool:
        """Return whether it is the symbol of a jagged dimension."""
        return type(size) is not int and _load(_SHAPES).is_nested_int(size)

    @staticmethod
    def sym_eq(first: Any, second: Any) -> Any:
        """Return whether two sizes, or shapes, are equal."""
        if type(first) is int and type(second) is int:
            return first == second
        shapes = isinstance(first, (tuple, list)) and isinstance(second, (tuple, list))
        if shapes and all(type(size) is int for size in (*first, *second)):
            return tuple(first) == tuple(second)
        return _load(_SHAPES).sym_eq(first, second)

    @staticmethod
    def sym_and(*values: Any) -> Any:
        """Return whether all are true."""
        return all(values) if all(type(value) is bool for value in values) else _load(_SHAPES).sym_and(*values)

    @staticmethod
    def sym_or(*values: Any) -> Any:
        """Return whether any is true."""
        return any(values) if all(type(value) is bool for value in values) else _load(_SHAPES).sym_or(*values)


class _DeferredExport(_Deferred):
    """Stands for `torch.export` as long as nothing is exported."""


_STAND_INS: dict[str, type[_Deferred]] = {
    _DYNAMO: _DeferredDynamo,
    _SYMPY: _DeferredSympy,
    _SHAPES: _DeferredSymbolicShapes,
    _EXPORT: _DeferredExport,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the stand-ins, and the real packages when something is imported from inside of them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname in _STAND_INS and fullname not in _wanted:
            return ModuleSpec(fullname, _StandIn(), is_package=True)
        package = next((name for name in _STAND_INS if fullname.startswith(f"{name}.")), None)
        if package is None or package in _wanted:
            return None
        real = _load(package)
        module = sys.modules.pop(fullname, None)  # if it stayed there, the import system would run its own loader again
        if module is not None:
            return ModuleSpec(fullname, _Present(module))
        return PathFinder.find_spec(fullname, real.__path__)


class _StandIn(importlib.abc.Loader):
    """Loader of a stand-in."""

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _STAND_INS[spec.name](spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Present(importlib.abc.Loader):
    """Loader of a module that is there already: importing it once more must not run it once more."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__spec__"] = self._spec  # the import system has put its own there


def defer_imports() -> None:
    """Let `import` find the stand-ins; those that are loaded already stay as they are."""
    _wanted.update(name for name in _STAND_INS if name in sys.modules)
    sys.meta_path.insert(0, _Finder())


def is_loaded(name: str = _DYNAMO) -> bool:
    """Return whether the real module is there: without `torch._dynamo`, nothing in this process can be compiled."""
    return not isinstance(sys.modules.get(name), (_Deferred, type(None)))


_wanted: set[str] = set()
"""The modules that something needed: these are found as ever."""


def _load(name: str) -> Any:
    """Return the real module, imported now if it is not yet."""
    if name not in _wanted:
        _wanted.add(name)
        sys.modules.pop(name, None)
    return importlib.import_module(name)
