"""Steps whose allocations are counted, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from fsdp2_cases import CASES, train_in_backward
from torch import nn
from torch._C._profiler import _EventType

import memfit
from memfit import Step, spec
from memfit.capture import BEFORE_STEP, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.sharded import Precision, Schedule, UnitOptions, shard
from memfit.sharded.expected import expected_bytes
from memfit.sharded.wrap_policy import Units
from memfit.sharding import Sharding, ShardOptions
from memfit.sharding.schedule import EventKind
from memfit.sharding.shard import FlatOptions
from memfit.sharding.shard import shard as predict_sharding

_STEPS = 3
LARGE_BYTES = 1 << 16
"""Buffers of large matrices; activations of one token are smaller."""


class Layer(nn.Module):
    """Two large matrices, and next to no activations."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def measured_and_expected(
    widths: list[int], units: Units | None, schedule: dict[str, Any], half: bool, optimizer: str
) -> tuple[int, int, str]:
    """The allocator's highest point in a step and what is there before it; the closed form, and where that lies."""
    precision = Precision(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32 if half else None)
    model, trained, step = _trained(_build(widths), units, schedule, precision, optimizer)
    states = [each for state in trained.state.values() for each in state.values() if each.dim()]
    state_bytes = sum(each.untyped_storage().nbytes() for each in states)
    expected = expected_bytes(model)
    return expected.shard_bytes + state_bytes + _rise(step), expected.peak_bytes + state_bytes, expected.at


def allocations(
    widths: list[int],
    units: dict[str, UnitOptions],
    schedule: dict[str, Any],
    dtypes: dict[str, Any],
    frozen: list[str],
) -> list[int]:
    """The large allocations of a step in order; the shards are float64, `dtypes` those of `ShardOptions`."""
    precision = Precision(**{name: getattr(torch, dtype) for name, dtype in dtypes.items()})
    model = _build(widths, frozen, torch.float64)
    _, _, step = _trained(model, units, schedule, precision, "sgd", input_trains=False)
    return [size for size, _ in _events(step) if size > LARGE_BYTES]


def scheduled(
    ranks: int,
    widths: list[int],
    units: dict[str, UnitOptions],
    schedule: dict[str, Any],
    dtypes: dict[str, Any],
    frozen: list[str],
) -> list[tuple[str, int]]:
    """The large buffers of the schedule of the same step as it is captured, and what each is for."""
    model, batch = _build(widths, frozen, torch.float64), spec((1, 256), torch.float64)
    trace = memfit.trace(Step(model, batch, loss=lambda out, _: out.float().sum()), target="cpu")
    flat = FlatOptions(schedule=Schedule(**schedule), units=units)
    found = _predict(trace, ranks, ShardOptions(units=tuple(units), **dtypes), flat).schedule
    buffers = [found.buffers[event.number] for event in found.events if event.kind is EventKind.ALLOCATE]
    return [
        (f"{each.role.title} of {found.modules[each.unit]!r}", each.size_bytes)
        for each in buffers
        if each.size_bytes > LARGE_BYTES
    ]


def measured_rise(name: str) -> int:
    """How far a step of one of FSDP2's cases on memfit's runtime rises above what is there before it."""
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
    return _rise(lambda: step.execute(model, optimizer, "cpu"))


def predicted_rise(ranks: int, name: str) -> int:
    """The same of the captured step, sharded in the flat layout."""
    case = CASES[name]
    model, batch = case.model(), case.batch()
    if case.in_backward:
        train_in_backward(model)
    trace = memfit.trace(case.step(model, spec(tuple(batch.shape), batch.dtype)), target="cpu")
    sharding = _predict(trace, ranks, ShardOptions(units=case.units), FlatOptions())
    kept = sum(s.bytes for n, s in enumerate(trace.storages) if s.alloc_at == BEFORE_STEP and n not in sharding.removed)
    made = sum(each.size_bytes for each in sharding.allocations if each.begin == BEFORE_STEP)
    return sharding.peak_bytes - kept - made


def _predict(trace: Trace, ranks: int, options: ShardOptions, flat: FlatOptions) -> Sharding:
    target = Target.parse("cpu", ranks=ranks)
    return predict_sharding(Timeline.of(trace, 1), Runtime.of(trace, Roofline()), target, options, flat=flat)


def _build(widths: list[int], frozen: Sequence[str] = (), dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(256, inner) for inner in widths)).to(dtype)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def _trained(
    model: nn.Module,
    units: Units | None,
    schedule: dict[str, Any],
    precision: Precision,
    optimizer: str,
    *,
    input_trains: bool = True,
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A sharded model that has taken two steps, so that the order of its units is known, and a third step."""
    dtype = next(model.parameters()).dtype
    shard(model, units=units, precision=precision, schedule=Schedule(**schedule))
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    trained = kind(model.parameters(), lr=1e-3)
    x = torch.randn(1, 256, dtype=dtype, requires_grad=input_trains)

    def step() -> None:
        model(x).float().sum().backward()
        trained.step()
        trained.zero_grad()
        x.grad = None

    step()
    step()
    return model, trained, step


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
