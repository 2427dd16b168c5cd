"""Every policy of a frontier, run for real, gives the gradients of the plain step and runs again what it says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step
from memfit.tradeoff import Unit, build_frontiers
from memfit.tradeoff.columns import TraceColumns
from memfit.tradeoff.policy import Role, UnitColumns
from tests.tradeoff.executor import Execution
from tests.zoo import zoo_models


class Between(nn.Module):
    """A unit between two layers, so that gradients pass through it."""

    def __init__(self, inner: nn.Module, before: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.before, self.inner, self.after = before or nn.Linear(8, 8), inner, after or nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x))).square().sum()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.second_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second_norm(self.second(self.relu(self.first_norm(self.first(x)))))
        y += x
        return self.relu(y)


class Writes(nn.Module):
    """In-place writes to whole tensors and to parts of them, inside autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = (x @ self.weight).clone()
        a[:, :4].mul_(2.0)
        b = a.sigmoid() * self.scale
        c = torch.zeros_like(b)
        c[:, :2] = b[:, :2].exp()
        return (c.add_(b) + 1).clamp_(-0.5, 1.5) * b + x


class TwoResults(nn.Module):
    """An op with several results: one leaves the unit and is saved inside and outside, the others inside alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(self.linear(x).tanh())
        return y.sigmoid().tanh() + y, y


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(8, 8), TwoResults(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.inner(self.before(x))
        return (self.after(one) * self.after(other)).sum()


class TakesParameter(torch.autograd.Function):
    """Its parameter is read first by an op in its middle, with which the trace counts the parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a = x.exp()
        result = (a * weight).tanh()
        ctx.save_for_backward(x, a, weight, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, a, weight, result = ctx.saved_tensors
        inner = gradient * (1 - result * result)
        return inner * a * weight, (inner * a).sum(0)


class SavesInput(torch.autograd.Function):
    """Several ops; the last one does not read what is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp().tanh() * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        tanh = x.exp().tanh()
        return gradient * 2 * (1 - tanh * tanh) * x.exp()


class ReadsInputTwice(torch.autograd.Function):
    """Several ops; the last one reads what is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp() * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.exp() * (x + 1)


class OneOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.exp()


class Custom(nn.Module):
    """A custom autograd function in the middle of a unit."""

    def __init__(self, function: Any, *, weighted: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function
        self.weight = nn.Parameter(torch.randn(8)) if weighted else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = () if self.weight is None else (self.weight,)
        return self.second(self.function.apply(self.first(x).sigmoid(), *more).tanh())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return Between(layer, nn.Linear(8, 16), nn.Linear(16, 4))


def perceptron() -> nn.Module:
    """The result of the last op is saved by that op, inside, and by the next layer, outside."""
    return Between(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Sigmoid()))


def convolutions() -> nn.Module:
    return Between(Residual(), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1))


def gpt2() -> nn.Module:
    model = zoo_models.causal_model("gpt2", n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.0, use_cache=False)
    return Between(model.transformer.h[0], nn.Linear(8, 16), nn.Linear(16, 4))


def made(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: Between(kind(*args, **options))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder layer with dropout": (encoder, (2, 5, 8)),
    "residual block with batch norm": (convolutions, (2, 3, 6, 6)),
    "perceptron": (perceptron, (4, 8)),
    "writes in place": (made(Writes), (4, 8)),
    "two results": (TwoReaders, (4, 8)),
    "function with a parameter": (made(Custom, TakesParameter, weighted=True), (4, 8)),
    "function that saves its input": (made(Custom, SavesInput), (4, 8)),
    "function that reads its input last": (made(Custom, ReadsInputTwice), (4, 8)),
    "function of one op": (made(Custom, OneOp), (4, 8)),
    "block of gpt-2": (gpt2, (2, 5, 8)),
}


def discardable(trace_columns: TraceColumns, unit: Unit) -> set[int]:
    """The storages of a unit that may be dropped."""
    low, high = np.searchsorted(trace_columns.forward_alloc_at, (unit.begin, unit.end))
    return set(
        trace_columns.forward_storages[low:high][UnitColumns.of(trace_columns, unit).role == Role.DISCARDABLE].tolist()
    )


