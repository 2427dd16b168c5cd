"""What a step takes: time, its parts, and the allocator's highest point."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_RUNTIME = ("FSDP::", "memfit::", "DistributedDataParallel", "torch.distributed", "c10d::", "gloo:")
_MEASURED = 3


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Wall time and this thread's own time of a step, in ms."""
    begin, own = time.perf_counter(), time.thread_time()
    step()
    return (time.perf_counter() - begin) * 1e3, (time.thread_time() - own) * 1e3


def parts_of(step: Callable[[], float]) -> dict[str, float]:
    """Times of ops by what they are for, in ms a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(_MEASURED):
            step()
    tree = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    found = {"compute": 0.0, "copies": 0.0, "optimizer": 0.0}
    stack: list[tuple[Any, str]] = [(event, "compute") for event in tree]
    while stack:
        event, part = stack.pop()
        if event.name.startswith(_RUNTIME):
            part = "copies"
        elif event.name.startswith("Optimizer."):
            part = "optimizer"
        if event.name.startswith("aten::"):
            inner = sum(child.duration_time_ns for child in event.children)
            found[part] += max(event.duration_time_ns - inner, 0) / 1e6 / _MEASURED
        stack += [(child, part) for child in event.children]
    return found


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What stays between steps: this rank's parameters, buffers and optimizer state."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    found: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.detach().untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def rise_bytes(step: Callable[[], float]) -> int:
    """By how much the process grows in a step over what it has between steps: `VmHWM`, the median of some steps."""
    found = []
    for _ in range(_MEASURED):
        ctypes.CDLL(None).malloc_trim(0)
        before = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        step()
        found.append(_status_bytes("VmHWM") - before)
    return sorted(found)[_MEASURED // 2]


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
