"""Steps whose allocations are counted, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType

from memfit.sharded import Precision, Schedule, shard
from memfit.sharded.expected import expected_bytes
from memfit.sharded.wrap_policy import Units

_STEPS = 3


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
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(256, inner) for inner in widths))
    precision = Precision(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32 if half else None)
    shard(model, units=units, precision=precision, schedule=Schedule(**schedule))
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    trained = kind(model.parameters(), lr=1e-3)
    x = torch.randn(1, 256, requires_grad=True)

    def step() -> None:
        model(x).float().sum().backward()
        trained.step()
        trained.zero_grad()
        x.grad = None

    step()
    step()
    states = [each for state in trained.state.values() for each in state.values() if each.dim()]
    state_bytes = sum(each.untyped_storage().nbytes() for each in states)
    expected = expected_bytes(model)
    return expected.shard_bytes + state_bytes + _rise(step), expected.peak_bytes + state_bytes, expected.at


def _rise(step: Any) -> int:
    """The median over steps of the highest point above the start, by address: frees on Gloo's threads are not seen."""
    found = []
    for _ in range(_STEPS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        stack = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
        events = []
        while stack:
            event = stack.pop()
            stack += event.children
            if event.tag == _EventType.Allocation:
                events.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr or 0))
        alive: dict[int, int] = {}
        peak = 0
        for _, size, address in sorted(events):
            if size < 0:
                alive.pop(address, None)
            else:
                alive[address] = size
                peak = max(peak, sum(alive.values()))
        found.append(peak)
    return sorted(found)[len(found) // 2]
