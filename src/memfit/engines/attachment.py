"""How a model comes to run its plan without anything of it being changed that can be seen.

Note [Attachment]: the modules of a plan keep their class, their dictionary and their hooks. What changes is `forward`
of their classes, once for each class and for as long as an instance of it has a plan: it looks the instance up, in a
table that holds it weakly, and runs it as it always did when it is not there. Copies and pickles of the model are
therefore plain models. An instance that has a `forward` of its own in its dictionary gets another there, and the old
one back on removal.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Handler = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_handlers: weakref.WeakKeyDictionary[nn.Module, Handler] = weakref.WeakKeyDictionary()
_finalizers: weakref.WeakKeyDictionary[nn.Module, weakref.finalize[..., nn.Module]] = weakref.WeakKeyDictionary()
_OWN = "_memfit_forward_before"
_NOT_COMPILED = (
    "this module runs a memfit plan, which saves and recomputes by itself, so it is not compiled: "
    "compile without fullgraph=True, or call plan.remove(model) first"
)


def attach(module: nn.Module, handler: Handler) -> None:
    """From now on, calls of this module go to the handler, with what its forward was."""
    _handlers[module] = torch.compiler.disable(handler, reason=_NOT_COMPILED)
    if "forward" in module.__dict__:
        module.__dict__["forward"] = _InstanceForward(module, module.__dict__["forward"])
    else:
        _patch(type(module))
        if module not in _finalizers:
            _finalizers[module] = weakref.finalize(module, _restore_unused, type(module))


def detach(module: nn.Module) -> None:
    """The module is called as before."""
    _handlers.pop(module, None)
    own = module.__dict__.get("forward")
    if isinstance(own, _InstanceForward):
        module.__dict__["forward"] = own.before
    finalizer = _finalizers.pop(module, None)
    if finalizer is not None:
        finalizer.detach()
    _restore_unused(type(module))


def attached(module: nn.Module) -> Handler | None:
    """What this module's calls go to, if it has a plan."""
    return _handlers.get(module)


@contextlib.contextmanager
def unplanned(model: nn.Module) -> Iterator[None]:
    """Inside the block the model runs without the plan that it has, which keeps what it has learnt."""
    handlers = []
    for module in model.modules():
        handler = attached(module)
        if handler is not None:  # attach marks it for torch.compile again
            handlers.append((module, getattr(handler, "_torchdynamo_orig_callable", handler)))
    for module, _ in handlers:
        detach(module)
    try:
        yield
    finally:
        for module, handler in handlers:
            attach(module, handler)


class _InstanceForward:
    """A `forward` in a module's own dictionary. Copies and pickles of it are those of what was there before."""

    def __init__(self, module: nn.Module, before: Callable[..., Any]) -> None:
        functools.update_wrapper(self, before)
        self.before = before
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        handler = None if module is None else _handlers.get(module)
        if handler is None or module is None or not torch.is_grad_enabled():
            return self.before(*args, **kwargs)
        return handler(module, self.before, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.before, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.before.__reduce_ex__(protocol)


def _patch(kind: type[nn.Module]) -> None:
    before = kind.forward
    if getattr(before, _OWN, None) is not None and before.__dict__.get("_memfit_class") is kind:
        return

    @functools.wraps(before)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and type(self) is kind:
            handler = _handlers.get(self)
            if handler is not None:
                return handler(self, before.__get__(self), args, kwargs)
        return before(self, *args, **kwargs)

    setattr(forward, _OWN, before)
    forward._memfit_class = kind  # type: ignore[attr-defined]
    forward._memfit_inherited = "forward" not in kind.__dict__  # type: ignore[attr-defined]
    kind.forward = forward  # type: ignore[method-assign]


def _restore_unused(kind: type[nn.Module]) -> None:
    """Give a class its forward back when no instance of it has a plan."""
    if any(type(each) is kind for each in _handlers):
        return
    forward = kind.__dict__.get("forward")
    if forward is None or getattr(forward, "_memfit_class", None) is not kind:
        return
    if forward._memfit_inherited:
        del kind.forward
    else:
        kind.forward = getattr(forward, _OWN)  # type: ignore[method-assign]
