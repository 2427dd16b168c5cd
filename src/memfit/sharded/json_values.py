"""Python values as JSON that gives them back exactly: tuples, small tensors and floats that JSON has no word for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from memfit.errors import InputError

_MARK = "$"


def to_json(value: Any, what: str) -> Any:
    """A value that msgspec can write; `what` names it where it cannot be written."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": tensor_bytes(value).hex(), "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if type(value) is list:
        return [to_json(each, what) for each in value]
    if type(value) is tuple:
        return {"$tuple": [to_json(each, what) for each in value]}
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key.startswith(_MARK)]
        if wrong:
            raise InputError(f"{what} has the key {wrong[0]!r}; keys must be strings that do not begin with '{_MARK}'")
        return {key: to_json(each, what) for key, each in value.items()}
    raise InputError(
        f"{what} has a {type(value).__name__}, which cannot be saved as JSON; give numbers, strings, lists, tuples, "
        "dicts and tensors"
    )


def from_json(value: Any) -> Any:
    """The value that was given to `to_json`."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(from_json(each) for each in value["$tuple"])
    if "$dtype" in value:
        return dtype_of(value["$dtype"])
    if "$tensor" in value:
        content = bytearray.fromhex(value["$tensor"])
        return tensor_of(content, dtype_of(value["dtype"])).reshape(value["shape"])
    return {key: from_json(each) for key, each in value.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"this save has tensors of dtype {name!r}, which this PyTorch has not; install a newer one")
    return found


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor, one after another; on a CPU without a copy."""
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_of(content: bytearray, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor on these bytes."""
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
