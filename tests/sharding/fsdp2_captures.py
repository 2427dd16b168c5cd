"""A step that `fully_shard` has wrapped, captured as it is, beside the planner's schedule for the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memfit
from memfit import Step, spec
from memfit.capture import AFTER_STEP, BEFORE_STEP, Category, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.sharding import Sharding, ShardOptions, shard
from memfit.sharding.schedule import EventKind
from tests.distributed.fsdp2_cases import Case, train_in_backward

Change = tuple[str, int, str]
"""What happens, bytes, and stream."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How `fully_shard` is told to wrap a case's units, and the planner's word for it."""

    keep_last: bool = False
    options: dict[str, Any] | None = None

    def policy(self, case: Case) -> MixedPrecisionPolicy:
        dtypes = {name: getattr(torch, dtype) for name, dtype in (self.options or {}).items()}
        if case.mixed:
            dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, **dtypes}
        return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)


def captured(case: Case, target: str, ranks: int, setting: Setting | None = None) -> Trace:
    """The step on so many ranks that are not there, as PyTorch's own code runs it."""
    setting = setting or Setting()

    def build(mesh: DeviceMesh) -> nn.Module:
        model, policy = case.model(), setting.policy(case)
        for name in (*case.units, ""):
            kept = setting.keep_last and name == case.units[-1]
            module = model.get_submodule(name)
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False if kept else None)
        if case.in_backward:
            train_in_backward(model)
        return model

    return memfit.trace(_step(case, build), target=target, mesh={"dp": ranks})


def planned(case: Case, target: str, ranks: int, setting: Setting | None = None) -> tuple[Timeline, Sharding]:
    """The plain step, and what the planner makes of it for so many ranks."""
    setting = setting or Setting()
    model: nn.Module | Callable[[], nn.Module] = case.model
    if case.in_backward:
        model = case.model()
        train_in_backward(model)
    timeline = Timeline.of(memfit.trace(_step(case, model), target=target), rounding_of(target))
    options = ShardOptions(units=case.units, keep_last=setting.keep_last, **(setting.options or {}))
    runtime = Runtime.of(timeline.trace, Roofline())
    return timeline, shard(timeline, runtime, Target.parse(target, ranks=ranks), options)


def rounding_of(target: str) -> int:
    return 1 if target == "cpu" else 512


def _step(case: Case, model: nn.Module | Callable[..., nn.Module]) -> Step:
    batch = case.batch()
    return case.step(model, spec(tuple(batch.shape), batch.dtype))


def captured_changes(trace: Trace) -> list[Change]:
    """What FSDP2 allocates, frees and sends, in order."""
    found: list[tuple[int, int, int, Change]] = []
    ours = (Category.COMMUNICATION, Category.GATHERED_PARAMETER, Category.GRADIENT)
    for number, storage in enumerate(trace.storages):
        if storage.alloc_at == BEFORE_STEP or storage.category not in ours:
            continue
        about = storage.bytes, trace.streams.get(number, "compute")
        found.append((storage.alloc_at, 1, number, ("allocate", *about)))
        if storage.free_after != AFTER_STEP:
            found.append((storage.free_after, 3, number, ("free", *about)))
    for each in trace.collectives:
        found.append((each.op, 2, 0, (each.kind, each.bytes, each.stream)))
    return ordered(change for _, _, _, change in sorted(found))


def planned_changes(sharding: Sharding) -> list[Change]:
    """What the planner's schedule allocates, frees and sends, in order."""
    schedule, found = sharding.schedule, []
    for event in schedule.events:
        if event.kind in (EventKind.ALLOCATE, EventKind.FREE):
            found.append((event.kind.value, event.size_bytes, event.stream.value))
        elif event.kind is EventKind.BEGIN:
            found.append((schedule.transfers[event.number].kind.value, event.size_bytes, event.stream.value))
    return ordered(found)


def ordered(changes: Iterable[Change]) -> list[Change]:
    """Sort what is freed between two others: a trace does not say in which order what goes between the same two ops."""
    done: list[Change] = []
    freed: list[Change] = []
    for change in changes:
        if change[0] == "free":
            freed.append(change)
            continue
        done += [*sorted(freed), change]
        freed.clear()
    return done + sorted(freed)


def difference(first: Sequence[Change], second: Sequence[Change]) -> str:
    """The first change that differs, with those around it."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return f"change {place}: {first[place - 3 : place + 4]} and {second[place - 3 : place + 4]}"
    return "" if len(first) == len(second) else f"{len(first)} and {len(second)} changes"
