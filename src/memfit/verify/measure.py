"""The highest point of a real step: on the CPU by the allocator's own events, on CUDA by its statistics.

Note [Second of two]: the profiler does not see frees of what was allocated before it started, such as gradients that
the step before left. So two steps run inside it, and the second is the one that is measured, from an allocation made
between them. Whatever else is done in the first, such as copying gradients, must not use torch's allocator.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.capture import NO_INDEX, AllocatorEvent, Phase, Trace, no_garbage_collection
from memfit.cost import Roofline, Runtime
from memfit.memory import measured
from memfit.torch_private.autograd import in_backward

_MARK_BYTES = 4099


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """The highest point of a step above its start, and the events of the step before it and of its own.

    There are no events on CUDA. `peak_event` is the index of the event of `events` that reached the highest point, -1
    when memory never rose.
    """

    rise_bytes: int
    before: tuple[AllocatorEvent, ...] = ()
    events: tuple[AllocatorEvent, ...] = ()
    peak_event: int = -1


def measure_rise(run: Callable[[], None], device: torch.device, first: Callable[[], None] | None = None) -> Rise:
    """Run a step twice and measure the second time; `first` is what runs it the first time, `run` itself by default.

    The garbage collector is off meanwhile, or cycles would be freed at other ops each time.
    """
    gc.collect()
    with no_garbage_collection():
        return (_by_statistics if device.type == "cuda" else _by_events)(first or run, run, device)


def _by_events(first: Callable[[], None], run: Callable[[], None], _: torch.device) -> Rise:
    with measured() as truth:
        first()
        mark = torch.empty(_MARK_BYTES, dtype=torch.uint8)
        run()
    address = mark.data_ptr()
    place = next(
        index
        for index in range(len(truth.events) - 1, -1, -1)
        if truth.events[index].address == address and truth.events[index].bytes == _MARK_BYTES
    )
    level, peak, peak_event = 0, 0, -1
    events = truth.events[place + 1 :]
    for index, event in enumerate(events):
        level += event.bytes
        if level > peak:
            peak, peak_event = level, index
    return Rise(rise_bytes=peak, before=truth.events[:place], events=events, peak_event=peak_event)


def _by_statistics(first: Callable[[], None], run: Callable[[], None], device: torch.device) -> Rise:
    """Measure with the statistics of torch's caching allocator on the model's device."""
    first()
    torch.cuda.synchronize(device)
    start = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return Rise(rise_bytes=max(0, torch.cuda.max_memory_allocated(device) - start))


# -- How long real steps take: the median of some, and the forward of each module by itself ---------------------------


def step_ms(run: Callable[[], None], device: torch.device) -> float:
    """Return milliseconds of one run."""
    _settle(device)
    start = time.perf_counter()
    run()
    _settle(device)
    return (time.perf_counter() - start) * 1e3


def measure_forward_ms(run: Callable[[], None], model: nn.Module, device: torch.device) -> dict[str, float]:
    """Run a step and return the milliseconds each module spends in its own forward, without the modules inside it."""
    with _timed_modules(model, device) as spent:
        run()
    return spent


def predict_forward_ms(trace: Trace, step_ms: float) -> dict[str, float]:
    """Scale the modules' forward times in the roofline to a step that takes `step_ms`."""
    runtime = Runtime.of(trace, Roofline())
    scale = step_ms / runtime.total_ms if runtime.total_ms else 0.0
    found: dict[str, float] = defaultdict(float)
    for op, op_ms in zip(trace.ops, runtime.op_ms.tolist(), strict=True):
        if op.call != NO_INDEX and op.phase in (Phase.FORWARD, Phase.LOSS):
            found[trace.calls[op.call].module] += op_ms * scale
    return dict(found)


@contextlib.contextmanager
def _timed_modules(model: nn.Module, device: torch.device) -> Iterator[dict[str, float]]:
    """Time modules' own forwards by path; what runs inside a backward is a recompute and does not count."""
    paths = {id(module): path for path, module in model.named_modules()}
    spent: dict[str, float] = defaultdict(float)
    stack: list[tuple[int, float, float]] = []  # module, when it began, what the modules inside it took

    def before(module: nn.Module, _: Any) -> None:
        if not in_backward():
            _settle(device)
            stack.append((id(module), time.perf_counter(), 0.0))

    def after(module: nn.Module, _: Any, __: Any) -> None:
        while stack and stack[-1][0] != id(module):
            stack.pop()
        if not stack or in_backward():
            return
        _settle(device)
        _, began, inside = stack.pop()
        taken = time.perf_counter() - began
        if id(module) in paths:
            spent[paths[id(module)]] += (taken - inside) * 1e3
        if stack:
            outer, began, inside = stack[-1]
            stack[-1] = (outer, began, inside + taken)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- How much memory a step could still take on this machine ----------------------------------------------------------


def free_bytes(device: torch.device) -> int | None:
    """Return memory that is free on the device, with what torch caches there; None where nobody says."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    found = [each for each in (_machine(), _group(), _process()) if each is not None]
    return max(0, min(found)) if found else None


def _machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _group() -> int | None:
    """Return what the control group of a container leaves."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        caches = sum(
            int(line.split()[1])
            for line in (folder / "memory.stat").read_text().splitlines()
            if line.startswith(("active_file ", "inactive_file "))
        )
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + caches


def _process() -> int | None:
    """Return what is left of the process's address space, where that is limited."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
    except ImportError:
        return None
    used = mapped_bytes()
    return None if used is None else limit - used


def mapped_bytes() -> int | None:
    """Return what the process has mapped: tensors, and libraries, stacks and what malloc keeps as well."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
