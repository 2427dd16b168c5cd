"""`Step`: what one training step is; and the step that a training function of the user's own runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import CodeType
from typing import Any, Literal, get_args

import torch
from torch import nn

from memfit.capture.environment import without_initial_values
from memfit.capture.step_checks import (
    NO_GRADIENT,
    check_batch,
    check_callables,
    check_loss_arguments,
    check_numbers,
    check_trainable,
    check_trains,
    described,
    loss_failed,
    resolve_autocast,
    resolve_shape,
)
from memfit.errors import InputError, MemfitError
from memfit.torch_private.dispatch import DisableTorchFunction

ZeroGrad = Literal["after_step", "before_forward", "before_backward", "never"]
"""Where a loop calls `zero_grad`: once for each step, however many micro-batches it accumulates."""

WarmUp = Literal["none", "forward", "evaluation"]
"""What a process runs on the device before its first step."""

OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer] | Callable[..., torch.optim.Optimizer]


def spec(shape: tuple[int, ...] | list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that has a shape and a dtype and no data, for a batch that doesn't exist yet."""
    if not isinstance(shape, (tuple, list)) or not isinstance(dtype, torch.dtype):
        raise InputError(
            f"spec takes a shape and a dtype, as in spec((4, 8), torch.int64); got {shape!r} and {dtype!r}"
        )
    return torch.empty(resolve_shape(shape), dtype=dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: model, batch, loss and optimizer, or a callable `run(model, optimizer, batch)` of one's own.

    `model` is a module on any device or a callable that builds one. `batch` is a dict of keyword inputs, a tuple or
    list of positional ones, or the only one; several micro-batches are taken with `accumulation_steps`. `loss` is
    called with the output and the batch and defaults to the output's `.loss`, or to the output when that is a scalar.
    `optimizer` is a class, an optimizer, a function that makes one, or None for a step without one. `autocast` may be
    given by name, `"bfloat16"`.

    Loops differ in what they hold while they compute, and a plan is for one of them:
    `zero_grad` is where the loop calls it: `"after_step"` (or True), `"before_forward"`, `"before_backward"` (between
    the forward and the backward of the first micro-batch, as Lightning does) or `"never"` (or False: gradients stay).
    `keep_output` is whether the loop holds the model's output while backward runs, as `output = model(x)` does; False
    for loops that keep the loss alone (`model(x).loss.backward()`, a function that returns the loss, transformers'
    Trainer, Lightning).
    `resident_batches` is how many batches are on the device at once: more than one where the loop fetches ahead.
    `warm_up` is what the process runs before its first step, on a batch like this one: `"forward"`, as in training (a
    dry run, a model summary), `"evaluation"`, forward and loss under `no_grad`, or `"none"`. It changes no step, but
    what the caching allocator holds from then on.
    """

    model: nn.Module | Callable[..., nn.Module]
    batch: Any = None
    _: KW_ONLY
    loss: Callable[..., torch.Tensor] | None = None
    optimizer: OptimizerLike | None = torch.optim.AdamW
    autocast: torch.dtype | None = None
    clip_grad_norm: float | None = None
    accumulation_steps: int = 1
    zero_grad: bool | ZeroGrad = "after_step"
    set_to_none: bool = True
    keep_output: bool = True
    resident_batches: int = 1
    warm_up: WarmUp = "none"
    run: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module) and not callable(self.model):
            raise InputError(
                f"Step.model is a {type(self.model).__name__}; give an nn.Module or a callable that builds one"
            )
        check_callables(self.loss, self.optimizer, self.run)
        check_numbers(self.accumulation_steps, self.clip_grad_norm, self.resident_batches)
        object.__setattr__(self, "autocast", resolve_autocast(self.autocast))
        object.__setattr__(self, "zero_grad", _resolve_zero_grad(self.zero_grad))
        if self.warm_up not in get_args(WarmUp):
            names = ", ".join(repr(name) for name in get_args(WarmUp))
            raise InputError(f"Step.warm_up is {self.warm_up!r}; give one of {names}")
        for name in ("set_to_none", "keep_output"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"Step.{name} is {getattr(self, name)!r}; give True or False")
        if self.run is None:
            check_batch(self.batch)
            if self.loss is not None:
                check_loss_arguments(self.loss)

    def build_model(self, **arguments: Any) -> nn.Module:
        """Return the model itself, built on meta when it was given as a callable, which is given the arguments."""
        if isinstance(self.model, nn.Module):
            return self.model
        try:
            with torch.device("meta"), without_initial_values():
                model = self.model(**arguments)
        except MemfitError:
            raise
        except (AssertionError, RuntimeError) as error:
            raise InputError(
                f"the model factory failed on the meta device: {error}. Build the model without moving it to a GPU, "
                "loading weights or reading values; memfit puts it on the target itself"
            ) from error
        except Exception as error:
            raise InputError(f"the model factory raised {type(error).__name__}: {error}") from error
        if not isinstance(model, nn.Module):
            raise InputError(
                f"the model factory returned a {type(model).__name__}, not an nn.Module; a function that runs a whole "
                "step is given as memfit.Step(model, batch, optimizer=..., run=function)"
            )
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Return the optimizer, made for this model when a class or a factory was given."""
        if self.optimizer is None or isinstance(self.optimizer, torch.optim.Optimizer):
            return self.optimizer
        check_trainable(model)
        with DisableTorchFunction():
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        make: Callable[..., torch.optim.Optimizer] = self.optimizer
        optimizer = make(trainable)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"Step.optimizer returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        return optimizer

    def with_batch(self, batch: Any) -> Step:
        """Return the same step on another batch."""
        return replace(self, batch=batch)

    def execute(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device_type: str) -> None:
        """Run the step once. Capture and measurement both run this very function, so they hold the same references."""
        if self.run is not None:
            self._run_own(self.run, model, optimizer)
            return
        if self.zero_grad == "before_forward":
            self._zero_grad(model, optimizer)
        for number in range(self.accumulation_steps):
            with self._autocast(device_type):
                output = call_model(model, self.batch)
                loss = self._loss_of(output)
            if not self.keep_output:
                output = None
            check_trains(loss, model)
            if self.accumulation_steps > 1:
                loss = loss / self.accumulation_steps
            if number == 0 and self.zero_grad == "before_backward":
                self._zero_grad(model, optimizer)
            loss.backward()
        if self.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip_grad_norm)
        if optimizer is not None:
            optimizer.step()
        if self.zero_grad == "after_step":
            self._zero_grad(model, optimizer)

    def _zero_grad(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        target = optimizer if optimizer is not None else model
        target.zero_grad(set_to_none=self.set_to_none)

    def _run_own(self, run: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        try:
            run(*(model, optimizer, self.batch)[: _positional_arity(run)])
        except RuntimeError as error:
            if NO_GRADIENT in str(error):
                check_trainable(model)
            raise

    def _autocast(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self.autocast)

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self.loss is not None:
            loss = self._given_loss(self.loss, output)
        elif isinstance(output, Mapping) and "loss" in output:
            loss = output["loss"]
        else:
            loss = getattr(output, "loss", output)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss
        if self.loss is not None:
            raise InputError(
                f"the loss function returned {described(loss)}; it must return a tensor with one number, without "
                ".item(), for example output.mean()"
            )
        raise InputError(
            f"no loss was given, and what the model returned as its loss is {described(loss)}, not one number. Give "
            "Step.loss, called with the output and the batch: loss=lambda output, batch: ...; or put labels into the "
            "batch, if the model computes its loss from them"
        )

    def _given_loss(self, loss: Callable[..., torch.Tensor], output: Any) -> Any:
        try:
            return loss(output, self.batch)
        except MemfitError:
            raise
        except Exception as error:
            explained = loss_failed(loss, self.batch, error)
            if explained is None:
                raise
            raise explained from error


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on the batch: a dict is keyword inputs, a tuple or list positional ones, else the only input."""
    args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if batch is None or isinstance(batch, Mapping):
        args = ()
    kwargs = batch if isinstance(batch, Mapping) else {}
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the batch does not fit {type(model).__name__}.forward: {error}. A dict is keyword inputs, a tuple "
            "or list positional ones, anything else the only one. Labels that only the loss takes go into the loss: "
            "Step(model, x, loss=lambda output, _: criterion(output, y)), or run the step yourself: Step(model, "
            "(x, y), run=function), called with model, optimizer and batch"
        ) from error
    return model(*args, **kwargs)


def _resolve_zero_grad(zero_grad: Any) -> ZeroGrad:
    if isinstance(zero_grad, bool):
        return "after_step" if zero_grad else "never"
    if zero_grad in get_args(ZeroGrad):
        return zero_grad
    names = ", ".join(repr(name) for name in get_args(ZeroGrad))
    raise InputError(f"Step.zero_grad is {zero_grad!r}; give one of {names}, True or False")


def _positional_arity(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return 3
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


# -- Finds the models and optimizers that a user's own training function works on -------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """The objects that work on a model: its optimizers, and what else of a training loop keeps state."""

    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    others: tuple[Any, ...] = ()

    @property
    def all(self) -> tuple[Any, ...]:
        """Everything whose attributes a step may change."""
        return (*self.optimizers, *self.others)

    @classmethod
    def of(cls, step: Step, model: nn.Module) -> Companions:
        """Return the step's own optimizer and, when a function of the user's runs the step, all with its parameters.

        Modules that this function uses beside the model, such as a loss, may keep what they see.
        """
        if step.run is None:
            return cls(optimizers=(step.optimizer,) if isinstance(step.optimizer, torch.optim.Optimizer) else ())
        known = {id(parameter) for parameter in model.parameters()}
        own = {id(module) for module in model.modules()}
        beside = {id(module): module for each in _models(step.run, set(), _DEPTH).values() for module in each.modules()}
        optimizers, others = [], [module for key, module in beside.items() if key not in own]
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, torch.optim.Optimizer):
                groups = getattr(thing, "param_groups", ())
                if thing is step.optimizer or any(id(p) in known for group in groups for p in group["params"]):
                    optimizers.append(thing)
            elif issubclass(kind, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
                others.append(thing)
        return cls(optimizers=tuple(optimizers), others=tuple(others))


def find_step(function: Callable[[], Any]) -> Step:
    """Return the step that a callable runs, with the models among the variables it uses.

    A module without parameters, such as a loss, is no model: the only one that has some keeps its own names. Looked at
    are the function's closure, its defaults, the globals it names, the attributes of the object it is bound to, the
    arguments of a `functools.partial`, and in the same way the functions found there.
    """
    required = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if required:
        raise InputError(
            f"{_name(function)} needs arguments ({', '.join(required)}); give a function without any, or "
            "memfit.Step(model, batch, optimizer=..., run=function) to have it called with model, optimizer and batch"
        )
    found = _roots(_models(function, set(), _DEPTH))
    roots = {name: model for name, model in found.items() if any(True for _ in model.parameters())}
    if not roots:
        raise InputError(
            f"no nn.Module with parameters was found among the variables of {_name(function)}; name it: "
            "memfit.Step(model, run=function)"
        )
    model = next(iter(roots.values())) if len(roots) == 1 else nn.ModuleDict(roots)
    return Step(model, optimizer=None, run=function)


_DEPTH = 3
"""How many functions deep models are looked for."""


def find_variables(function: Callable[..., Any] | None) -> list[Any]:
    """Return the values of the variables that a function uses."""
    return [] if function is None else [value for _, value in _variables(function)]


def _models(function: Any, seen: set[int], depth: int) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    seen.add(id(function))
    for name, value in _variables(function):
        if isinstance(value, nn.Module):
            found.setdefault(name, value)
        elif type(value).__module__ == getattr(function, "__module__", None) and hasattr(value, "__dict__"):
            found |= {k: v for k, v in vars(value).items() if isinstance(v, nn.Module) and k not in found}
        elif inspect.isroutine(value) and depth > 1 and id(value) not in seen:
            home = getattr(value, "__module__", None) or ""
            if home.split(".")[0] not in ("torch", "builtins", "memfit"):
                found = {**_models(value, seen, depth - 1), **found}
    return found


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield from _variables(function.func)
        yield from ((f"argument_{i}", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
        return
    owner = getattr(function, "__self__", None)
    if owner is None and not inspect.isfunction(function):
        owner, function = function, type(function).__call__
    if owner is not None:
        yield from getattr(owner, "__dict__", {}).items()
        if isinstance(owner, nn.Module):
            yield type(owner).__name__, owner
        function = getattr(function, "__func__", function)
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    for name in _names(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            yield name, parameter.default


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names a function uses, also inside the functions and comprehensions written in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _roots(models: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that are part of no other one, each once."""
    inner = {id(child) for model in models.values() for child in model.modules() if child is not model}
    roots: dict[int, tuple[str, nn.Module]] = {}
    for name, model in models.items():
        if id(model) not in inner:
            roots.setdefault(id(model), (name, model))
    return {name.replace(".", "_"): model for name, model in roots.values()}


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
