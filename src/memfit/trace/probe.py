"""The internal allocations of a CPU kernel, measured by running it once on tensors of its shapes.

Only for kernels whose choice of layout is the vendor library's own and changes with the machine (oneDNN's
convolutions, recurrent layers and low-precision products); what ATen allocates itself is in the rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.trace.allocations import allocations
from memfit.trace.arguments import map_tensors, tensors_of


@contextlib.contextmanager
def real_execution() -> Iterator[None]:
    """No mode of the capture applies: ops run for real, in the grad mode of the moment."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def probe_workspace(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes that the kernel holds at its highest beyond its results."""
    with real_execution():
        args, kwargs = map_tensors(args, real_like), map_tensors(kwargs, real_like)
        func(*args, **kwargs)
        with allocations() as events:
            result = func(*args, **kwargs)
        del result
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


_PROBED: dict[Any, int] = {}


def remembered(key: Any, probe: Callable[[], int]) -> int:
    """A measurement made once in the life of the process for each signature and number of threads."""
    full = (torch.get_num_threads(), key)
    if full not in _PROBED:
        _PROBED[full] = probe()
    return _PROBED[full]


def signature(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the internal allocations of a call depend on."""
    tensors = tensors_of((*args, *kwargs.values()))
    rest = repr(map_tensors((args, kwargs), lambda _: None))
    return (func, rest, *((tuple(t.shape), t.stride(), t.dtype) for t in tensors))


def real_like(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor of the same geometry; integers are zeros, so that they are valid as indices."""
    if not tensor.is_meta:
        return tensor
    real = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return real.fill_(0.01) if real.is_floating_point() else real.zero_()
