"""A training function of the user's own instead of a description."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Category, Phase, Step
from memfit.errors import InputError
from memfit.memory import measured


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(8, 16)


def reference() -> list[str]:
    model, optimizer, batch = make()
    step = Step(model, batch, loss=lambda output, _: output.mean(), optimizer=optimizer)
    return [op.name for op in memfit.trace(step, target="cpu").ops]


def test_closure() -> None:
    model, optimizer, batch = make()

    def train() -> None:
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = memfit.trace(train, target="cpu")
    assert [op.name for op in trace.ops] == reference()
    assert {op.phase for op in trace.ops} == {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER}
    assert trace.optimizer == "AdamW"
    assert sum(s.bytes for s in trace.storages if s.category is Category.PARAMETER) == 4 * sum(
        p.numel() for p in model.parameters()
    )


def test_method_and_partial() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer, self.batch = make()

        def step(self, scale: float) -> None:
            (self.model(self.batch).mean() * scale).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = memfit.trace(functools.partial(Trainer().step, 2.0), target="cpu")
    assert {call.module for call in trace.calls} == {"", "0", "1", "2"}


def test_run_of_a_step() -> None:
    model, optimizer, batch = make()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = memfit.trace(Step(model, batch, optimizer=optimizer, run=train), target="cpu")
    assert [op.name for op in trace.ops] == reference()


def test_two_models_and_two_optimizers() -> None:
    generator, generator_optimizer, noise = make()
    critic, critic_optimizer = nn.Linear(1, 1), None
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        critic(generator(noise)).mean().backward()
        generator_optimizer.step()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        critic_optimizer.zero_grad()

    trace = memfit.trace(train, target="cpu")
    assert {"generator.0", "critic"} <= {call.module for call in trace.calls}
    assert trace.optimizer == "AdamW, SGD"
    assert all(len(parameter.state) in (1, 3) for parameter in trace.parameters)


def test_a_loss_module_is_no_second_model() -> None:
    model, optimizer, batch = make()
    weighted = nn.CrossEntropyLoss(weight=torch.ones(1))
    labels = torch.zeros(8, dtype=torch.int64)

    def train() -> None:
        weighted(model(batch), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = memfit.trace(train, target="cpu")
    assert [module.path for module in trace.modules] == ["", "0", "1", "2"]
    assert [parameter.names[0] for parameter in trace.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    (loss,) = [call for call in trace.calls if call.kind == "CrossEntropyLoss"]
    assert loss.phase is Phase.LOSS


def test_peak_equals_the_measured_one() -> None:
    model, optimizer, batch = make()

    def train() -> None:
        for chunk in batch.chunk(2):
            model(chunk).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    with measured() as truth:
        train()
    trace = memfit.trace(train, target="cpu")
    assert (
        memfit.memory.Timeline.of(trace).peak_bytes - memfit.memory.Timeline.of(trace).start_bytes == truth.peak_bytes
    )


def test_no_model_to_be_found() -> None:
    with pytest.raises(InputError, match=r"no nn.Module.*memfit.Step"):
        memfit.trace(lambda: None, target="cpu")


def test_only_modules_without_parameters() -> None:
    criterion = nn.MSELoss()
    with pytest.raises(InputError, match=r"no nn.Module with parameters"):
        memfit.trace(lambda: criterion(torch.ones(2), torch.ones(2)), target="cpu")


def test_arguments_that_nobody_gives() -> None:
    with pytest.raises(InputError, match=r"needs arguments \(batch\)"):
        memfit.trace(lambda batch: None, target="cpu")


def test_something_that_is_no_step() -> None:
    with pytest.raises(InputError, match="not a int"):
        memfit.trace(3, target="cpu")
