"""Optimizers in a capture: how they do their step, and their state.

Torch's optimizers do their step one tensor after another, all tensors in lists (foreach), or in one kernel (fused).

Note [Steady state]: the recorded step is one like every step but the first, so the optimizer's state must exist before
it begins. An optimizer without state runs once while recording is paused; what that leaves behind is the state. Of
torch's Adam and AdamW only the part that makes the state of a parameter runs: with a thousand of them a step takes
long. A tensor that the step puts into the state outside of `Optimizer.step` (sharpness-aware minimization keeps the old
weights so) is only seen at the end: then the step is captured again, and begins with it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from memfit.capture.arguments import is_wrapper, map_wrapper, visit_tensors
from memfit.capture.meta_tensors import MetaTensors
from memfit.capture.recorder import Recorder
from memfit.capture.step import Step
from memfit.capture.storages import HOST
from memfit.capture.trace_types import AFTER_STEP, BEFORE_STEP, Category
from memfit.errors import InputError
from memfit.torch_private.dispatch import DisableTorchFunction, disable_current_modes
from memfit.torch_private.optimizers import init_adam_state
from memfit.torch_private.storages import storage_key

Implementation = Literal["single", "foreach", "fused"]
_FLAGS: dict[Implementation, dict[str, bool]] = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def implementations(optimizer: torch.optim.Optimizer) -> tuple[Implementation, ...]:
    """Return the ways that an optimizer can do its step; none when it has only one."""
    if not all("foreach" in group for group in optimizer.param_groups):
        return ()
    fused = all("fused" in group for group in optimizer.param_groups)
    return ("single", "foreach", "fused") if fused else ("single", "foreach")


def set_implementation(optimizer: torch.optim.Optimizer, implementation: Implementation) -> list[dict[str, Any]]:
    """Let an optimizer do its step this way; gives the flags that it had, for `set_flags`. Its state keeps its values.

    A fused step wants its counters where the parameters are.
    """
    flags = {name: on for name, on in _FLAGS[implementation].items() if name in optimizer.param_groups[0]}
    before = [{name: group[name] for name in flags} for group in optimizer.param_groups]
    set_flags(optimizer, [flags] * len(before))
    if implementation == "fused":
        for parameter, state in optimizer.state.items():
            count = state.get("step")
            if isinstance(count, torch.Tensor) and isinstance(parameter, torch.Tensor):
                state["step"] = count.to(parameter.device)
    return before


def set_flags(optimizer: torch.optim.Optimizer, flags: list[dict[str, Any]]) -> None:
    """Give each group its flags."""
    for group, each in zip(optimizer.param_groups, flags, strict=True):
        group.update(each)


@contextlib.contextmanager
def step_with(step: Step, implementation: Implementation) -> Iterator[Step]:
    """Let the step's optimizer use an implementation; an optimizer that exists is changed in the block only."""
    if isinstance(step.optimizer, torch.optim.Optimizer):
        before = set_implementation(step.optimizer, implementation)
        try:
            yield step
        finally:
            set_flags(step.optimizer, before)
        return
    make: Callable[..., torch.optim.Optimizer] | None = step.optimizer
    assert make is not None

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        set_implementation(optimizer, implementation)
        return optimizer

    yield replace(step, optimizer=made)


def implementations_of_step(step: Step) -> tuple[Implementation, ...]:
    """Return the ways that the optimizer of a step can do its step."""
    if step.optimizer is None:
        return ()
    if isinstance(step.optimizer, torch.optim.Optimizer):
        return implementations(step.optimizer)
    make: Callable[..., torch.optim.Optimizer] = step.optimizer
    try:
        return implementations(make([torch.nn.Parameter(torch.zeros(1))]))
    except Exception:  # a factory for the real parameters only: left as it is
        return ()


# -- the state of a capture's optimizers: Note [Steady state] -----------------------------------------------


LeftState = dict[str, dict[str, Any]]
"""The state that a step leaves, by optimizer and then by the parameter's name; tensors have no data."""


