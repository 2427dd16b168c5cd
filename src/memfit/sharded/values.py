"""Map over the tensors in the inputs and outputs of modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.capture import dataclass_values


def map_values(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to every tensor in a value; a part of it in which nothing changes is the same object."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return _mapped_sequence(value, change)
    if isinstance(value, Mapping):
        return _mapped_mapping(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mapped_fields(value, change)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in a value."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_values(value, note)
    return found


def _mapped_sequence(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = [map_values(each, change) for each in value]
    if all(after is before for after, before in zip(changed, value, strict=True)):
        return value
    return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)


def _mapped_mapping(value: Mapping[Any, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    kind: Callable[..., Any] = type(value)
    changed = {key: map_values(each, change) for key, each in value.items()}
    if all(changed[key] is value[key] for key in changed):
        return value
    if type(value) is dict:
        return changed
    try:
        return kind(**changed)  # ModelOutput of transformers, which is a dataclass and a dict
    except TypeError:
        return kind(changed)


def _mapped_fields(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a dataclass without its constructor, which may take other arguments or do more."""
    fields = dataclass_values(value)
    changed = {name: map_values(each, change) for name, each in fields.items()}
    if all(changed[name] is each for name, each in fields.items()):
        return value
    result = copy.copy(value)
    for name, each in changed.items():
        object.__setattr__(result, name, each)
    return result
