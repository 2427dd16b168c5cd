"""The region of the loss: it is no module, so its ops are written down while they run (Note [Tape]).

It begins when a module's call ends, the model's own or that of the last one inside it, and ends with its last op.

Note [Guest]: nobody says when a loss ends, or that there will be one, so its tape is a mode and a pair of hooks among
those that the user opens and closes. It takes itself off: after the last op that the plan knows, or the first that it
does not. A mode is not on the stack while it handles an op, and is put back afterwards; so it leaves something in the
op's keyword arguments, which torch drops right after that. Where it cannot go it stays and does nothing, until its next
op: on another thread, and in a scope that gives the keys of torch's dispatcher back as it found them. Of these the one
for modes must be there if, and only if, there are modes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.engines.attachment import Handler
from memfit.engines.mode import Mode
from memfit.engines.phase import Calls
from memfit.engines.policy import RunPolicy
from memfit.engines.rerun import running_again
from memfit.engines.tape import Saved, Tape
from memfit.plans.wrappers import named_modules
from memfit.torch_private.autograd import (
    in_backward,
    pop_saved_tensor_hooks,
    saved_tensor_hooks_enabled,
    top_saved_tensor_hooks,
)
from memfit.torch_private.dispatch import current_dispatch_mode, pop_mode, push_mode
from memfit.torch_private.frames import frame_above
from memfit.torch_private.functorch import FOLDER

if TYPE_CHECKING:
    from memfit.engines.local import Applied


LossPolicy = tuple[RunPolicy, str | None, int]
"""The policy, the module after which the region begins, and after which call of it."""

_LEAVING = "memfit_leaving"


class LossRegion:
    """Runs the losses of a step's passes under their policies, around what else handles the model's calls."""

    def __init__(self, applied: Applied, mode: Mode, calls: Calls, inner: Handler | None) -> None:
        self._applied = applied
        self._mode = mode
        self._calls = calls
        self._inner = inner
        self._tape: weakref.ref[LossTape] | None = None
        self._found: dict[str, weakref.ref[nn.Module]] = {}

    def end(self) -> None:
        """The region that is being written down, if any, ends here."""
        tape = None if self._tape is None else self._tape()
        self._tape = None
        if tape is not None:
            tape.end()

    def __call__(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def run() -> Any:
            if self._inner is not None:
                return self._inner(model, forward, args, kwargs)
            return forward(*args, **kwargs)

        if running_again() or in_backward():
            return run()
        self.end()
        if not self._mode.training:
            result = run()
            if self._mode.evaluated_unlike_planned:
                self._applied.warn_evaluated(self._calls.name, result)
            return result
        found: LossPolicy | None = self._calls.next()
        if found is None:
            return run()
        policy, after, call = found
        tape = LossTape(policy, self._applied.device_type, self._applied.phase.leave, self._applied.warn_loss)
        if after is not None:
            return _inside(self._last(model, after), call, tape, run)
        result = run()
        self._tape = weakref.ref(tape)
        tape.begin()
        return result

    def _last(self, model: nn.Module, path: str) -> nn.Module | None:
        """Find the module at whose end the region begins; None for the model itself."""
        if not path:
            return None
        known = self._found.get(path)
        module = None if known is None else known()
        if module is None:
            module = dict(named_modules(model))[path]
            self._found[path] = weakref.ref(module)
        return module


def _inside(last: nn.Module | None, call: int, tape: LossTape, run: Callable[[], Any]) -> Any:
    """The region begins when a module inside the model has been called for the last time."""
    if last is None:
        tape.begin()
        try:
            return run()
        finally:
            tape.end()
    before = last.__dict__.get("forward")
    forward = last.forward
    count = 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        result = forward(*args, **kwargs)
        count += 1
        if count == call + 1:
            tape.begin()
        return result

    last.__dict__["forward"] = watched
    try:
        return run()
    finally:
        tape.end()
        if before is None:
            del last.__dict__["forward"]
        else:
            last.__dict__["forward"] = before


class LossTape(Tape):
    """A tape that takes itself off (Note [Guest])."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True  # compiled, this code would keep what it leaves in the keyword arguments

    def __init__(
        self,
        policy: RunPolicy,
        device_type: str,
        on_backward: Callable[[], None] | None = None,
        on_differing: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(policy, device_type, on_backward)
        self._on_differing = on_differing
        self._hooked = False
        self._awaited = sum(op == policy.ops - 1 for op, _ in policy.dropped)
        """Results of the last op that are dropped: autograd packs them when the op is over."""

    def begin(self) -> None:
        """Write down what this thread runs from now on, unless somebody else looks at its ops."""
        if current_dispatch_mode() is None and _hooks_are_free() and not _keys_are_held():
            push_mode(self)  # not __enter__: its flags are right only if modes go in the order in which they came

    def end(self) -> None:
        super().end()
        self.leave()

    def leave(self) -> None:
        """Be taken off this thread's modes and hooks, where that can be done."""
        if current_dispatch_mode() is self and not _keys_are_held():
            pop_mode()
        hooks = top_saved_tensor_hooks()
        if hooks is not None and getattr(hooks[0], "__self__", None) is self:
            pop_saved_tensor_hooks()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if not self._hooked:  # not before there is an op: until then the user may open or forbid hooks
            self._hooked = True
            if self.followed and _hooks_are_free():
                saved_tensors_hooks(self.pack, Tape.unpack).__enter__()
            else:
                self.followed = False
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except BaseException:
            self.followed = False
            raise
        if self._ops >= self.policy.ops and not self._awaited:
            self.followed = False
        if not self.followed:
            kwargs[_LEAVING] = _Leaving(self)
            if self.differs is not None and self._on_differing is not None:
                self._on_differing(self.differs)
        return result

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Hook for what autograd saves."""
        if not self.followed:
            self.leave()
            return Saved(None, tensor.detach() if tensor.grad_fn is not None else tensor)
        saved = super().pack(tensor)
        if self._ops >= self.policy.ops:
            self._awaited -= 1
            if self._awaited <= 0:
                self.end()
        return saved


class _Leaving:
    """Takes a tape off when it goes itself."""

    __slots__ = ("_tape",)

    def __init__(self, tape: LossTape) -> None:
        self._tape = tape

    def __del__(self) -> None:
        self._tape.leave()


def _hooks_are_free() -> bool:
    """Whether nobody else has hooks for saved tensors here, or forbids them."""
    enabled = saved_tensor_hooks_enabled()
    return enabled and top_saved_tensor_hooks() is None


def _keys_are_held() -> bool:
    """Whether this runs in a scope at whose end the dispatcher's keys are put back: inference mode, torch.func, and
    calls of what torch.compile gave."""
    if torch.is_inference_mode_enabled():
        return True
    frame = frame_above(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(FOLDER) or "saved_include_set" in code.co_varnames:
            return True
        frame = frame.f_back
    return False
