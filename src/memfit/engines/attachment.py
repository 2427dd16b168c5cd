"""Route the calls of a module to its plan by instance attributes; its class is not changed.

Note [Attachment]: a planned module has a `forward` in its own dictionary, where `nn.Module.__call__` finds it before
that of its class; hooks run around it as always. Nothing else in the process changes, and wrappers keep the plan:
`fully_shard` swaps the class and leaves the dictionary, DDP, FSDP and `torch.compile` hold the module, accelerate wraps
`forward`. What copies a module's dictionary would take the entry along, bound to the original: methods that make copies
are therefore entries too, which take all of ours out, call the class's own method and put them back. Copies and pickles
are plain modules.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.errors import StateError
from memfit.torch_private.compiler import called_by_compiler

if TYPE_CHECKING:
    from memfit.engines.local import Applied


Handler = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_forwards: weakref.WeakKeyDictionary[nn.Module, PlannedForward] = weakref.WeakKeyDictionary()
_NOT_COMPILED = (
    "this module runs a memfit plan, which saves and recomputes by itself, so it is not compiled: "
    "compile without fullgraph=True, or call plan.remove(model) first"
)
_COPYING = ("__getstate__", "_replicate_for_data_parallel")
"""Methods that copy a module's dictionary. `copy`, `deepcopy` and `pickle` look `__getstate__` up on the instance."""
_COPYING_IF_DEFINED = ("__deepcopy__", "__copy__", "__reduce_ex__", "__reduce__")
"""The same, where a class defines them itself (`torch.fx.GraphModule`)."""


def attach(module: nn.Module, handler: Handler) -> None:
    """Route calls of this module to the handler, which is given the original forward."""
    _forwards[module] = forward = PlannedForward(module, handler)
    module.__dict__["forward"] = forward
    kind = type(module)
    defined = {name for name in _COPYING_IF_DEFINED if getattr(kind, name, None) is not getattr(object, name, None)}
    if "__reduce__" in defined:
        defined.add("__reduce_ex__")  # which calls it
    for name in (*_COPYING, *sorted(defined)):
        if hasattr(kind, name) and name not in module.__dict__:
            module.__dict__[name] = _WithoutPlan(module, name)
    if "__prepare_scriptable__" not in module.__dict__:
        module.__dict__["__prepare_scriptable__"] = _RefuseScripting(module, "__prepare_scriptable__")


def detach(module: nn.Module) -> None:
    """Restore the module's calls to what they were before `attach`."""
    forward = _forwards.pop(module, None)
    if forward is None:
        return
    forward.handler = None  # what has been wrapped around it since keeps it, and runs plainly
    entries = module.__dict__
    if entries.get("forward") is forward:
        if forward.before is None:
            del entries["forward"]
        else:
            entries["forward"] = forward.before
    for name in [name for name, value in entries.items() if isinstance(value, _WithoutPlan)]:
        del entries[name]


def attached(module: nn.Module) -> Handler | None:
    """Return the handler of this module's calls, if it has a plan."""
    forward = _forwards.get(module)
    return None if forward is None else forward.handler


@contextlib.contextmanager
def unplanned(model: nn.Module) -> Iterator[None]:
    """Run the model inside the block without the plan that it has, which keeps its compiled policies."""
    found = [forward for module in model.modules() if (forward := _forwards.get(module)) is not None]
    handlers = [forward.handler for forward in found]
    for forward in found:
        forward.handler = None
    try:
        yield
    finally:
        for forward, handler in zip(found, handlers, strict=True):
            forward.handler = handler


