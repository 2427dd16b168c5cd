"""Real CPU kernels: which calls are known to the byte, and the measurement of all others.

Note [Certified]: a kernel may copy an operand whose layout or dtype it cannot read, and lay its results out unlike its
meta kernel says. `certified.txt` lists the ops, and the kinds of operands, for which the capture was found equal to the
real kernels in every call of a sweep over PyTorch's OpInfo database (`make ops` writes it). Any other call is made once
on real tensors of its geometry when it is small enough; what cannot be measured gets a note in the trace.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import torch

from memfit.capture.arguments import map_tensors, tensors_of
from memfit.torch_private.dispatch import DisableTorchFunction, disable_current_modes, schema_of
from memfit.torch_private.kernels import (
    fp32_precisions,
    has_onednn,
    onednn_deterministic,
    onednn_enabled,
    onednn_has_bfloat16,
    onednn_has_float16,
)
from memfit.torch_private.profiler import ALLOCATION, TORCH_OP
from memfit.torch_private.storages import storage_key

MEASURED_LIMIT_BYTES = 1 << 28
"""Calls with more bytes of operands and results than this are not made for real."""

_WIDE = frozenset((torch.float32, torch.float64))
_LOW = frozenset((torch.bfloat16, torch.float16))
_IMAGES = {4: torch.channels_last, 5: torch.channels_last_3d}
_META = torch.device("meta")


@functools.lru_cache(1)
def certified_ops() -> dict[str, frozenset[str]]:
    """Return the kinds of operands for which each op is certified (Note [Certified])."""
    return {name: frozenset(kinds) for name, *kinds in _lines() if name.startswith("aten.")}


@functools.lru_cache(1)
def inexact() -> dict[str, str]:
    """Return notes on torch functions and gradients, by name, whose steps the sweep found other than captured.

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
    """Return the note on a call of a torch function, if there is one."""
    if function in notes:
        return notes[function]
    low = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype in _LOW
    return notes.get(f"low:{function}") if low else None


