"""Finds the models and optimizers that a user's own training function works on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memfit.errors import InputError
from memfit.trace.step import Step


def step_of(function: Callable[[], Any]) -> tuple[Step, tuple[torch.optim.Optimizer, ...]]:
    """The step that a callable runs, with the optimizers among the variables it uses.

    Looked at are its closure, its defaults, the globals it names, the attributes of the object it is bound to, and the
    arguments of a `functools.partial`.
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
    found = dict(_variables(function))
    models = {name: value for name, value in found.items() if isinstance(value, nn.Module)}
    optimizers = tuple(
        {id(value): value for value in found.values() if isinstance(value, torch.optim.Optimizer)}.values()
    )
    roots = _roots(models)
    if not roots:
        raise InputError(
            f"no nn.Module was found among the variables of {_name(function)}; name it: "
            "memfit.Step(model, run=function)"
        )
    model = next(iter(roots.values())) if len(roots) == 1 else nn.ModuleDict(roots)
    return Step(model, optimizer=None, run=function), optimizers


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
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            yield name, parameter.default


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
