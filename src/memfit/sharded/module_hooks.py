"""How the modules of a unit call the runtime: hooks around their forward, and methods that run as the forward does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from memfit.errors import InputError
from memfit.sharded.runtime import ShardedRuntime
from memfit.sharded.unit import Run, ShardedUnit
from memfit.torch_private.compiler import disable_dynamo
from memfit.torch_private.modules import compiled_call, forward_hooks, set_compiled_call

_HOOKS = "_memfit_hooks"


class ModuleHooks:
    """What happens around the calls of a unit's module: its forward, and methods that run on gathered parameters."""

    def __init__(self, runtime: ShardedRuntime, unit: ShardedUnit, module: nn.Module) -> None:
        self.runtime = runtime
        self._unit = unit
        self._module = module
        self._entered: list[tuple[Run | None, BaseException | None]] = []
        self._in_method = False
        self.last: RemovableHandle | None = None

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the parameters."""
        if self._in_method:  # which gathered them
            return args, kwargs
        if not self.runtime.is_running(self._unit):  # what an interrupt left, after which no hook runs
            self._entered.clear()
        self._entered.append((None, sys.exc_info()[1]))
        if self.last is not None:
            hooks = forward_hooks(module)
            hooks[self.last.id] = hooks.pop(self.last.id)
        run, args, kwargs = self.runtime.before_forward(self._unit, args, kwargs)
        self._entered[-1] = run, self._entered[-1][1]
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Free the parameters, unless the backward or another module of the unit needs them."""
        if self._in_method:
            return output
        run, handled = self._entered.pop() if self._entered else (None, None)
        if sys.exc_info()[1] is not handled:
            self.runtime.failed_forward(self._unit)
            return None
        return self.runtime.after_forward(self._unit, self._module, run, (args, kwargs), output)

    def attach(self) -> None:
        """Make the module's forward call these; user hooks see gathered parameters."""

        def before(*args: Any) -> Any:  # Dynamo is turned off for functions, not for methods
            return self.before(*args)

        def after(*args: Any) -> Any:
            return self.after(*args)

        module = self._module
        module.__dict__[_HOOKS] = self
        compiled = compiled_call(module)
        if compiled is not None:  # by module.compile(): hooks would be traced, and would break its graph
            set_compiled_call(module, disable_dynamo(self.method(compiled)))
            return
        module.register_forward_pre_hook(disable_dynamo(before), prepend=True, with_kwargs=True)
        self.last = module.register_forward_hook(disable_dynamo(after), with_kwargs=True, always_call=True)

    def method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the module that runs on gathered parameters, as its forward does."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.runtime.settle()
            if self._in_method or self.runtime.is_running(self._unit):  # the parameters are there
                return method(*args, **kwargs)
            output = None
            try:
                args, kwargs = self.before(self._module, args, kwargs)
                self._in_method = True
                output = method(*args, **kwargs)
            except BaseException:  # also of the gather: no hook runs after a method
                self._in_method = False
                self.after(self._module, args, kwargs, None)
                raise
            self._in_method = False
            return self.after(self._module, args, kwargs, output)

        return run


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method of a unit run on gathered parameters, as its forward does.

    FSDP2's `register_fsdp_forward_method`.
    """
    hooks: ModuleHooks | None = module.__dict__.get(_HOOKS)
    if hooks is None:
        raise InputError(f"this {type(module).__name__} is no unit of a sharded model; give a module that is one")
    method = getattr(module, name, None)
    if not callable(method):
        raise InputError(f"this {type(module).__name__} has no method {name!r}")
    module.__dict__[name] = hooks.method(method)


def use_runtime(module: nn.Module, runtime: ShardedRuntime) -> None:
    """Let the hooks of a unit's module call the runtime of a model around its own."""
    module.__dict__[_HOOKS].runtime = runtime