def _lines() -> Iterator[list[str]]:
    for line in resources.files("memfit.capture").joinpath("certified.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            yield line.split()


def operand_kind(tensors: Sequence[torch.Tensor]) -> str:
    """Return the kind of a call's operands: their layout and, unless that is float32 or float64, their dtypes."""
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
class ResultGeometry:
    """The geometry of a result, from which it is rebuilt; `dense` where its elements fill its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int
    dense: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ResultGeometry:
        """Return the geometry of a tensor."""
        storage_bytes, stride = tensor.untyped_storage().nbytes(), tensor.stride()
        fills = storage_bytes == tensor.numel() * tensor.element_size()
        dense = fills and (tensor.is_contiguous() or torch.empty_like(tensor, device=_META).stride() == stride)
        return cls(tuple(tensor.size()), stride, int(tensor.storage_offset()), tensor.dtype, storage_bytes, dense)

    def empty(self) -> torch.Tensor:
        """Return a meta tensor of this geometry."""
        result = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
        if not self.dense:
            storage = torch.empty(self.storage_bytes, dtype=torch.uint8, device=_META).untyped_storage()
            result.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]
        return result


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """What a real call allocated beyond its results, and the results where each has a storage of its own."""

    workspace_bytes: int
    results: tuple[ResultGeometry, ...] | None

    def lay_out(self, result: Any) -> Any:
        """Return the captured results in the real ones' layout."""
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
    return measured_once(("call", taken, *signature(func, args, kwargs)), lambda: _measure(func, args, kwargs))


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
            results = tuple(map(ResultGeometry.of, outputs)) if own else None
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        torch.default_generator.set_state(generator)
    return MeasuredCall(held_bytes(events), results)


def _real(value: Any, writes: bool) -> Any:
    """Return known tensors, copies where the call writes, made-up ones for others, and no generators of the user's."""
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


# -- The internal allocations of a CPU kernel, measured by running it once on tensors of its shapes -------------------
#
# Only for kernels whose choice of layout is the vendor library's own and changes with the machine (oneDNN's
# convolutions, recurrent layers and low-precision products); what ATen allocates itself is in the rules.


@contextlib.contextmanager
def real_execution() -> Iterator[None]:
    """Run ops inside the block for real, without the capture's modes and in the grad mode of the moment."""
    with disable_current_modes(), DisableTorchFunction():
        yield


def probe_workspace(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return the bytes that the kernel holds at its highest beyond its results."""
    with real_execution():
        args, kwargs = map_tensors(args, real_like), map_tensors(kwargs, real_like)
        func(*args, **kwargs)
        with allocations() as events:
            result = func(*args, **kwargs)
        del result
    return held_bytes(events)


def held_bytes(events: Iterable[AllocatorEvent]) -> int:
    """Return the bytes held at the highest point beyond those that are left in the end."""
    alive: dict[int, int] = {}
    level = peak = 0
    for event in events:
        if event.bytes > 0:
            alive[event.address] = event.bytes
            level += event.bytes
        else:  # what was allocated earlier, and is only freed here, is not the kernel's
            level -= alive.pop(event.address, 0)
        peak = max(peak, level)
    return peak - level


_PROBED: dict[Any, Any] = {}
_Measurement = TypeVar("_Measurement")


def measured_once(key: Any, probe: Callable[[], _Measurement]) -> _Measurement:
    """Return a measurement, made once a process for each key and all settings by which kernels are chosen."""
    full = (torch.get_num_threads(), *_kernel_choices(), key)
    if full not in _PROBED:
        _PROBED[full] = probe()
    return _PROBED[full]


def _kernel_choices() -> tuple[Any, ...]:
    """Return the settings by which torch chooses CPU kernels; the instruction set cannot change within a process."""
    return (
        onednn_enabled(),
        onednn_deterministic(),
        torch.are_deterministic_algorithms_enabled(),
        *fp32_precisions("matmul", "conv", "rnn"),
    )


def vendor_has(dtype: torch.dtype) -> bool:
    """Ask torch whether oneDNN is used for this floating point dtype on this machine (mkldnn/Utils.h)."""
    if not has_onednn or not onednn_enabled():
        return False
    with real_execution():
        if dtype == torch.bfloat16:
            return onednn_has_bfloat16()
        if dtype == torch.float16:
            return onednn_has_float16()
    return dtype == torch.float32


def signature(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the internal allocations of a call depend on."""
    tensors = tensors_of((*args, *kwargs.values()))
    rest = repr(map_tensors((args, kwargs), lambda _: None))
    return (func, rest, *((tuple(t.shape), t.stride(), t.dtype) for t in tensors))


def real_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real tensor of the same geometry; integers are zeros, so that they are valid as indices."""
    return filled(tensor.size(), tensor.stride(), tensor.dtype) if tensor.is_meta else tensor


def filled(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a real tensor of this geometry, of small numbers; its elements may share memory."""
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    value = 0.01 if dtype.is_floating_point or dtype.is_complex else 0
    flat = torch.full((0 if 0 in size else last + 1,), value, dtype=dtype, device="cpu")
    return flat.as_strided(size, stride)


# -- What the CPU allocator does while something runs, as torch's profiler records it ---------------------------------


_STDERR = 2
_CHATTER = b"SyncActivityProfilerHandler"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorEvent:
    """One allocation (positive bytes) or free (negative) and the ops it happened in, outermost first."""

    bytes: int
    address: int
    ops: tuple[str, ...]


@contextlib.contextmanager
def allocations() -> Iterator[list[AllocatorEvent]]:
    """Record every allocation and free of the CPU allocator inside the block, in order; the list is filled at its end.

    Frees on threads that the profiler does not know (Gloo's) are missing.
    """
    events: list[AllocatorEvent] = []
    # torch.profiler.profile would warn or parse every event into Python objects that nobody reads, which takes longer
    # than the step; the tree of events is all that is needed.
    profiler = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
    with _without_chatter():
        profiler.__enter__()
    try:
        yield events
    finally:
        with _without_chatter():
            profiler.__exit__(None, None, None)
    assert profiler.kineto_results is not None
    events.extend(_collect(profiler.kineto_results.experimental_event_tree()))


def _collect(roots: list[Any]) -> list[AllocatorEvent]:
    """Return the CPU's events of the profiler's trees in order of time."""
    found: list[tuple[int, AllocatorEvent]] = []
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ()) for root in reversed(roots)]
    while stack:
        event, ops = stack.pop()
        children = event.children
        if children:
            inner = (*ops, event.name) if event.tag == TORCH_OP else ops
            stack.extend([(child, inner) for child in reversed(children)])
        elif event.tag == ALLOCATION:  # has no children
            fields = event.extra_fields
            if fields.device.type == "cpu":
                record = AllocatorEvent(bytes=fields.alloc_size, address=fields.ptr or 0, ops=ops)
                found.append((event.start_time_ns, record))
    found.sort(key=lambda pair: pair[0])
    return [event for _, event in found]


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Keep the profiler's two lines a session off the user's terminal; anything else that was written passes."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as written:
        saved = os.dup(_STDERR)
        os.dup2(written.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(saved, _STDERR)
            os.close(saved)
            written.seek(0)
            for line in written:
                if _CHATTER not in line:
                    os.write(_STDERR, line)
