"""The arguments of an op: its tensors as records, the rest as JSON, and back to the very same call on other tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from memfit.capture.trace_types import Op, TensorRef
from memfit.torch_private.pytree import tree_leaves

_ENCODER = msgspec.json.Encoder(enc_hook=str)
_GENERATOR = "<torch._C.Generator object>"
GENERATOR = f'"{_GENERATOR[:-1]}'
"""How a generator of random numbers that the step gives itself begins among encoded arguments; older ones go on with
an address."""


def encode_arguments(args: Any, kwargs: dict[str, Any]) -> str:
    """Return the call's arguments with `{"t": i}` in place of the i-th tensor; the order is that of `tensors_of`."""
    count = 0

    def encode(value: Any) -> Any:
        nonlocal count
        if isinstance(value, torch.Tensor):
            count += 1
            return {"t": count - 1}
        if isinstance(value, (list, tuple)):
            if value and all(isinstance(item, torch.Tensor) for item in value):
                count += len(value)
                return [{"t": number} for number in range(count - len(value), count)]
            return [encode(item) for item in value]
        if isinstance(value, dict):
            return {key: encode(item) for key, item in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            return {"f": str(value)}
        return _GENERATOR if isinstance(value, torch.Generator) else value

    return _ENCODER.encode([encode(args), encode(kwargs)]).decode()


class ArgumentTable:
    """Splits arguments into tensors and the rest, and remembers how the rest is encoded."""

    def __init__(self) -> None:
        self._encoded: dict[Any, str] = {}

    def split(self, args: Any, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], str]:
        """Return what `tensors_of` and `encode_arguments` return, in one pass."""
        tensors: list[torch.Tensor] = []
        key: list[Any] = []
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                key.append(torch.Tensor)
                continue
            kind = type(value)
            if kind is list or kind is tuple:
                for item in value:
                    if isinstance(item, (torch.Tensor, list, tuple)):
                        return tensors_of((*args, *kwargs.values())), encode_arguments(args, kwargs)
                key += (kind, len(value), *map(type, value), *value)
            else:
                key += (kind, value)
        key += kwargs
        try:
            encoded = self._encoded.get(tuple(key))
        except TypeError:
            return tensors, encode_arguments(args, kwargs)
        if encoded is None:
            encoded = self._encoded[tuple(key)] = encode_arguments(args, kwargs)
        return tensors, encoded


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Shape, stride and dtype of tensors, and the bytes behind one, counting an expanded dimension once."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    touched_bytes: int


class TensorRefTable:
    """Makes the `TensorRef`s of a capture, one object for all equal views of a storage."""

    def __init__(self) -> None:
        self._refs: dict[Any, TensorRef] = {}
        self._geometries: dict[Any, _Geometry] = {}
        self.geometry_of: dict[int, _Geometry] = {}
        """By the identity of a `TensorRef`."""

    def ref(self, tensor: torch.Tensor, number: int) -> TensorRef:
        """Return the record of a tensor on the storage of this number; equal records are the same object."""
        key = (number, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        ref = self._refs.get(key)
        return self._add(tensor, number, key) if ref is None else ref

    def _add(self, tensor: torch.Tensor, number: int, key: Any) -> TensorRef:
        geometry = self._geometries.get(key[2:])
        if geometry is None:
            geometry = self._geometries[key[2:]] = _geometry(tensor)
        ref = self._refs[key] = TensorRef(
            storage=number,
            shape=geometry.shape,
            stride=geometry.stride,
            offset=int(tensor.storage_offset()),
            dtype=geometry.dtype,
        )
        self.geometry_of[id(ref)] = geometry
        return ref


def _geometry(tensor: torch.Tensor) -> _Geometry:
    shape, stride = tuple(tensor.shape), tensor.stride()
    count = math.prod(size for size, step in zip(shape, stride, strict=True) if step != 0 or size == 0)
    return _Geometry(shape, stride, str(tensor.dtype)[6:], count * tensor.element_size())


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, also those inside lists and tuples."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
    return found


def is_wrapper(kind: type) -> bool:
    """Return whether a kind of tensor is made of other tensors, as those of quantizing libraries are."""
    return hasattr(kind, "__tensor_flatten__")


def map_wrapper(wrapper: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the same wrapper around what the function makes of the tensors inside."""
    names, context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    inner: dict[str, Any] = {}
    for name in names:
        each = getattr(wrapper, name)
        inner[name] = map_wrapper(each, function) if is_wrapper(type(each)) else function(each)
    return type(wrapper).__tensor_unflatten__(inner, context, wrapper.size(), wrapper.stride())  # type: ignore[attr-defined]


def visit_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> None:
    """Call the function on every tensor of a nested structure; of a wrapper, on the tensors that it is made of."""
    if isinstance(value, torch.Tensor):
        if is_wrapper(type(value)):
            for name in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                visit_tensors(getattr(value, name), function)
        else:
            function(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            visit_tensors(item, function)
    elif isinstance(value, dict) or hasattr(value, "values"):
        for item in value.values():
            visit_tensors(item, function)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclass_values(value).values():
            visit_tensors(item, function)


def dataclass_values(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are set.

    One that the object refuses to give is read past its `__getattribute__`: configurations of transformers refuse some.
    """
    found = {}
    for field in dataclasses.fields(value):
        try:
            found[field.name] = getattr(value, field.name)
        except Exception:
            with contextlib.suppress(AttributeError):
                found[field.name] = object.__getattribute__(value, field.name)
    return found


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a call's arguments or result in the order in which pytrees are flattened."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def generators_of(values: Any) -> list[torch.Generator]:
    """Return the generators of random numbers among arguments."""
    return [value for value in values if isinstance(value, torch.Generator)]


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return the same nested arguments with the function applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def call_of(op: Op, tensors: Sequence[torch.Tensor]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function and arguments of a recorded op, with these tensors for its inputs."""

    def decode(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            if value.keys() == {"t"}:
                return tensors[value["t"]]
            if value.keys() == {"f"}:
                return float(value["f"])
            return {name: decode(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [decode(item) for item in value]
        if isinstance(value, str) and value.startswith(_GENERATOR[:-1]):
            return None
        if isinstance(value, str) and value.startswith("torch."):
            return getattr(torch, value[len("torch.") :])
        if key == "device" and value is not None:
            return tensors[0].device if tensors else torch.device("cpu")
        return value

    args, kwargs = msgspec.json.decode(op.arguments)
    namespace, packet, overload = op.name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return function, tuple(decode(args)), decode(kwargs)


def real_tensor(ref: TensorRef) -> torch.Tensor:
    """Return a CPU tensor of the same geometry. Integers are zeros, so that they are valid as indices."""
    dtype = getattr(torch, ref.dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(ref.shape, ref.stride, strict=True) if size > 0)
    if 0 in ref.shape:
        extent = 0
    flat = torch.zeros(extent, dtype=dtype)
    if dtype.is_floating_point:
        flat.fill_(0.5)
    return flat.as_strided(ref.shape, ref.stride)
