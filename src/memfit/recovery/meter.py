"""What a step takes, as the allocator, the kernel or the C library counts it anyway: no profiler, no events."""

from __future__ import annotations

import ctypes
import functools
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from memfit.units import display_bytes
from memfit.verify import mapped_bytes

NOISE_BYTES = 64 << 20
"""Growth of the process that may be anything: buffers of libraries, Python's own memory."""

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


class Meter(Protocol):
    """Measures a step: on a GPU the peak of its tensors, on a CPU how far the process grew."""

    def begin(self) -> None:
        """Begin a step."""
        ...

    def peak_bytes(self) -> int | None:
        """Return the highest bytes of tensors since `begin`; None where nobody counts them."""
        ...

    def growth(self) -> tuple[int, int] | None:
        """Return how far the process grew since `begin`, and the bytes before it; None where the peak is known."""
        ...

    def now_bytes(self) -> int | None:
        """Return the bytes of tensors at this moment."""
        ...


class CudaMeter:
    """The caching allocator's own statistics, those that torch.cuda.max_memory_allocated returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device)

    def growth(self) -> tuple[int, int] | None:
        return None

    def now_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)


class ProcessMeter:
    """The kernel's count of the process's pages, and the C library's of what is in use.

    The highest point of the pages says nothing of tensors when it is low: pages that malloc has kept from an earlier
    step are there before. What is in use has no highest point, only a now.
    """

    def __init__(self, resident_bytes: Callable[[], int]) -> None:
        self._resident_bytes = resident_bytes
        self._there = 0
        self._pages: int | None = None
        self._in_use: int | None = None

    def begin(self) -> None:
        self._there = self._resident_bytes()
        try:
            _CLEAR.write_text(_RESET_PEAK)
            self._pages = _status("VmRSS")
        except OSError:  # not Linux, or a container that forbids it: nothing is measured
            self._pages = None
        self._in_use = in_use_bytes()

    def peak_bytes(self) -> int | None:
        return None

    def growth(self) -> tuple[int, int] | None:
        highest = None if self._pages is None else _status("VmHWM")
        return None if highest is None or self._pages is None else (max(0, highest - self._pages), self._there)

    def now_bytes(self) -> int | None:
        now = None if self._in_use is None else in_use_bytes()
        return None if now is None or self._in_use is None else self._there + now - self._in_use


class Limit(NamedTuple):
    """What limits the memory of a device, how much it allows, and how much of that is taken."""

    name: str
    allowed_bytes: int
    taken_bytes: int | None

    def __str__(self) -> str:
        taken = "" if self.taken_bytes is None else f", of which {display_bytes(self.taken_bytes)} are taken"
        return f"{self.name} {display_bytes(self.allowed_bytes)}{taken}"


def make_meter(device: torch.device, resident_bytes: Callable[[], int]) -> Meter:
    """Build the meter for this device."""
    return CudaMeter(device) if device.type == "cuda" else ProcessMeter(resident_bytes)


def find_limit(device: torch.device) -> Limit | None:
    """Find what limits the memory of this device, None when nothing does."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        return Limit("the device has", whole, whole - free)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    return Limit("the process may map (RLIMIT_AS), with its libraries and what malloc keeps,", soft, mapped_bytes())


def _status(name: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return None


# -- What the process has allocated with malloc at this moment, as the C library counts it ----------------------------
#
# Note [In use]: the kernel counts pages, and malloc keeps pages that were freed: a process that grew in an earlier
# step does not grow in this one. The C library knows what is in use. That has tensors and everything else, so
# differences between two moments are of use, not the number itself.


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_TRIAL_BYTES = 1 << 20


class _Info(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def in_use_bytes() -> int | None:
    """Return bytes in use (Note [In use]); None where the C library does not say, or is not torch's malloc."""
    count = _counter()
    return None if count is None else count()


@functools.cache
def _counter() -> Callable[[], int] | None:
    """Return glibc's counter of bytes in use if it counts a trial tensor: another malloc may have taken its place."""
    try:
        info = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    info.restype = _Info

    def count() -> int:
        found = info()
        return found.uordblks + found.hblkhd

    before = count()
    trial = torch.empty(_TRIAL_BYTES, dtype=torch.uint8)
    seen = count() - before
    del trial
    return count if seen >= _TRIAL_BYTES else None
