"""Optimizer state is as large in a trace as it is in a real run, however the optimizer makes it, for every target."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import memfit
from memfit.capture import BEFORE_STEP, Category, Step, check_trace, optimizers
from memfit.memory import Timeline, measured
from tests.capture import optimizer_cases as cases
from tests.devices import without_workspaces

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("frozen_heap")]

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
    trace = memfit.trace(step, target=without_workspaces(target))
    check_trace(trace)
    return trace


def state_bytes(trace: memfit.Trace) -> int:
    """The optimizer state that the step begins with."""
    kept = (s for s in trace.storages if s.category is Category.OPTIMIZER_STATE and s.alloc_at == BEFORE_STEP)
    return sum(storage.bytes for storage in kept)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, cases.Quantized):
        return [value.codes, value.scale]
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for each in values for tensor in tensors_of(each)]


def measured_step(make: Any) -> tuple[int, int, int]:
    """The bytes of state, those of options that are tensors, and the peak from the making of the model on."""
    with measured() as truth:
        model = build()
        optimizer = make(model.parameters())
        step = a_step(model, optimizer)
        for _ in range(3):
            step.execute(model, optimizer, "cpu")
    own = [getattr(optimizer, name, None) for name in ("moments", "averages")]
    storages = [tensor.untyped_storage() for tensor in tensors_of([dict(optimizer.state), own])]
    options = [value for value in optimizer.param_groups[0].values() if isinstance(value, torch.Tensor)]
    state = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return state, sum(option.nbytes for option in options), truth.peak_bytes


def assert_like_real(make: Any) -> None:
    real_state, option_bytes, real_peak = measured_step(make)
    trace = traced(a_step(build(), make), "cpu")
    timeline = Timeline.of(trace)
    assert state_bytes(trace) == real_state + option_bytes > 0
    if not option_bytes:  # a number made of it lives a little longer than in C++
        assert timeline.peak_bytes == real_peak
    gpu = traced(a_step(build(), make), GPU)
    assert state_bytes(gpu) in (real_state, real_state - 4 * PARAMETERS), "but for step counters in host memory"
    assert Timeline.of(gpu).start_bytes == timeline.start_bytes - state_bytes(trace) + state_bytes(gpu)


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
    kept = tensors_of([optimizer.state_dict(), list(vars(optimizer).values())])
    before = copy.deepcopy(kept)
    stepped = traced(step, target)
    assert state_bytes(stepped) == state_bytes(fresh) > 0
    assert Timeline.of(stepped).start_bytes == Timeline.of(fresh).start_bytes
    assert Timeline.of(stepped).peak_bytes == Timeline.of(fresh).peak_bytes
    after = tensors_of([optimizer.state_dict(), list(vars(optimizer).values())])
    for old, same, new in zip(before, kept, after, strict=True):
        assert new.data_ptr() == same.data_ptr() and torch.equal(old, new) and new.device.type == "cpu"
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


FUSED: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "sgd of tensors": lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1), momentum=0.9, fused=True),
    "adam of tensors": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_are_captured(name: str) -> None:
    assert_like_real(FUSED[name])


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
        assert trace.storages[parameter.storage].alloc_at == BEFORE_STEP


SINGLE, LISTS, FUSED_STEP = {"foreach": False}, {"foreach": True}, {"fused": True}
DECAY, MAXIMIZE = {"weight_decay": 0.1}, {"maximize": True}
MOMENTUM, NESTEROV = {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}
DECOUPLED, AMSGRAD = {"decoupled_weight_decay": True}, {"amsgrad": True}
CAPTURABLE = {"capturable": True}
OF_TORCH: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "SGD": ([DECAY, MOMENTUM, NESTEROV, MAXIMIZE, {"dampening": 0.1}], [{}, SINGLE, LISTS, FUSED_STEP]),
    "Adam": ([DECAY, AMSGRAD, MAXIMIZE, DECOUPLED, CAPTURABLE], [{}, SINGLE, LISTS, FUSED_STEP]),
    "AdamW": ([DECAY, AMSGRAD, MAXIMIZE, CAPTURABLE], [{}, SINGLE, LISTS, FUSED_STEP]),
    "NAdam": ([DECAY, MAXIMIZE, DECOUPLED, CAPTURABLE], [{}, SINGLE, LISTS]),
    "RAdam": ([DECAY, MAXIMIZE, DECOUPLED, CAPTURABLE], [{}, SINGLE, LISTS]),
    "Adagrad": ([DECAY, MAXIMIZE, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.1}], [{}, LISTS, FUSED_STEP]),
    "Adadelta": ([DECAY, MAXIMIZE, CAPTURABLE], [{}, SINGLE, LISTS]),
    "Adamax": ([DECAY, MAXIMIZE, CAPTURABLE], [{}, SINGLE, LISTS]),
    "ASGD": ([DECAY, MAXIMIZE, CAPTURABLE], [{}, SINGLE, LISTS]),
    "RMSprop": ([DECAY, MAXIMIZE, MOMENTUM, {"centered": True}, CAPTURABLE], [{}, SINGLE, LISTS]),
    "Rprop": ([MAXIMIZE, CAPTURABLE], [{}, SINGLE, LISTS]),
    "Adafactor": ([DECAY, MAXIMIZE], [{}, SINGLE, LISTS]),
}


def variants(name: str) -> list[dict[str, Any]]:
    """Every pair of flags with every implementation, as far as the optimizer takes them."""
    flags, implementations = OF_TORCH[name]
    found = []
    for implementation in implementations:
        for size in range(3):
            for chosen in itertools.combinations(flags, size):
                options = {key: value for each in (*chosen, implementation) for key, value in each.items()}
                with contextlib.suppress(ValueError, RuntimeError):
                    getattr(torch.optim, name)(build().parameters(), **options)
                    found.append(options)
    return found


def assert_state_like_real(name: str, options: dict[str, Any]) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, **options)

    on_cpu = {**options, "capturable": False} if "capturable" in options else options
    model = build()
    real = getattr(torch.optim, name)(model.parameters(), **on_cpu)
    a_step(model, real).execute(model, real, "cpu")
    kept = tensors_of(dict(real.state))
    whole, counters = sum(t.nbytes for t in kept), sum(t.nbytes for t in kept if t.dim() == 0)
    if on_cpu is options:
        assert state_bytes(traced(a_step(build(), make), "cpu")) == whole, (name, options)
    gpu = traced(a_step(build(), make), GPU)
    in_host_memory = 0 if options.get("fused") or options.get("capturable") or name == "ASGD" else counters
    assert state_bytes(gpu) == whole - in_host_memory, (name, options)


@pytest.mark.parametrize("name", OF_TORCH)
def test_optimizers_of_torch_have_their_state(name: str) -> None:
    assert_state_like_real(name, variants(name)[0])


@pytest.mark.zoo
@pytest.mark.parametrize("name", OF_TORCH)
def test_optimizers_of_torch_with_every_flag(name: str) -> None:
    found = variants(name)
    assert len(found) > 5
    for options in found:
        assert_state_like_real(name, options)


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        *itertools.product(TARGETS, ({}, {"foreach": False}, {"fused": True}, {"amsgrad": True})),
        (GPU, {"capturable": True}),
    ],
)
def test_state_of_adam_made_without_a_step_is_that_of_one(
    target: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": others}], **flags)

    traces = []
    for init_adam_state in (optimizers.init_adam_state, lambda *_: False):
        monkeypatch.setattr(optimizers, "init_adam_state", init_adam_state)
        traces.append(msgspec.msgpack.encode(traced(a_step(build(), make), target)))
    assert traces[0] == traces[1]


def test_a_hook_before_the_first_step_of_adam_is_called_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters)
        optimizer.register_step_pre_hook(lambda *_: print("called"))
        return optimizer

    memfit.trace(a_step(build(), make), target=GPU)
    assert capsys.readouterr().out.count("called") == 2  # once for the state, once for the step
