"""What each process of the FSDP2 tests runs; a module of its own so that spawned processes can import it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.distributed.fsdp2_cases import CASES, Case, train_in_backward

_ELSEWHERE = ("c10d::", "gloo:", "aten::_chunk_cat")
"""Copies that Gloo makes of what it sends, and that the CPU's kernel makes of gradients it casts; CUDA makes none."""

_WARMUP, _MEASURED = 2, 4
_STEP = "measured step of "


class _Event(NamedTuple):
    time_ns: int
    bytes: int
    address: int
    ops: tuple[str, ...]


def measure(rank: int, ranks: int, folder: str) -> None:
    """Train every case with FSDP2 over Gloo and write down what its allocations were."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        trained = {name: _trained(case) for name, case in CASES.items()}
        activities = [torch.profiler.ProfilerActivity.CPU]
        profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        with profiler:
            for name, (train, _) in trained.items():
                for _ in range(_MEASURED):
                    with torch.profiler.record_function(f"{_STEP}{name}"):
                        train()
        found = {name: {"resident_bytes": n_bytes} for name, (_, n_bytes) in trained.items()}
        for name, events in _steps(profiler):
            found[name].setdefault("steps", []).append(_levels(events))
        Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def _trained(case: Case) -> tuple[Callable[[], None], int]:
    """A step of a model that has taken some, and what stays between steps."""
    torch.manual_seed(0)
    model = case.model()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = half if case.mixed else MixedPrecisionPolicy()
    for name in case.units:
        fully_shard(model.get_submodule(name), mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if case.in_backward:
        train_in_backward(model)
    step = case.step(model, case.batch())
    optimizer = step.build_optimizer(model)
    for _ in range(_WARMUP):
        step.execute(model, optimizer, "cpu")
    return lambda: step.execute(model, optimizer, "cpu"), _resident_bytes(model, optimizer)


def _steps(profiler: torch.profiler.profile) -> list[tuple[str, list[_Event]]]:
    """The allocations and frees of each measured step in order of time, and the case that it is of."""
    events: list[_Event] = []
    begins: list[tuple[int, str]] = []
    tree = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    stack: list[tuple[Any, tuple[str, ...]]] = [(event, ()) for event in tree]
    while stack:
        event, ops = stack.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            events.append(_Event(event.start_time_ns, fields.alloc_size, fields.ptr or 0, ops))
        elif event.name.startswith(_STEP):
            begins.append((event.start_time_ns, event.name.removeprefix(_STEP)))
        stack += [(child, (*ops, event.name)) for child in event.children]
    events.sort()
    begins.sort()
    places = [bisect_left(events, begin, key=lambda event: event.time_ns) for begin, _ in begins]
    return [
        (name, events[begin:end])
        for (_, name), begin, end in zip(begins, places, [*places[1:], len(events)], strict=True)
    ]


def _levels(events: list[_Event]) -> dict[str, Any]:
    """Peaks above the start, and the sizes of what FSDP2 allocates, in order.

    A free on a thread of Gloo is not seen. `missing_bytes` is what such frees gave back; peaks without these
    allocations are too low by no more than that, peaks with them too high by no more.
    """
    alive: dict[int, int] = {}
    missing: set[int] = set()
    for number, event in enumerate(events):
        if event.bytes < 0:
            alive.pop(event.address, None)
        else:
            missing |= {alive[event.address]} if event.address in alive else set()
            alive[event.address] = number
    missing |= set(alive.values())
    missing = {number for number in missing if _counts(events[number])}
    without, with_them = (_peaks(events, left_out) for left_out in (missing, set()))
    return {
        "missing_bytes": sum(events[number].bytes for number in missing),
        "peak_bytes": [without[0], with_them[0]],
        "forward_peak_bytes": [without[1], with_them[1]],
        "made": [
            e.bytes for e in events if e.bytes > 0 and _counts(e) and any(op.startswith("FSDP::") for op in e.ops)
        ],
    }


def _peaks(events: list[_Event], left_out: set[int]) -> tuple[int, int]:
    """The highest point of the step and of its first forward."""
    alive: dict[int, int] = {}
    level = peak = forward_peak = 0
    in_forward = True
    for number, event in enumerate(events):
        in_forward = in_forward and not any(op.startswith("autograd::engine") for op in event.ops)
        level -= alive.pop(event.address, 0)
        if event.bytes > 0 and _counts(event) and number not in left_out:
            alive[event.address] = event.bytes
            level += event.bytes
        peak = max(peak, level)
        forward_peak = peak if in_forward else forward_peak
    return peak, forward_peak


def _counts(event: _Event) -> bool:
    return not any(op.startswith(_ELSEWHERE) for op in event.ops)


def _is_of_fsdp2(event: _Event) -> bool:
    return any(op.startswith("FSDP::") for op in event.ops)


def _resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the shards of parameters and gradients, and of the optimizer's state."""
    tensors: list[Any] = [*model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None)]
    for state in optimizer.state.values() if optimizer is not None else ():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    storages = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
