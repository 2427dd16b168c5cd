"""Functions of torch, Python and numpy that are replaced while a step is captured.

Some tell the capture where the step is (backward, checkpointing, generators that are made), some would look for a
device that is not there, and some decide by values that a capture does not have.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel

from memfit.capture.arguments import map_tensors
from memfit.capture.emulation import Emulation
from memfit.capture.errors import Advice
from memfit.capture.recorder import Recorder
from memfit.capture.replacements import patched, patched_item, replaced
from memfit.capture.trace_types import Phase
from memfit.torch_private.autograd import (
    checkpoint_checks,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)
from memfit.torch_private.dispatch import DisableTorchFunction
from memfit.torch_private.frames import frame_above
from memfit.torch_private.kernels import FLEX_ATTENTION_RUNS_EAGERLY


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPatches:
    """The replacements of one pass; `after_backward` is called when the gradients of a backward are there."""

    recorder: Recorder
    emulation: Emulation
    advice: Advice
    note: Callable[[str], None]
    after_backward: Callable[[], None]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the functions inside the block, on this thread."""
        with contextlib.ExitStack() as stack:
            grouping = "_group_tensors_by_device_and_dtype"
            for owner, name, wrap in (
                (torch.autograd, "backward", self._backward),
                (torch.autograd, "grad", self._grad),
                (torch.autograd.graph, "disable_saved_tensors_hooks", self._without_hooks),
                (torch.utils.checkpoint, "_checkpoint_hook", self._checkpoint),
                (torch.utils.checkpoint, "check_backward_validity", self._checkpoint),
                (torch, "clear_autocast_cache", self._clear_autocast_cache),
                (torch, "get_rng_state", self._get_rng_state),
                (random.Random, "seed", self._seeded),
                (np.random, "default_rng", self._generator),
                (torch.amp.GradScaler, "_maybe_opt_step", _always_step),
                (torch, "compile", self._not_compiled),
                (torch.Tensor, "_make_wrapper_subclass", _wrapper_without_device),
                (DistributedDataParallel, "forward", self._without_reducer),
                (sys.modules["torch.optim.optimizer"], grouping, self._grouped_on_target),
                (sys.modules["torch.nn.utils.clip_grad"], grouping, self._grouped_on_target),
            ):
                stack.enter_context(patched(owner, name, wrap))
            flex = sys.modules.get("torch.nn.attention.flex_attention")
            if flex is not None:  # the op itself, and not through Dynamo
                stack.enter_context(replaced(flex, FLEX_ATTENTION_RUNS_EAGERLY, True))
            stack.enter_context(patched_item(checkpoint_checks, "default", _shape_and_dtype))
            yield

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(*args: Any, **kwargs: Any) -> None:
            recorder = self.recorder
            if recorder.table.paused or recorder.phase is Phase.BACKWARD:
                original(*args, **kwargs)
                return
            if kwargs.get("retain_graph", args[2] if len(args) > 2 else None):
                self.advice.retain(recorder.sources.sources[recorder.sources.here(1)])
            if kwargs.get("grad_tensors") is not None:
                kwargs["grad_tensors"] = self._lifted(kwargs["grad_tensors"])
            recorder.backward_began.append(len(recorder.ops))
            recorder.phase = Phase.BACKWARD
            original(*args, **kwargs)
            recorder.phase = Phase.OPTIMIZER
            self.after_backward()

        return backward

    def _grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Record gradients that the step asks for itself as backward, and then go on with the phase from before."""

        def grad(*args: Any, **kwargs: Any) -> Any:
            recorder = self.recorder
            before = recorder.phase
            if kwargs.get("grad_outputs") is not None:
                kwargs["grad_outputs"] = self._lifted(kwargs["grad_outputs"])
            recorder.backward_began.append(len(recorder.ops))
            recorder.phase = Phase.BACKWARD
            try:
                return original(*args, **kwargs)
            finally:
                recorder.phase = before

        return grad

    def _lifted(self, gradients: Any) -> Any:
        """Return gradients that a backward begins with as they must be: on meta, like what they are gradients of."""
        lift = functools.partial(self.recorder.executor.lift, module=self.recorder.calls.path)
        return map_tensors(gradients, lift)

    def _without_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Remove the capture's hooks for saved tensors, under which `torch.func.grad` and its like refuse to run.

        What autograd saves meanwhile is still seen to live; no unit holds it, because such a call is none.
        """

        @contextlib.contextmanager
        def disable(message: str) -> Iterator[None]:
            top = top_saved_tensor_hooks()
            ours = top is not None and top[0] == self.recorder.pack
            if ours:
                pop_saved_tensor_hooks()
            try:
                with original(message):
                    yield
            finally:
                if ours:
                    push_saved_tensor_hooks(*top)

        return disable

    def _checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note the module that is checkpointed; both kinds of `torch.utils.checkpoint` call this in forward."""

        def begin(*args: Any, **kwargs: Any) -> Any:
            self.advice.checkpoint(self.recorder.calls.path)
            return original(*args, **kwargs)

        return begin

    def _clear_autocast_cache(self, original: Callable[[], None]) -> Callable[[], None]:
        def clear() -> None:
            self.emulation.autocast.clear()
            original()

        return clear

    def _not_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Leave what the step compiles itself as it is; functions are still seen to be called by a compiler."""

        def leave(model: Any = None, **options: Any) -> Any:
            self.note("the step calls torch.compile; what it compiles was captured as its eager original")
            return _as_compiled if model is None else _as_compiled(model)

        return leave

    def _get_rng_state(self, original: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Register the state that checkpointing keeps, which the generator allocates itself."""

        def get_rng_state() -> torch.Tensor:
            state = original()
            with DisableTorchFunction():
                self.recorder.adopt_fresh(state)
            return state

        return get_rng_state

    def _seeded(self, original: Callable[..., None]) -> Callable[..., None]:
        """Note that the step makes a `random.Random()`, which nobody can put back to a state that it had."""

        def seed(generator: random.Random, a: Any = None, *args: Any, **kwargs: Any) -> None:
            if a is None and _made_by_step(frame_above(1)):
                sources = self.recorder.sources
                self.recorder.draws.note_unseeded(sources.sources[sources.here(4)])  # what called its __init__
            original(generator, a, *args, **kwargs)

        return seed

    def _generator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note that the step makes a `np.random.default_rng()`."""

        def default_rng(seed: Any = None) -> Any:
            if seed is None and _made_by_step(frame_above(1)):
                self.recorder.draws.note_unseeded(self.recorder.sources.sources[self.recorder.sources.here(2)])
            return original(seed)

        return default_rng

    def _without_reducer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Run the module that DDP wraps: the reducer of the user's model would wait for gradients after the capture.

        On ranks that are not there the wrapper is the capture's, and runs as it is.
        """

        def forward(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            if self.recorder.parallel is not None:
                return original(wrapper, *args, **kwargs)
            return wrapper.module(*args, **kwargs)

        return forward

    def _grouped_on_target(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Name groups of tensors after the target's device; C++ groups meta tensors by theirs."""

        def grouped(*args: Any, **kwargs: Any) -> dict[Any, Any]:
            groups = original(*args, **kwargs)
            device = self.emulation.device
            return {(device if key[0].type == "meta" else key[0], *key[1:]): groups[key] for key in groups}

        return grouped


def _wrapper_without_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make tensor subclasses that wrap meta tensors without asking for the GPU that they would be on."""

    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = "meta"
        return original(*args, device=device, **kwargs)

    return staticmethod(make)


def _as_compiled(target: Any) -> Any:
    """Return a function that is called in a frame which `rules/flex_attention.py` knows; anything else as it is."""
    if not isinstance(target, FunctionType):
        return target

    @functools.wraps(target)
    def run_as_compiled(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return run_as_compiled


def _always_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Step always: a gradient scaler skips the optimizer when a gradient is not finite, which no steady step does."""

    def step(scaler: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    return step


def _shape_and_dtype(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what is compared between forward and recomputation; the device is emulated in one of them only."""
    return {"shape": tensor.shape, "dtype": tensor.dtype}


def _made_by_step(frame: FrameType | None) -> bool:
    """Tell whether code of the step makes a generator; the standard library and imports make some for themselves."""
    while frame is not None and frame.f_code.co_filename.startswith((random.__file__, _OWN)):
        frame = frame.f_back
    if frame is None or _is_standard(frame.f_code.co_filename):
        return False
    while frame is not None and not frame.f_code.co_filename.startswith(_OWN):
        if frame.f_code.co_name == "<module>":
            return False
        frame = frame.f_back
    return True


_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


def _is_standard(filename: str) -> bool:
    folder = os.path.dirname(random.__file__) + os.sep
    return filename.startswith(folder) and "site-packages" not in filename
