"""The region of the loss: it is no module, so its ops are written down while they run (Note [Tape]).

It begins when a module's call ends, the model's own or that of the last one inside it, and ends with the model's
forward or, after the model, with the backward. Nobody says when that begins: `torch.autograd.backward` and `grad` are
watched from the end of the model's forward until the first of them is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memfit.engines.attachment import Handler
from memfit.engines.policy import RunPolicy
from memfit.engines.rerun import running_again
from memfit.engines.tape import Saved, Tape

if TYPE_CHECKING:
    from memfit.engines.local import Applied


LossPolicy = tuple[RunPolicy, str | None, int]
"""The policy, the module after which the region begins, and after which call of it."""


class LossRegion:
    """Runs the losses of a step's passes under their policies, around what else handles the model's calls."""

    def __init__(self, applied: Applied, calls: int, policies: dict[int, LossPolicy], inner: Handler | None) -> None:
        self._applied = applied
        self._calls = calls
        self._policies = policies
        self._inner = inner
        self._count = 0
        self._running: _Running | None = None

    def reset(self) -> None:
        """The next call of the model is the first of a step."""
        self._count = 0
        self.end()

    def end(self) -> None:
        """The region that is being written down, if any, ends here."""
        if self._running is not None:
            self._running.end()
            self._running = None

    def __call__(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def run() -> Any:
            if self._inner is not None:
                return self._inner(model, forward, args, kwargs)
            return forward(*args, **kwargs)

        if running_again():
            return run()
        self.end()
        if not self._applied.training:
            return run()
        number = self._count
        self._count = (number + 1) % self._calls
        if number not in self._policies:
            return run()
        policy, after, call = self._policies[number]
        tape = Tape(policy, self._applied.device_type)
        if after is None:
            result = run()
            self._watch_backward(tape)
            return result
        return self._inside(model, after, call, tape, run)

    def _watch_backward(self, tape: Tape) -> None:
        busy = _get_current_dispatch_mode() is not None
        if busy or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return  # somebody else looks at the ops: a region that outlives this call would get in the way
        self._running = _Running(tape)
        self._running.watch_backward()

    def _inside(self, model: nn.Module, after: str, call: int, tape: Tape, run: Callable[[], Any]) -> Any:
        """The region begins when a module inside the model has been called for the last time."""
        last = model.get_submodule(after) if after else None
        running = _Running(tape)
        if last is None:
            with running:
                return run()
        before = last.__dict__.get("forward")
        forward = last.forward
        count = 0

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            result = forward(*args, **kwargs)
            count += 1
            if count == call + 1:
                running.begin()
            return result

        last.__dict__["forward"] = watched
        try:
            return run()
        finally:
            running.end()
            if before is None:
                del last.__dict__["forward"]
            else:
                last.__dict__["forward"] = before


class _Running:
    """A tape that is being written."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._hooks = saved_tensors_hooks(tape.pack, self._unpack)
        self._on = False
        self._restore: list[tuple[str, Any]] = []

    def __enter__(self) -> _Running:
        self.begin()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.end()

    def _unpack(self, saved: Saved) -> torch.Tensor:
        self.end()
        return Tape.unpack(saved)

    def begin(self) -> None:
        self._hooks.__enter__()
        self._tape.__enter__()
        self._on = True

    def end(self) -> None:
        if self._on:
            self._on = False
            self._tape.__exit__(None, None, None)
            self._hooks.__exit__()
        for name, before in self._restore:
            setattr(torch.autograd, name, before)
        self._restore = []

    def watch_backward(self) -> None:
        here = weakref.ref(self)
        for name in ("backward", "grad"):
            before = getattr(torch.autograd, name)

            def watched(*args: Any, _before: Callable[..., Any] = before, **kwargs: Any) -> Any:
                running = here()
                if running is not None:
                    running.end()
                return _before(*args, **kwargs)

            self._restore.append((name, before))
            setattr(torch.autograd, name, watched)
        self.begin()
