"""The highest point of a step on one of several ranks, and what the rank holds between steps.

Note [By address]: frees on Gloo's threads are missing from the allocator's events. Events are therefore replayed by
address: memory that is allocated again has been freed, whether that was seen or not. What was not seen can only raise
the highest point, so several steps are measured and the lowest is taken. Copies that Gloo makes of what it sends, and
the CPU's kernel of gradients that it casts, are the transport's; there are none on CUDA, and they do not count.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from memfit.capture import BEFORE_STEP, AllocatorEvent, Category, Trace, no_garbage_collection
from memfit.memory import measured
from memfit.torch_private.distributed_tensors import local_tensor
from memfit.torch_private.storages import storage_key
from memfit.verify.measure import measure_rise
from memfit.verify.state import tensors_in

_STEPS = 3
_MARK_BYTES = 4099
_TRANSPORT = ("c10d::", "gloo:", "aten::_chunk_cat")


def measure_rank_rise(run: Callable[[], None], device: torch.device) -> int:
    """Run some steps and return how far one rises above its start."""
    if device.type == "cuda":
        return measure_rise(run, device).rise_bytes
    gc.collect()
    marks: list[torch.Tensor] = []
    with no_garbage_collection(), measured() as truth:
        run()  # what it allocates may be freed by the next, which is not seen otherwise
        for _ in range(_STEPS):
            marks.append(torch.empty(_MARK_BYTES, dtype=torch.uint8))
            run()
    addresses = {mark.data_ptr() for mark in marks}
    begins = [n for n, e in enumerate(truth.events) if e.bytes == _MARK_BYTES and e.address in addresses][-_STEPS:]
    return lowest_rise(truth.events, begins)


def lowest_rise(events: Sequence[AllocatorEvent], begins: Sequence[int]) -> int:
    """Return the lowest of the highest points of several steps, each above its start (Note [By address])."""
    ends = [*begins[1:], len(events)]
    alive: dict[int, int] = {}
    _replay(alive, events[: begins[0]])
    found = []
    for begin, end in zip(begins, ends, strict=True):
        found.append(_replay(alive, events[begin + 1 : end]))
    return min(found)


def _replay(alive: dict[int, int], events: Iterable[AllocatorEvent]) -> int:
    """Replay a step's events on what is alive, by address, and return its highest point."""
    level = peak = 0
    own: set[int] = set()
    for event in events:
        if event.bytes < 0:
            level -= alive.pop(event.address, 0)
            continue
        before = alive.pop(event.address, 0)
        level -= before if event.address in own else 0  # an older one was freed unseen, before the step for all we know
        if any(op.startswith(_TRANSPORT) for op in event.ops):
            continue
        own.add(event.address)
        alive[event.address] = event.bytes
        level += event.bytes
        peak = max(peak, level)
    return peak


def resident_bytes(
    trace: Trace, model: nn.Module, optimizer: torch.optim.Optimizer | None, device_type: str, rounding_bytes: int
) -> int:
    """Return what this rank holds between steps: its shards and their state counted, the rest as the trace has it."""
    tensors = [*model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None)]
    if optimizer is not None:
        tensors += tensors_in(list(optimizer.state.values()))
    parts = [local_tensor(each) for each in tensors]
    here = [each for each in parts if each.device.type == device_type and each.layout is torch.strided]
    sizes = list({storage_key(each): each.untyped_storage().nbytes() for each in here}.values())
    sizes += [
        storage.bytes
        for storage in trace.storages
        if storage.alloc_at == BEFORE_STEP and storage.category in (Category.INPUT, Category.BUFFER)
    ]
    return sum(-(-n_bytes // rounding_bytes) * rounding_bytes for n_bytes in sizes)
