"""Which calls of CPU kernels are known to the byte, and the measurement of all others.

Note [Certified]: a kernel may copy an operand whose layout or dtype it cannot read, and lay its results out unlike its
meta kernel says. `certified.txt` lists the ops, and the kinds of operands, for which the capture was found equal to the
real kernels in every call of a sweep over PyTorch's OpInfo database (`make ops` writes it). Any other call is made once
on real tensors of its geometry when it is small enough; what cannot be measured gets a note in the trace.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from memfit.capture.allocations import allocations
from memfit.capture.arguments import map_tensors, tensors_of
from memfit.capture.probe import filled, held_bytes, real_execution, real_like, remembered, signature
from memfit.torch_private.dispatch import schema_of
from memfit.torch_private.storages import storage_key

MEASURED_LIMIT_BYTES = 1 << 28
"""Calls with more bytes of operands and results than this are not made for real."""

_WIDE = frozenset((torch.float32, torch.float64))
_LOW = frozenset((torch.bfloat16, torch.float16))
_IMAGES = {4: torch.channels_last, 5: torch.channels_last_3d}
_META = torch.device("meta")


@functools.lru_cache(1)
def certified_ops() -> dict[str, frozenset[str]]:
    """The kinds of operands for which each op is certified (Note [Certified])."""
    return {name: frozenset(kinds) for name, *kinds in _lines() if name.startswith("aten.")}


@functools.lru_cache(1)
def inexact() -> dict[str, str]:
    """Notes on torch functions and gradients, by name, whose steps the sweep found other than captured.

    These are compositions of kernels: which kernels run, not what one of them does, differs from a real run. A name
    with "low:" in front holds for operands in low precision only.
    """
    return {
        name: f"{name.removeprefix('low:')}: the sweep over PyTorch's ops found captures of it from {low} % to "
        f"{high} % off (docs/ops.md)"
        for kind, name, low, high in (line for line in _lines() if len(line) == 4)
        if kind == "inexact"
    }


def note_on(notes: dict[str, str], function: str, args: Sequence[Any]) -> str | None:
    """The note on a call of a torch function, if there is one."""
    if function in notes:
        return notes[function]
    low = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype in _LOW
    return notes.get(f"low:{function}") if low else None


def _lines() -> Iterator[list[str]]:
    for line in resources.files("memfit.capture").joinpath("certified.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            yield line.split()


def operand_kind(tensors: Sequence[torch.Tensor]) -> str:
    """The kind of a call's operands: their layout and, where it is not one of float32 or float64, their dtypes."""
    if any(tensor.numel() == 0 for tensor in tensors):
        layout = "empty"
    elif all(tensor.is_contiguous() for tensor in tensors):
        layout = "contiguous"
    else:
        layout = "channels-last" if all(map(_dense_image, tensors)) else "strided"
    dtypes = {tensor.dtype for tensor in tensors}
    floating = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    if len(floating) > 1 or not floating <= _WIDE:
        return f"{layout}-mixed"
    return f"{layout}-integer" if dtypes - floating - {torch.bool} else layout


def _dense_image(tensor: torch.Tensor) -> bool:
    memory_format = _IMAGES.get(tensor.dim())
    return tensor.is_contiguous() or (memory_format is not None and tensor.is_contiguous(memory_format=memory_format))


@dataclass(frozen=True, slots=True)
class Made:
    """The geometry of a result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int

    def empty(self) -> torch.Tensor:
        """A meta tensor of this geometry."""
        storage = torch.empty(self.storage_bytes, dtype=torch.uint8, device=_META).untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=_META)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """What a real call allocated beyond its results, and the results where each has a storage of its own."""

    workspace_bytes: int
    results: tuple[Made, ...] | None

    def lay_out(self, result: Any) -> Any:
        """The captured results in the real ones' layout."""
        if self.results is None or len(tensors_of((result,))) != len(self.results):
            return result
        real = iter(self.results)

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            made = next(real)
            same = (
                tensor.shape == made.shape
                and tensor.stride() == made.stride
                and tensor.untyped_storage().nbytes() == made.storage_bytes
            )
            return tensor if same or not tensor.is_meta else made.empty()

        return map_tensors(result, replace)


def measure_call(func: Any, args: Any, kwargs: dict[str, Any]) -> MeasuredCall | str:
    """Make a call on real tensors of the same geometry, once a process; or say why it failed."""
    if torch.Tag.dynamic_output_shape in func.tags:  # known values, which are not part of the signature
        return _measure(func, args, kwargs)
    masks = (t for t in tensors_of((*args, *kwargs.values())) if t.dtype is torch.bool and not t.is_meta)
    with real_execution():
        taken = tuple(int(mask.sum()) for mask in masks)
    return remembered(("call", taken, *signature(func, args, kwargs)), lambda: _measure(func, args, kwargs))


def _measure(func: Any, args: Any, kwargs: dict[str, Any]) -> MeasuredCall | str:
    generator = torch.default_generator.get_state()
    try:
        with real_execution(), torch.no_grad():
            writes = schema_of(func).is_mutable
            args, kwargs = _real(args, writes), _real(kwargs, writes)
            func(*args, **kwargs)  # libraries prepare themselves in the first call
            with allocations() as events:
                result = func(*args, **kwargs)
            outputs = tensors_of((result,))
            pointers = [storage_key(output) for output in outputs]
            given = {storage_key(tensor) for tensor in tensors_of((*args, *kwargs.values()))}
            own = len(set(pointers)) == len(pointers) and given.isdisjoint(pointers)
            results = tuple(map(_made, outputs)) if own else None
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        torch.default_generator.set_state(generator)
    return MeasuredCall(held_bytes(events), results)


def _real(value: Any, writes: bool) -> Any:
    """Known tensors, or copies where the call writes; stand-ins for others; and no generators of the user's."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return real_like(value)
        if not writes:
            return value.detach()
        if value.dtype is torch.bool:  # a mask says how many elements the call takes; an expanded one is not written to
            return value.detach() if 0 in value.stride() else value.detach().clone()
        return filled(value.size(), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(_real(item, writes) for item in value)
    if isinstance(value, dict):
        return {key: _real(item, writes) for key, item in value.items() if key != "device"}
    return None if isinstance(value, torch.Generator) else value


def _made(tensor: torch.Tensor) -> Made:
    return Made(
        tuple(tensor.size()),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.untyped_storage().nbytes(),
    )
