"""Capture of one training step: no GPU, no weights, no data, one pass."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit._version import __version__
from memfit.errors import InputError, MemfitError
from memfit.hardware import Target
from memfit.trace.calls import CallTracker, module_calls
from memfit.trace.discovery import step_of
from memfit.trace.emulation import Emulation, python_functions_open
from memfit.trace.placeholders import Placeholders, on_meta, optimizer_on_meta
from memfit.trace.record import NEVER, SCHEMA, Category, Module, Parameter, Phase, Trace
from memfit.trace.recorder import Recorder
from memfit.trace.rules import RuleContext, rules_for
from memfit.trace.source import SourceTable
from memfit.trace.step import Step
from memfit.trace.storages import HOST


def trace(step: Step | Callable[..., Any], *, target: str | Target = "cpu") -> Trace:
    """Capture one steady-state step as the target would run it.

    The optimizer's state exists already and gradients start as None, as in every step but the first. The model, the
    optimizer, the batch and the random state are left as they were found.
    """
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    if not isinstance(step, Step):
        if not callable(step):
            raise InputError(f"trace takes a memfit.Step or a function that runs one, not a {type(step).__name__}")
        step, optimizers = step_of(step)
    elif isinstance(step.optimizer, torch.optim.Optimizer):
        optimizers = (step.optimizer,)
    device = Target.parse(target).device
    context = RuleContext(
        device_type=device.type,
        compute_capability=device.compute_capability,
        threads=device.threads or torch.get_num_threads(),
        multiprocessors=device.multiprocessors or 0,
        vendor=device.vendor,
    )
    notes: list[str] = []
    model = _eager(step.build_model(), notes)
    capture = _Capture(step, model, context, optimizers)
    with capture.running():
        capture.run()
    return capture.result(device.name, notes)


def _eager(model: nn.Module, notes: list[str]) -> nn.Module:
    """The model behind `torch.compile`, which is captured as its eager original."""
    original = getattr(model, "_orig_mod", None)
    compiled = any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    if compiled:
        notes.append("the model is compiled; it was captured as its eager original")
    return original if isinstance(original, nn.Module) else model


class _Capture:
    """One capture: the model's stand-ins, the modes, and the phases of the step."""

    def __init__(
        self,
        step: Step,
        model: nn.Module,
        context: RuleContext,
        optimizers: tuple[torch.optim.Optimizer, ...] = (),
    ) -> None:
        self.step = step
        self.model = model
        self.context = context
        self.placeholders = Placeholders()
        self.calls = CallTracker(model)
        self.sources = SourceTable()
        rules = rules_for(context.device_type)
        self.recorder = Recorder(context=context, rules=rules, calls=self.calls, sources=self.sources)
        self.emulation = Emulation(self.recorder, context, rules.functions)
        self.optimizers = optimizers
        self.optimizer_names: list[str] = []
        self.parameters: dict[int, tuple[torch.Tensor, list[str]]] = {}
        self.modules: list[Module] = []
        self.gradients: dict[int, int] = {}
        self.states: dict[int, tuple[int, ...]] = {}
        self._warming = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Everything that must be undone after a capture, in one place."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_same_random_state())
            stack.enter_context(_no_garbage_collection())
            stack.enter_context(on_meta(self.model, self.placeholders))
            for optimizer in self.optimizers:
                stack.enter_context(optimizer_on_meta(optimizer, self.placeholders))
            yield

    def run(self) -> None:
        """Run the step once under the modes."""
        step = self.step.with_batch(self.placeholders.tree(self.step.batch))
        self._register(step)
        optimizer = step.build_optimizer(self.model)
        for each in dict.fromkeys((*self.optimizers, optimizer)):
            if each is not None:
                self._register_state(each)
        hooks = (
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        )
        try:
            with (
                warnings.catch_warnings(),
                _patched(torch.autograd, "backward", self._backward),
                _patched(torch, "clear_autocast_cache", self._clear_autocast_cache),
                _patched(torch, "get_rng_state", self._get_rng_state),
                _patched(torch.cuda.amp.common, "amp_definitely_not_available", lambda _: lambda: False),
                _patched(torch.cuda, "is_bf16_supported", lambda _: lambda *a, **k: True),
                _patched(torch.cuda, "get_device_capability", self._get_device_capability),
                _patched(
                    sys.modules["torch.optim.optimizer"],
                    "_group_tensors_by_device_and_dtype",
                    self._grouped_on_target,
                ),
                _patched(
                    sys.modules["torch.nn.utils.clip_grad"],
                    "_group_tensors_by_device_and_dtype",
                    self._grouped_on_target,
                ),
                _patched_item(_CHECKPOINT_CHECKS, "default", _shape_and_dtype),
                _eager_stance(self.model),
                module_calls(self._enter, self._leave),
                torch.autograd.graph.saved_tensors_hooks(self.recorder.pack, _same),
                python_functions_open(),
                self.emulation,
                self.recorder,
            ):
                step.execute(self.model, optimizer, self.context.device_type)
            self.recorder.table.close()
        except MemfitError:
            raise
        except Exception as error:
            explained = self.recorder.explain(error)
            if explained is None:
                raise
            raise explained from error
        finally:
            for hook in hooks:
                hook.remove()

    # -- what exists before the step --------------------------------------------------------------------------------

    def _register(self, step: Step) -> None:
        table = self.recorder.table
        for path, module in self.model.named_modules(remove_duplicate=False):
            owned: list[int] = []
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                full_name = f"{path}.{name}" if path else name
                known = self.parameters.setdefault(id(parameter), (parameter, []))
                known[1].append(full_name)
                owned.append(table.adopt(parameter, Category.PARAMETER, module=path, name=full_name))
            buffers = [
                table.adopt(buffer, Category.BUFFER, module=path, name=f"{path}.{name}" if path else name)
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
            self.modules.append(
                Module(path=path, kind=type(module).__name__, parameters=tuple(owned), buffers=tuple(buffers))
            )
        _visit(step.batch, lambda tensor: table.adopt(tensor, Category.INPUT, name="batch"))

    def _register_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Number the optimizer's state; 'step' counters of most optimizers are in host memory."""
        for parameter, entries in optimizer.state.items():
            numbers: list[int] = []

            def note(tensor: torch.Tensor, numbers: list[int] = numbers) -> None:
                if (
                    self.recorder.device_type != "cpu"
                    and not tensor.is_meta
                    and self.recorder.table.number_of(tensor) == HOST
                ):
                    self.recorder.table.hold_host(tensor.untyped_storage())
                else:
                    numbers.append(self.recorder.table.adopt(tensor, Category.OPTIMIZER_STATE))

            _visit(entries, note)
            self.states[id(parameter)] = tuple(numbers)
            _, names = self.parameters.get(id(parameter), (None, [""]))
            for number in numbers:
                draft = self.recorder.table.drafts[number]
                draft.name = draft.name or names[0]
                draft.module = draft.module or names[0].rpartition(".")[0]

    # -- phases -----------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module) -> None:
        recorder = self.recorder
        if self.calls.current == NEVER and recorder.phase is not Phase.BACKWARD:
            recorder.phase = Phase.FORWARD if self.calls.owns(module) else Phase.LOSS
        self.calls.enter(module, recorder.phase, len(recorder.ops))

    def _leave(self, _: nn.Module) -> None:
        recorder = self.recorder
        self.calls.exit(len(recorder.ops))
        if self.calls.current == NEVER and recorder.phase is Phase.FORWARD:
            recorder.phase = Phase.LOSS

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(*args: Any, **kwargs: Any) -> None:
            recorder = self.recorder
            nested = recorder.phase is Phase.BACKWARD
            if not nested:
                recorder.backward_began.append(len(recorder.ops))
                recorder.phase = Phase.BACKWARD
            original(*args, **kwargs)
            if not nested:
                recorder.phase = Phase.OPTIMIZER
                self._note_gradients()

        return backward

    def _note_gradients(self) -> None:
        with torch._C.DisableTorchFunction():
            for key, (parameter, names) in self.parameters.items():
                if parameter.grad is not None:
                    number = self.recorder.table.number_of(parameter.grad)
                    draft = self.recorder.table.drafts[number]
                    draft.category, draft.name = Category.GRADIENT, names[0]
                    draft.module = names[0].rpartition(".")[0]
                    self.gradients[key] = number

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Give the optimizer its state with a step that is not recorded, when this would be its first."""
        self.recorder.in_optimizer = True
        if not self._warming:
            self.optimizer_names.append(type(optimizer).__name__)
        if self._warming or any(entries for entries in optimizer.state.values()):
            return
        self._warming = True
        with self.recorder.table.pause(Category.OPTIMIZER_STATE):
            optimizer.step()
        self._warming = False
        self.recorder.in_optimizer = True
        with torch._C.DisableTorchFunction():
            self._register_state(optimizer)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.recorder.in_optimizer = False

    def _clear_autocast_cache(self, original: Callable[[], None]) -> Callable[[], None]:
        def clear() -> None:
            self.emulation.autocast.clear()
            original()

        return clear

    def _get_rng_state(self, original: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Checkpointing keeps the generator's state, which the generator allocates itself."""

        def get_rng_state() -> torch.Tensor:
            state = original()
            with torch._C.DisableTorchFunction():
                self.recorder.adopt_fresh(state)
            return state

        return get_rng_state

    def _get_device_capability(self, original: Callable[..., Any]) -> Callable[..., Any]:
        capability = self.context.compute_capability
        return original if capability is None else lambda *_, **__: capability

    def _grouped_on_target(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Groups of tensors by device, which C++ asks of the stand-ins, named after the target's device."""

        def grouped(*args: Any, **kwargs: Any) -> dict[Any, Any]:
            groups = original(*args, **kwargs)
            device = self.emulation.device
            return {(device if key[0].type == "meta" else key[0], *key[1:]): groups[key] for key in groups}

        return grouped

    # -- the result -------------------------------------------------------------------------------------------------

    def result(self, device: str, notes: list[str]) -> Trace:
        """The finished trace."""
        recorder = self.recorder
        parameters = tuple(
            Parameter(
                names=tuple(names),
                storage=recorder.table.number_of(parameter),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype)[6:],
                trainable=parameter.requires_grad,
                gradient=self.gradients.get(key, NEVER),
                state=self.states.get(key, ()),
            )
            for key, (parameter, names) in self.parameters.items()
        )
        return Trace(
            schema=SCHEMA,
            memfit=__version__,
            torch=str(torch.__version__),
            device=device,
            device_type=self.context.device_type,
            threads=self.context.threads if self.context.device_type == "cpu" else 0,
            autocast=str(self.step.autocast)[6:] if self.step.autocast is not None else None,
            optimizer=", ".join(self.optimizer_names),
            ops=recorder.frozen_ops(),
            storages=recorder.frozen_storages(),
            calls=self.calls.freeze(),
            modules=tuple(self.modules),
            parameters=parameters,
            sources=tuple(self.sources.sources),
            notes=(*notes, *sorted(recorder.notes), *self.context.notes),
        )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _visit(value: Any, function: Callable[[torch.Tensor], Any]) -> None:
    """Call the function on every tensor of a nested structure."""
    if isinstance(value, torch.Tensor):
        function(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _visit(item, function)
    elif isinstance(value, dict) or hasattr(value, "values"):
        for item in value.values():
            _visit(item, function)


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    state = torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _patched(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


_CHECKPOINT_CHECKS = torch.utils.checkpoint._allowed_determinism_checks_to_fns


def _shape_and_dtype(tensor: torch.Tensor) -> dict[str, Any]:
    """What checkpointing compares between forward and recomputation; the device is emulated in one of them only."""
    return {"shape": tensor.shape, "dtype": tensor.dtype}


@contextlib.contextmanager
def _patched_item(table: dict[Any, Any], key: Any, value: Any) -> Iterator[None]:
    original = table[key]
    table[key] = value
    try:
        yield
    finally:
        table[key] = original


def _eager_stance(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()
