"""The outermost module of a planned model: all of it runs eagerly, also where torch.compile is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from memfit.engines.attachment import Handler
from memfit.torch_private.compiler import COMPILE_WRAPPER
from memfit.torch_private.frames import frame_above

if TYPE_CHECKING:
    from memfit.engines.local import Applied


class Outermost:
    """Passes calls of the model on. Handlers are not compiled, nor is what they call: compiled parts between planned
    units would save other tensors than the plan knows."""

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


def called_by_compiler() -> bool:
    """Whether this runs in a call of what torch.compile returned."""
    frame = frame_above(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == COMPILE_WRAPPER:
            return True
        frame = frame.f_back
    return False
