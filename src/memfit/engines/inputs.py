"""Inputs of a module by kind: calls whose inputs are alike can use one recipe."""

from __future__ import annotations

import enum
import types
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import nn

_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_FIXED = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


class Changing(Exception):
    """An input that may change while the module runs, so that its code cannot be run again."""


def kind_of(value: Any) -> Hashable:
    """Equal for inputs that are alike; raises `Changing` for what is neither tensor, number, name nor container."""
    if isinstance(value, torch.Tensor):
        layout = value.stride() if value.layout is torch.strided else value.layout
        return value.shape, layout, value.dtype, value.requires_grad
    if isinstance(value, _PLAIN):
        return cast(Hashable, value)
    if isinstance(value, float | complex):  # may be another in every step
        return type(value)
    if isinstance(value, slice):
        return slice, kind_of(value.start), kind_of(value.stop), kind_of(value.step)
    if isinstance(value, tuple | list):
        return type(value), *map(kind_of, value)
    if isinstance(value, dict):
        return dict, *((key, kind_of(each)) for key, each in value.items())
    if isinstance(value, _FIXED):
        return id(value)
    raise Changing(type(value).__name__)


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> Hashable:
    """Equal for calls that are alike; autocast is part of it."""
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    names = tuple(kwargs)
    return autocast, tuple(map(kind_of, args)), names, tuple(map(kind_of, kwargs.values()))
