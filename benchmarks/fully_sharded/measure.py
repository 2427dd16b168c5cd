"""What a step takes: time, its parts, and the allocator's highest point."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType

_RUNTIME = ("FSDP::", "memfit::", "DistributedDataParallel", "torch.distributed", "c10d::", "gloo:")
_MEASURED = 3


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Wall time and this thread's own time of a step, in ms."""
    begin, own = time.perf_counter(), time.thread_time()
    step()
    return (time.perf_counter() - begin) * 1e3, (time.thread_time() - own) * 1e3


def parts_of(step: Callable[[], float]) -> tuple[dict[str, float], int]:
    """Times of ops by what they are for, in ms a step, and the peak of the allocator above the start of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(_MEASURED):
            step()
    tree = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    found = {"compute": 0.0, "copies": 0.0, "optimizer": 0.0}
    allocations: list[tuple[int, int, int]] = []
    stack: list[tuple[Any, str]] = [(event, "compute") for event in tree]
    while stack:
        event, part = stack.pop()
        if event.tag == _EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr or 0))
            continue
        if event.name.startswith(_RUNTIME):
            part = "copies"
        elif event.name.startswith("Optimizer."):
            part = "optimizer"
        if event.name.startswith("aten::"):
            inner = sum(child.duration_time_ns for child in event.children if child.tag != _EventType.Allocation)
            found[part] += max(event.duration_time_ns - inner, 0) / 1e6 / _MEASURED
        stack += [(child, part) for child in event.children]
    return found, _peak(sorted(allocations))


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


def _peak(events: list[tuple[int, int, int]]) -> int:
    """The highest sum of what is alive, by address: an address that is given out again was freed, seen or not."""
    alive: dict[int, int] = {}
    now = peak = 0
    for _, size, address in events:
        if size < 0:
            now -= alive.pop(address, 0)
            continue
        now += size - alive.get(address, 0)
        alive[address] = size
        peak = max(peak, now)
    return peak
