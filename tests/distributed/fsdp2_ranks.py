"""What each process of the FSDP2 tests runs; a module of its own so that spawned processes can import it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.distributed.fsdp2_cases import CASES, Case, train_in_backward
from tests.distributed.measured_steps import WARMUP, Event, profiled, steps_of


def measure(rank: int, ranks: int, folder: str) -> None:
    """Train every case with FSDP2 over Gloo and write down what its allocations were."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        trained = {name: _trained(case) for name, case in CASES.items()}
        profiler = profiled({name: train for name, (train, _) in trained.items()})
        found = {name: {"resident_bytes": n_bytes} for name, (_, n_bytes) in trained.items()}
        for name, events in steps_of(profiler):
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
    for _ in range(WARMUP):
        step.execute(model, optimizer, "cpu")
    return lambda: step.execute(model, optimizer, "cpu"), _resident_bytes(model, optimizer)


def _levels(events: list[Event]) -> dict[str, Any]:
    """Peaks above the start, and the sizes of what FSDP2 allocates, in order.

    Of one step that leaves nothing for the next; Note [Frees on other threads] is in measured_steps.py.
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
    missing = {number for number in missing if events[number].counts}
    without, with_them = (_peaks(events, left_out) for left_out in (missing, set()))
    return {
        "peak_bytes": [without[0], with_them[0]],
        "forward_peak_bytes": [without[1], with_them[1]],
        "made": [e.bytes for e in events if e.bytes > 0 and e.counts and any(op.startswith("FSDP::") for op in e.ops)],
    }


def _peaks(events: list[Event], left_out: set[int]) -> tuple[int, int]:
    """The highest point of the step and of its first forward."""
    alive: dict[int, int] = {}
    level = peak = forward_peak = 0
    in_forward = True
    for number, event in enumerate(events):
        in_forward = in_forward and not any(op.startswith("autograd::engine") for op in event.ops)
        level -= alive.pop(event.address, 0)
        if event.bytes > 0 and event.counts and number not in left_out:
            alive[event.address] = event.bytes
            level += event.bytes
        peak = max(peak, level)
        forward_peak = peak if in_forward else forward_peak
    return peak, forward_peak


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