class OptimizerStates:
    """Follows the optimizers of one pass of a capture; `parameters` has each with its names, by identity."""

    def __init__(
        self, recorder: Recorder, meta_tensors: MetaTensors, parameters: dict[int, tuple[torch.Tensor, list[str]]]
    ) -> None:
        self.names: list[str] = []
        self.numbers: dict[int, tuple[int, ...]] = {}
        self._recorder = recorder
        self._meta_tensors = meta_tensors
        self._parameters = parameters
        self._registered: list[torch.optim.Optimizer] = []
        self._making_state = False
        self._thread = threading.get_ident()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Give the optimizer its state with a step that is not recorded, when this would be its first.

        The hook is called on every thread; optimizers of others are none of the capture's.
        """
        if threading.get_ident() != self._thread:
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InputError("LBFGS decides from values how often it runs the step; it cannot be captured")
        known = self._meta_tensors.stand_ins | self._parameters.keys()
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise InputError(
                f"a {type(optimizer).__name__} that memfit did not find steps on real parameters; give it to memfit: "
                "memfit.Step(model, batch, optimizer=..., run=...)"
            )
        self._recorder.in_optimizer = True
        if self._making_state:
            return
        self.names.append(type(optimizer).__name__)
        if not any(entries for entries in optimizer.state.values()):
            self._make_state(optimizer, args, kwargs)
        if optimizer not in self._registered:
            with DisableTorchFunction():
                self.register(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note that ops are no longer the optimizer's."""
        if threading.get_ident() != self._thread:
            return
        self._recorder.in_optimizer = False

    def _make_state(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Run the optimizer once without recording it; parameters and gradients are as before for the step to come."""
        recorder = self._recorder
        phase = recorder.phase
        self._making_state = True
        with recorder.table.pause(Category.OPTIMIZER_STATE):
            if args[1:] or kwargs or not init_adam_state(optimizer, self._made_while_paused):
                with _same_parameters(optimizer):
                    optimizer.step(*args[1:], **kwargs)
        self._making_state = False
        recorder.phase = phase
        recorder.in_optimizer = True

    def _made_while_paused(self, tensor: torch.Tensor) -> None:
        """Register a tensor of the state; counters are in host memory, which is a CPU's own."""
        on_device = tensor.is_meta or self._recorder.device_type == "cpu"
        self._recorder.table.made(tensor.untyped_storage(), BEFORE_STEP, on_device=on_device)

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Number the optimizer's state; 'step' counters of most optimizers are in host memory.

        This is done at its first step of the capture, so that it does not matter whether the state existed before.
        """
        self._registered.append(optimizer)
        table = self._recorder.table
        on_device = {
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if group.get("fused") or group.get("capturable")
        }
        for parameter, entries in optimizer.state.items():
            numbers: list[int] = []
            keeps_counters = self._recorder.device_type != "cpu" and id(parameter) not in on_device

            def note(tensor: torch.Tensor, numbers: list[int] = numbers, keeps: bool = keeps_counters) -> None:
                number = table.number_of(tensor)
                if number != HOST:
                    numbers.append(number)
                elif keeps and not tensor.is_meta and tensor.dim() == 0:  # a counter
                    table.hold_host(tensor.untyped_storage())
                elif not table.in_host_memory(tensor):
                    numbers.append(table.adopt(tensor, Category.OPTIMIZER_STATE))

            visit_tensors(entries, note)
            self.numbers[id(parameter)] = (*self.numbers.get(id(parameter), ()), *numbers)
            _, names = self._parameters.get(id(parameter), (None, [""]))
            for number in numbers:
                draft = table.drafts[number]
                draft.name = draft.name or names[0]
                draft.module = draft.module or names[0].rpartition(".")[0]

    # -- a second pass ----------------------------------------------------------------------------------------------

    def left(self, optimizers: dict[str, torch.optim.Optimizer]) -> LeftState:
        """Return the state at the end of a step that did not begin with all of it; else nothing."""
        table = self._recorder.table
        drafts = table.drafts
        made_bytes = 0
        parameters = {table.number_of(parameter) for parameter, _ in self._parameters.values()}

        def count(tensor: torch.Tensor) -> None:
            nonlocal made_bytes
            number = table.number_of(tensor)
            own = number != HOST and number not in parameters  # some make a tensor of the state a parameter's data
            if own and drafts[number].alloc_at != BEFORE_STEP and drafts[number].category is None:
                made_bytes += drafts[number].bytes

        for optimizer in optimizers.values():
            if optimizer not in self._registered:  # it did not step: what it has is there all the same
                self.register(optimizer)
            for entries in optimizer.state.values():
                visit_tensors(entries, count)
        replaced_bytes = sum(
            drafts[number].bytes for number in self._begun() if drafts[number].free_after != AFTER_STEP
        )
        if made_bytes <= replaced_bytes:
            return {}
        return {
            key: {
                self._parameters[id(parameter)][1][0]: _map_entries(entries, _like)
                for parameter, entries in optimizer.state.items()
                if id(parameter) in self._parameters
            }
            for key, optimizer in optimizers.items()
        }

    def _begun(self) -> set[int]:
        """Return the storages of state that the step began with."""
        numbers = {number for each in self.numbers.values() for number in each}
        return {number for number in numbers if self._recorder.table.drafts[number].alloc_at == BEFORE_STEP}

    def begin_with(self, left: LeftState, optimizers: dict[str, torch.optim.Optimizer]) -> None:
        """Let optimizers begin with the state that an earlier pass left, where they have none of their own."""
        by_name = {names[0]: parameter for parameter, names in self._parameters.values()}
        for key, optimizer in optimizers.items():
            for name, entries in left.get(key, {}).items():
                own = optimizer.state.setdefault(by_name[name], {})
                if isinstance(own, dict) and isinstance(entries, dict):
                    own.update({k: v for k, v in _map_entries(entries, _like).items() if k not in own})
            self.register(optimizer)


@contextlib.contextmanager
def _same_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore gradients and data of parameters after a step: some optimizers free or replace what they have used."""
    with DisableTorchFunction(), disable_current_modes():
        before = [(p, p.grad, p.data) for group in optimizer.param_groups for p in group["params"]]
    yield
    with DisableTorchFunction(), disable_current_modes():
        for parameter, gradient, data in before:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            if storage_key(parameter) != storage_key(data):
                parameter.data = data


def optimizers_by_key(
    optimizers: tuple[torch.optim.Optimizer, ...], made: torch.optim.Optimizer | None
) -> dict[str, torch.optim.Optimizer]:
    """Name optimizers so that a second pass finds them: the user's, the one that the step makes, and those it wraps."""
    found = {f"given {id(optimizer)}": optimizer for optimizer in optimizers}
    if made is not None and all(made is not each for each in optimizers):
        found["made"] = made
        for name, value in vars(made).items():
            if isinstance(value, torch.optim.Optimizer):
                found[f"made.{name}"] = value
    return found


def _map_entries(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy an optimizer's entries with the function applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_map_entries(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map_entries(item, function) for key, item in value.items()}
    return value


def _like(tensor: torch.Tensor) -> torch.Tensor:
    if is_wrapper(type(tensor)):
        return map_wrapper(tensor, _like)
    if not tensor.is_meta:
        return tensor.detach().clone()
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