class PlannedForward:
    """The `forward` in the dictionary of a planned module.

    It looks like a bound method, `__func__` and `__self__` included: accelerate binds the former again. It has no
    `__wrapped__`, by which `accelerate.unwrap_model` would take the plan off.
    """

    def __init__(self, module: nn.Module, handler: Handler) -> None:
        self._module = weakref.ref(module)  # strong, the module would be freed by the garbage collector only
        self.before: Callable[..., Any] | None = module.__dict__.get("forward")
        """What the dictionary had; None for the class's own, which is looked up at each call: classes are swapped."""
        self.handler: Handler | None = handler
        self._run_planned = _run_planned_eagerly()
        original = self.original(module)
        self.__func__ = self._function(original)
        functools.update_wrapper(self, original)
        self.__dict__.pop("__wrapped__")
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(original)

    @property
    def __self__(self) -> nn.Module | None:
        return self._module()

    @property
    def __code__(self) -> CodeType:
        """The original's, of which `torch.export` tells the line."""
        module = self._module()
        assert module is not None
        return self.original(module).__code__  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.handler is not None and torch.is_grad_enabled() and not torch.compiler.is_exporting():
            return self._run_planned(self, args, kwargs)
        module, args = self.without_module(args)
        return self.original(module)(*args, **kwargs)

    def without_module(self, args: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
        """Unbind the module where this was bound once more, as `unwrap_model(model, keep_fp32_wrapper=False)` does."""
        module = self._module()
        assert module is not None
        return module, args[1:] if args and args[0] is module else args

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """Return what `forward` was before the plan."""
        return _class_forward(module) if self.before is None else self.before

    def _function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes the module first; for another module it runs that one's class's forward."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is self._module():
                return self(*args, **kwargs)
            return _class_forward(module)(*args, **kwargs)

        function = getattr(original, "__func__", None)
        if function is not None:
            functools.update_wrapper(forward, function)
            forward.__dict__.pop("__wrapped__")
            with contextlib.suppress(TypeError, ValueError):
                forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        assert module is not None
        return copy.deepcopy(self.original(module), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        module = self._module()
        assert module is not None
        return self.original(module).__reduce_ex__(protocol)


@functools.cache
def _run_planned_eagerly() -> Callable[[PlannedForward, tuple[Any, ...], dict[str, Any]], Any]:
    """Return what calls the handler of a forward, kept out of compiled graphs.

    Made when a plan is applied, because it imports `torch._dynamo`, which takes seconds.
    """

    # All of it, `original` included: at a graph break Dynamo makes a bound method again as `module.forward`, which is
    # the planned forward, and the handler would be given itself to run.
    @torch.compiler.disable(reason=_NOT_COMPILED)
    def run_planned(forward: PlannedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, args = forward.without_module(args)
        assert forward.handler is not None
        return forward.handler(module, forward.original(module), args, kwargs)

    return run_planned


class _WithoutPlan:
    """Wraps a method that copies a module, so that copies have no plan."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self._name = name

    def __call__(self, *args: Any) -> Any:
        module = self._module()
        assert module is not None
        entries = module.__dict__
        ours = {key: each for key, each in entries.items() if isinstance(each, (PlannedForward, _WithoutPlan))}
        for key, each in ours.items():
            if isinstance(each, PlannedForward) and each.before is not None:
                entries[key] = each.before
            else:
                del entries[key]
        try:
            made = getattr(type(module), self._name)(module, *args)
            return dict(made) if made is entries else made
        finally:
            entries.update(ours)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        return copy.deepcopy(types.MethodType(getattr(type(module), self._name), module), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self._module(), self._name)


class _RefuseScripting(_WithoutPlan):
    """Refuses the call that `torch.jit.script` makes first on every module.

    Its result takes the module's place in the parent: a plain copy would remove the plan from the model.
    """

    def __call__(self, *args: Any) -> Any:
        raise StateError(
            "torch.jit.script cannot compile a module that runs a memfit plan: remove the plan first, "
            "plan.remove(model), or script a copy.deepcopy of the model, which has none"
        )


def _class_forward(module: nn.Module) -> Callable[..., Any]:
    for kind in type(module).__mro__:
        if "forward" in kind.__dict__:
            return kind.__dict__["forward"].__get__(module, type(module))
    raise AttributeError(f"{type(module).__name__} has no forward")


# -- The model itself, all of which runs eagerly, also where torch.compile is asked for -------------------------------


class Outermost:
    """Passes calls of the model on to the inner handler, and warns when the model is compiled.

    Handlers are not compiled, nor is what they call: compiled parts between planned units would save other tensors than
    the plan knows.
    """

    def __init__(self, applied: Applied, inner: Handler | None) -> None:
        self._applied = applied
        self.inner = inner
        self._looked = False

    def __call__(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._looked:
            self._looked = True
            if called_by_compiler():
                self._applied.warn_compiled()
        if self.inner is not None:
            return self.inner(model, forward, args, kwargs)
        return forward(*args, **kwargs)
