"""The peak of a step as the allocator or the kernel counts it anyway: no profiler, no events."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


class Meter(Protocol):
    """Measures tensor memory of a step. Differences up to `noise_bytes` mean nothing."""

    noise_bytes: int

    def begin(self) -> None:
        """A step begins."""
        ...

    def peak_bytes(self) -> int | None:
        """The highest point since then."""
        ...

    def now_bytes(self) -> int | None:
        """What is allocated at this moment."""
        ...


class CudaMeter:
    """The caching allocator's own statistics, those that torch.cuda.max_memory_allocated returns."""

    noise_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device)

    def now_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)


class ProcessMeter:
    """The kernel's count of the process's pages, above what tensors that outlive steps took at the step's begin.

    Memory that malloc keeps for itself is in it or not, depending on sizes: hence the noise.
    """

    noise_bytes = 64 << 20

    def __init__(self, resident_bytes: Callable[[], int]) -> None:
        self._resident_bytes = resident_bytes
        self._offset: int | None = None

    def begin(self) -> None:
        try:
            _CLEAR.write_text(_RESET_PEAK)
            rss = _status("VmRSS")
        except OSError:  # not Linux, or a container that forbids it: nothing is measured
            rss = None
        self._offset = None if rss is None else self._resident_bytes() - rss

    def peak_bytes(self) -> int | None:
        return self._above("VmHWM")

    def now_bytes(self) -> int | None:
        return self._above("VmRSS")

    def _above(self, name: str) -> int | None:
        count = None if self._offset is None else _status(name)
        return None if count is None or self._offset is None else count + self._offset


def meter_of(device: torch.device, resident_bytes: Callable[[], int]) -> Meter:
    """What can measure on this device."""
    return CudaMeter(device) if device.type == "cuda" else ProcessMeter(resident_bytes)


def limit_of(device: torch.device) -> tuple[str, int] | None:
    """What limits the memory there: a name for it, and how much it allows."""
    if device.type == "cuda":
        return "the device has", torch.cuda.mem_get_info(device)[1]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else ("the process may map (RLIMIT_AS)", soft)


def _status(name: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return None