def run(model: nn.Module, batch: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients and buffers after one step."""
    torch.manual_seed(1)
    model(batch).backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return gradients, dict(model.named_buffers())


def either_add(name: str) -> str:
    """With a dispatch mode, which `Execution` is, linear layers on strided batches add their bias out of place.

    The capture has what runs without one (torch: ATen/native/Linear.cpp).
    """
    return name.replace("aten.add_.Tensor", "aten.add.Tensor")


@pytest.mark.parametrize("name", MODELS)
def test_every_policy_can_be_executed(name: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, batch = build(), torch.randn(shape)
    trace = memfit.trace(Step(copy.deepcopy(model), (batch,), optimizer=torch.optim.SGD), target="cpu")
    op_ms = np.array([0.0 if op.view else 1.0 for op in trace.ops])
    trace_columns, found = TraceColumns.of(trace, op_ms), build_frontiers(trace, op_ms)
    gradients, buffers = run(copy.deepcopy(model), batch)
    executed = 0
    for unit in (each for each in found.units if each.kind != "loss" and "#" not in each.name):
        for policy in found.of(unit).policies[1:]:
            again = copy.deepcopy(model)
            execution = Execution(
                again.get_submodule(unit.module), trace, unit, policy, discardable(trace_columns, unit)
            )
            found_gradients, found_buffers = run(again, batch)
            where = f"{unit.name}: {policy}"
            names = [op.name for op in trace.ops[unit.begin : unit.end]]
            assert [*map(either_add, execution.names)] == [*map(either_add, names)], where
            assert tuple(execution.ran) == policy.recomputed, where
            assert execution.freed, where
            assert found_gradients.keys() == gradients.keys(), where
            assert all(torch.equal(found_gradients[key], gradients[key]) for key in gradients), where
            assert all(torch.equal(found_buffers[key], buffers[key]) for key in buffers), where
            executed += 1
    assert executed > 4


class OwnGenerator(nn.Module):
    """Draws from a generator of its own beside torch's."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.first, self.second, self.generators = nn.Linear(8, 32), nn.Linear(32, 8), [generator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).sigmoid()
        mask = torch.rand(y.shape, generator=self.generators[0]) > 0.5
        noise = torch.empty_like(y).normal_(generator=self.generators[0])
        return self.second(nn.functional.dropout(y * mask * noise, 0.5).exp())


def test_what_draws_from_a_generator_of_its_own_never_runs_again() -> None:
    model, batch, generator = Between(OwnGenerator(torch.Generator())), torch.randn(4, 8), torch.Generator()
    trace = memfit.trace(Step(model, (batch,), optimizer=torch.optim.SGD), target="cpu")
    op_ms = np.array([0.0 if op.view else 1.0 for op in trace.ops])
    trace_columns, found = TraceColumns.of(trace, op_ms), build_frontiers(trace, op_ms)
    generators = {i for i, op in enumerate(trace.ops) if op.random and "generator" in op.arguments}
    dropout = {i for i, op in enumerate(trace.ops) if op.random} - generators
    assert len(generators) == 2 and dropout

    def drawn(model: nn.Module) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        model.inner.generators[0] = generator.manual_seed(7)
        return run(model, batch)[0], generator.get_state()

    gradients, state = drawn(copy.deepcopy(model))
    redrawn = 0
    for unit in (each for each in found.units if each.module in ("", "inner") and each.kind != "loss"):
        assert found.of(unit).policies[1:]
        for policy in found.of(unit).policies[1:]:
            again = copy.deepcopy(model)
            Execution(again.get_submodule(unit.module), trace, unit, policy, discardable(trace_columns, unit))
            found_gradients, found_state = drawn(again)
            recomputed = {unit.begin + op for op in policy.recomputed}
            assert not recomputed & generators
            assert all(torch.equal(found_gradients[key], gradients[key]) for key in gradients)
            assert torch.equal(found_state, state)
            redrawn += bool(recomputed & dropout)
    assert redrawn, "what draws from torch's own generator is not bound to it"


class Rebinds(nn.Module):
    """Binds a new tensor to its buffer, which nothing else holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("moved", torch.ones(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.first(x) + self.moved[0]).sigmoid()
        self.moved = self.moved + 1
        return self.second(y.exp())


def test_a_buffer_that_is_bound_anew_is_held_for_the_second_run() -> None:
    model, batch = Between(nn.Sequential(Rebinds(), nn.Linear(8, 8))), torch.randn(4, 8)
    trace = memfit.trace(Step(model, (batch,), optimizer=torch.optim.SGD), target="cpu")
    trace_columns, found = (
        TraceColumns.of(trace, np.ones(len(trace.ops))),
        build_frontiers(trace, np.ones(len(trace.ops))),
    )
    inputs = {unit.name: UnitColumns.of(trace_columns, unit).input_bytes for unit in found.units}
    buffer_bytes = 64 * 32 * 4
    assert inputs["inner.0"] == inputs["inner.0.second"] + buffer_bytes
