"""Finds the models and optimizers that a user's own training function works on."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from memfit.capture.step import Step
from memfit.errors import InputError


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
        """The step's own optimizer and, when a function of the user's runs the step, all that hold its parameters.

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
    """The step that a callable runs, with the models among the variables it uses.

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
    """The names a function uses, also inside the functions and comprehensions written in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _roots(models: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that are part of no other one, each once."""
    inner = {id(child) for model in models.values() for child in model.modules() if child is not model}
    roots: dict[int, tuple[str, nn.Module]] = {}
    for name, model in models.items():
        if id(model) not in inner:
            roots.setdefault(id(model), (name, model))
    return {name.replace(".", "_"): model for name, model in roots.values()}


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
