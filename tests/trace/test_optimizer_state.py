"""Optimizer state is as large in a trace as it is in a real run, however the optimizer makes it, for every target."""

from __future__ import annotations

import copy
from typing import Any

import optimizer_cases as cases
import pytest
import torch
from torch import nn

import memfit
from memfit.memory import Timeline, measured
from memfit.trace import NEVER, Category, Step, check_trace

GPU = "h100-sxm"
PARAMETERS = 4
TARGETS = ("cpu", GPU)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8))


def squares(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def a_step(model: nn.Module, optimizer: Any) -> Step:
    return Step(model, torch.randn(16, 24), loss=squares, optimizer=optimizer)


def traced(step: Step, target: str) -> memfit.Trace:
    trace = memfit.trace(step, target=target)
    check_trace(trace)
    return trace


def state_bytes(trace: memfit.Trace) -> int:
    """The optimizer state that the step begins with."""
    kept = (s for s in trace.storages if s.category is Category.OPTIMIZER_STATE and s.birth == NEVER)
    return sum(storage.bytes for storage in kept)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for each in values for tensor in tensors_of(each)]


def measured_step(make: Any) -> tuple[int, int]:
    """The bytes of state after real steps, and the peak of everything from the making of the model on."""
    with measured() as truth:
        model = build()
        optimizer = make(model.parameters())
        step = a_step(model, optimizer)
        for _ in range(3):
            step.execute(model, optimizer, "cpu")
    own = [getattr(optimizer, name, None) for name in ("moments", "averages")]
    storages = [tensor.untyped_storage() for tensor in tensors_of([dict(optimizer.state), own])]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()), truth.peak_bytes


def assert_like_real(make: Any) -> None:
    real_state, real_peak = measured_step(make)
    trace = traced(a_step(build(), make), "cpu")
    timeline = Timeline.of(trace)
    assert state_bytes(trace) == real_state > 0
    assert timeline.peak_bytes == real_peak
    gpu = traced(a_step(build(), make), GPU)
    assert state_bytes(gpu) in (real_state, real_state - 4 * PARAMETERS), "but for step counters in host memory"
    assert Timeline.of(gpu).start_bytes == timeline.start_bytes - real_state + state_bytes(gpu)


@pytest.mark.parametrize("kind", cases.HAND_WRITTEN)
def test_hand_written_optimizers_have_the_state_of_a_real_run(kind: type[torch.optim.Optimizer]) -> None:
    assert_like_real(kind)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", cases.HAND_WRITTEN)
def test_it_does_not_matter_whether_the_optimizer_has_stepped(kind: type[torch.optim.Optimizer], target: str) -> None:
    model = build()
    optimizer = kind(model.parameters())
    step = a_step(model, optimizer)
    fresh = traced(step, target)
    step.execute(model, optimizer, "cpu")
    before = copy.deepcopy((optimizer.state_dict(), tensors_of(list(vars(optimizer).values()))))
    stepped = traced(step, target)
    assert state_bytes(stepped) == state_bytes(fresh) > 0
    assert Timeline.of(stepped).start_bytes == Timeline.of(fresh).start_bytes
    assert Timeline.of(stepped).peak_bytes == Timeline.of(fresh).peak_bytes
    after = optimizer.state_dict(), tensors_of(list(vars(optimizer).values()))
    for old, new in zip(tensors_of(before), tensors_of(after), strict=True):
        assert torch.equal(old, new) and new.device.type == "cpu"
    step.execute(model, optimizer, "cpu")


SGD_FLAGS = (
    {"momentum": 0.9, "weight_decay": 1e-4},
    {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 1e-4, "foreach": False},
    {"momentum": 0.9, "maximize": True},
    {"momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-4},
)


@pytest.mark.parametrize("flags", SGD_FLAGS, ids=str)
def test_momentum_computed_from_a_decayed_gradient_is_state(flags: dict[str, Any]) -> None:
    assert_like_real(lambda parameters: torch.optim.SGD(parameters, lr=0.1, **flags))


def test_state_that_is_kept_in_host_memory_is_not_on_the_device() -> None:
    step = a_step(build(), cases.OnHost)
    assert state_bytes(traced(step, GPU)) == 0
    assert state_bytes(traced(step, "cpu")) > 0


@pytest.mark.parametrize("kind", [cases.SharpnessAware, cases.SharpnessAwareThatSwaps])
@pytest.mark.parametrize("given", ["class", "new", "stepped"])
@pytest.mark.parametrize("target", TARGETS)
def test_state_made_outside_of_step_is_there_when_the_next_step_begins(target: str, given: str, kind: type) -> None:
    def train(model: nn.Module, optimizer: cases.SharpnessAware, batch: torch.Tensor) -> None:
        squares(model(batch), batch).backward()
        optimizer.first_step()
        squares(model(batch), batch).backward()
        optimizer.second_step()

    model = build()
    optimizer: Any = kind
    if given != "class":
        optimizer = optimizer(model.parameters())
    step = Step(model, torch.randn(16, 24), optimizer=optimizer, run=train)
    if given == "stepped":
        step.execute(model, optimizer, "cpu")
    trace = traced(step, target)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    counters = 4 * PARAMETERS if target == "cpu" else 0
    copies = 3 if kind is cases.SharpnessAware else 2
    assert state_bytes(trace) == copies * weights + counters, "two moments, counters, and a copy of the old weights"
    assert Timeline.of(trace).start_bytes == state_bytes(trace) + weights + step.batch.nbytes
    if given != "class":
        step.execute(model, optimizer, "cpu")


def test_a_step_that_gives_parameters_new_data_keeps_their_record() -> None:
    trace = traced(a_step(build(), cases.NewData), "cpu")
    for parameter in trace.parameters:
        assert trace.storages[parameter.storage].category is Category.PARAMETER
        assert trace.storages[parameter.storage].birth == NEVER
