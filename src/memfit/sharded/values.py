"""Tensors inside of what modules take and give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same value with every tensor in it changed; what has no tensor is returned as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(each, change) for each in value) if value else value
    if isinstance(value, Mapping):
        return _mapped_mapping(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: mapped(getattr(value, field.name), change) for field in dataclasses.fields(value) if field.init
        }
        if all(changed[name] is getattr(value, name) for name in changed):
            return value
        return dataclasses.replace(value, **changed)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a value."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    return found


def _mapped_mapping(value: Mapping[Any, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    kind: Callable[..., Any] = type(value)
    changed = {key: mapped(each, change) for key, each in value.items()}
    if all(changed[key] is value[key] for key in changed):
        return value
    if type(value) is dict:
        return changed
    try:
        return kind(**changed)  # ModelOutput of transformers, which is a dataclass and a dict
    except TypeError:
        return kind(changed)
