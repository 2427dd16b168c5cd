"""Steps of memfit's runtime whose allocations are counted, on every rank, and the same steps as they are predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import memfit
from memfit import Step, spec
from memfit.capture import BEFORE_STEP, Category, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.sharded import Precision, Schedule, UnitOptions, shard
from memfit.sharding import Sharding, ShardOptions
from memfit.sharding.schedule import EventKind
from memfit.sharding.sharded_step import FlatOptions
from memfit.sharding.sharded_step import shard as predict_sharding
from tests.distributed.fsdp2_cases import CASES, train_in_backward

_STEPS = 3
_WIDTH = 256
_LARGE_BYTES = 1 << 16
"""Buffers of large matrices; activations of one token are smaller."""


class Layer(nn.Module):
    """Two large matrices, and next to no activations."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A model of layers and how it is trained; layers that are no unit belong to the root.

    `dtypes` are those of `ShardOptions`, `frozen` the modules that are not trained.
    """

    widths: tuple[int, ...]
    units: tuple[int, ...]
    options: UnitOptions = field(default_factory=UnitOptions)
    schedule: Schedule = field(default_factory=Schedule)
    dtype: torch.dtype = torch.float32
    dtypes: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    replicas: int = 1

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(_WIDTH, inner) for inner in self.widths)).to(self.dtype)
        for name in self.frozen:
            model.get_submodule(name).requires_grad_(False)
        return model

    def step(self, model: nn.Module, batch: torch.Tensor) -> Step:
        return Step(model, batch, loss=lambda out, _: out.float().sum(), optimizer=self.optimizer)

    @property
    def unit_options(self) -> dict[str, UnitOptions]:
        return {str(number): self.options for number in self.units}


def measure_layers(case: Layers) -> tuple[int, list[int]]:
    """How far a step rises above what is there before it, and its large allocations in order."""
    model = case.build()
    precision = Precision(**{name: getattr(torch, dtype) for name, dtype in case.dtypes.items()})
    shape = (case.replicas, dist.get_world_size() // case.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if case.replicas > 1 else None
    shard(model, mesh=mesh, units=case.unit_options, precision=precision, schedule=case.schedule)
    step = _trained(case.step(model, torch.randn(1, _WIDTH, dtype=case.dtype)), model)
    return _rise(step), [size for size, _ in _events(step) if size > _LARGE_BYTES]


def predict_layers(case: Layers, ranks: int) -> tuple[int, list[tuple[int, str]]]:
    """The same as `measure_layers` for the captured step, with what each of the allocations is for."""
    trace = memfit.trace(case.step(case.build(), spec((1, _WIDTH), case.dtype)), target="cpu")
    flat = FlatOptions(schedule=case.schedule, units=case.unit_options)
    options = ShardOptions(units=tuple(case.unit_options), replicas=case.replicas, **case.dtypes)
    sharding = _predict(trace, ranks, options, flat)
    found = sharding.schedule
    buffers = [found.buffers[event.number] for event in found.events if event.kind is EventKind.ALLOCATE]
    return sharding.peak_bytes - _resident_bytes(trace, sharding), [
        (each.size_bytes, f"{each.role.title} of {found.modules[each.unit]!r}")
        for each in buffers
        if each.size_bytes > _LARGE_BYTES
    ]


def measure_case(name: str) -> tuple[int, int]:
    """What shards, their gradients and state of one of FSDP2's cases take, and how far a step rises above that."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    half = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_inputs="none")
    shard(model, units=case.units, precision=half if case.mixed else Precision())
    if case.in_backward:
        train_in_backward(model)
    step = case.step(model, case.batch())
    optimizer = step.build_optimizer(model)
    for _ in range(2):
        step.execute(model, optimizer, "cpu")
    states = optimizer.state.values() if optimizer is not None else ()
    tensors = [*model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None)]
    tensors += [each for state in states for each in state.values() if each is not None]
    tensors = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values()), _rise(lambda: step.execute(model, optimizer, "cpu"))


def predict_case(name: str, ranks: int) -> tuple[int, int]:
    """The same as `measure_case` for the captured step."""
    case = CASES[name]
    model, batch = case.model(), case.batch()
    if case.in_backward:
        train_in_backward(model)
    trace = memfit.trace(case.step(model, spec(tuple(batch.shape), batch.dtype)), target="cpu")
    sharding = _predict(trace, ranks, ShardOptions(units=case.units), FlatOptions())
    resident = _resident_bytes(trace, sharding)
    inputs = sum(storage.bytes for storage in trace.storages if storage.category is Category.INPUT)
    return resident - inputs, sharding.peak_bytes - resident


def _predict(trace: Trace, ranks: int, options: ShardOptions, flat: FlatOptions) -> Sharding:
    target = Target.parse("cpu", ranks=ranks)
    return predict_sharding(Timeline.of(trace, 1), Runtime.of(trace, Roofline()), target, options, flat=flat)


def _resident_bytes(trace: Trace, sharding: Sharding) -> int:
    """What is there before the step, the batch included."""
    kept = sum(s.bytes for n, s in enumerate(trace.storages) if s.alloc_at == BEFORE_STEP and n not in sharding.removed)
    return kept + sum(each.size_bytes for each in sharding.allocations if each.begin == BEFORE_STEP)


def _trained(step: Step, model: nn.Module) -> Callable[[], None]:
    """A third step: by then the order of the units is known, and the optimizer has its state."""
    optimizer = step.build_optimizer(model)
    for _ in range(2):
        step.execute(model, optimizer, "cpu")
    return lambda: step.execute(model, optimizer, "cpu")


def _rise(step: Callable[[], None]) -> int:
    """The median over steps of the highest point above the start, by address: frees on Gloo's threads are not seen."""
    found = []
    for _ in range(_STEPS):
        alive: dict[int, int] = {}
        peak = 0
        for size, address in _events(step):
            if size < 0:
                alive.pop(address, None)
            else:
                alive[address] = size
                peak = max(peak, sum(alive.values()))
        found.append(peak)
    return sorted(found)[len(found) // 2]


def _events(step: Callable[[], None]) -> list[tuple[int, int]]:
    """The size, negative where it is freed, and the address of every allocation of a step, in order of time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    events = []
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr or 0))
    return [(size, address) for _, size, address in sorted(events)]
