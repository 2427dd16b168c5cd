"""The internal allocations of a CPU kernel, measured by running it once on tensors of its shapes.

Only for kernels whose choice of layout is the vendor library's own and changes with the machine (oneDNN's
convolutions, recurrent layers and low-precision products); what ATen allocates itself is in the rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from memfit.capture.allocations import AllocatorEvent, allocations
from memfit.capture.arguments import map_tensors, tensors_of
from memfit.torch_private.dispatch import DisableTorchFunction, disable_current_modes
from memfit.torch_private.kernels import (
    fp32_precisions,
    has_onednn,
    onednn_deterministic,
    onednn_enabled,
    onednn_has_bfloat16,
    onednn_has_float16,
)


@contextlib.contextmanager
def real_execution() -> Iterator[None]:
    """No mode of the capture applies: ops run for real, in the grad mode of the moment."""
    with disable_current_modes(), DisableTorchFunction():
        yield


def probe_workspace(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes that the kernel holds at its highest beyond its results."""
    with real_execution():
        args, kwargs = map_tensors(args, real_like), map_tensors(kwargs, real_like)
        func(*args, **kwargs)
        with allocations() as events:
            result = func(*args, **kwargs)
        del result
    return held_bytes(events)


def held_bytes(events: Iterable[AllocatorEvent]) -> int:
    """Bytes held at the highest point beyond those that are left in the end."""
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


def remembered(key: Any, probe: Callable[[], _Measurement]) -> _Measurement:
    """A measurement made once in the life of the process for each signature and all that kernels are chosen by."""
    full = (torch.get_num_threads(), *_kernel_choices(), key)
    if full not in _PROBED:
        _PROBED[full] = probe()
    return _PROBED[full]


def _kernel_choices() -> tuple[Any, ...]:
    """Settings of torch by which CPU kernels are chosen; the instruction set cannot change within a process."""
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
    """What the internal allocations of a call depend on."""
    tensors = tensors_of((*args, *kwargs.values()))
    rest = repr(map_tensors((args, kwargs), lambda _: None))
    return (func, rest, *((tuple(t.shape), t.stride(), t.dtype) for t in tensors))


def real_like(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor of the same geometry; integers are zeros, so that they are valid as indices."""
    return filled(tensor.size(), tensor.stride(), tensor.dtype) if tensor.is_meta else tensor


def filled(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A real tensor of this geometry, of small numbers; its elements may share memory."""
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    value = 0.01 if dtype.is_floating_point or dtype.is_complex else 0
    flat = torch.full((0 if 0 in size else last + 1,), value, dtype=dtype, device="cpu")
    return flat.as_strided(size, stride)
