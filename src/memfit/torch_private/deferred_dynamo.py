"""Load torch._dynamo when something is compiled, and not because an optimizer steps.

torch's optimizers (torch/optim/optimizer.py, `_use_grad_for_differentiable`) and meta kernels (torch/_compile.py,
`_disable_dynamo`) import `torch._dynamo` only to tell a compiler, if there is one, to stay out. That takes longer
than capturing a model of eight billion parameters. In a process of our own (the `memfit` command) a module that can do
just that stands in its place; anything else that is asked of it loads the real one. Without it, commands are slower.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

_NAME = "torch._dynamo"


class _DeferredConfig:
    """Stands for `torch._dynamo.config`, of which torch/utils/checkpoint.py reads one setting outside of any graph."""

    error_on_nested_fx_trace = True

    def __getattr__(self, name: str) -> Any:
        return getattr(_load().config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_load().config, name, value)


class _DeferredDynamo(types.ModuleType):
    """Stands for `torch._dynamo` as long as nothing is compiled."""

    config = _DeferredConfig()

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph. The real one does nothing either outside of a graph."""

    def disable(self, fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return a function that calls another as it is, and keeps a compiler out of it once there is one."""
        if fn is None:
            return _load().disable(fn, *args, **kwargs)
        function, disabled = fn, None

        def call(*inputs: Any, **options: Any) -> Any:
            nonlocal disabled
            if disabled is None:
                if not is_loaded():
                    return function(*inputs, **options)
                disabled = sys.modules[_NAME].disable(function, *args, **kwargs)
            return disabled(*inputs, **options)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` asks every module for its file
            raise AttributeError(name)
        return getattr(_load(), name)


def defer_dynamo() -> None:
    """Put the stand-in where `import torch._dynamo` finds it; does nothing where the real one is loaded."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _DeferredDynamo(_NAME)


def is_loaded() -> bool:
    """Return whether anything can have been compiled in this process."""
    return not isinstance(sys.modules.get(_NAME), (_DeferredDynamo, type(None)))


def _load() -> Any:
    """Return the real module, imported now if it is not yet."""
    if not is_loaded():
        sys.modules.pop(_NAME, None)
    return importlib.import_module(_NAME)
