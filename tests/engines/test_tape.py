"""A tape replays what really ran, or drops nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memfit
from memfit.capture import Step
from memfit.engines.compiled_policy import RunPolicy
from memfit.engines.tape import Tape
from memfit.errors import PlanDrift
from memfit.plans import Plan
from memfit.solve import SolveOptions

VECTORS = torch.randn(32, 16)
MOST = 100
DROP_ALL = RunPolicy(
    unit="all",
    module="all",
    call=0,
    kind="all",
    ops=MOST,
    names={},
    saved=frozenset(),
    dropped=frozenset((op, place) for op in range(MOST) for place in range(3)),
    stop=MOST - 1,
)
"""Runs everything again: a tape is to be exact whatever a policy says."""


def forced_loss(model: nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None) -> Plan:
    """A plan that runs the loss again, and nothing else."""
    trace = memfit.trace(Step(model, VECTORS, loss=loss), target="cpu")
    plan = memfit.plan(trace, budget="1GiB", options=SolveOptions(force=("<loss>",)), progress=False)
    assert [entry.unit for entry in plan.checkpoint] == ["<loss>"]
    return plan


def gradients(model: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    loss(model(VECTORS), None).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


WEIGHTS = [np.linspace(0.5, 1.5 + number, 64, dtype=np.float32) for number in range(8)]


def passing(output: torch.Tensor, _: Any) -> torch.Tensor:
    """Tensors that no op makes come to the addresses of those that have just died."""
    gone = [(output * number).exp().sum().detach() for number in range(4)]
    last = gone[-1]
    del gone
    weights = [torch.from_numpy(each) for each in WEIGHTS]
    for each in weights:
        output = (output * each).sigmoid().exp()
    return (output * output).mean() + last * 0


def test_a_storage_at_the_address_of_a_dead_one_is_another() -> None:
    plain = nn.Linear(16, 64)
    planned = copy.deepcopy(plain)
    plan = forced_loss(plain, passing)
    plan.apply(planned)
    assert all(map(torch.equal, gradients(plain, passing), gradients(planned, plan.loss(passing))))


class Generated:
    """Random numbers of a generator of one's own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * torch.rand(x.shape, generator=self.generator)).sigmoid().exp()

    def state(self) -> list[torch.Tensor]:
        return [self.generator.get_state()]


class Statistics:
    """Statistics that an op updates, which its schema does not say."""

    def __init__(self) -> None:
        self.mean, self.variance = torch.zeros(16), torch.ones(16)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x.exp(), self.mean, self.variance, training=True).sigmoid().exp()

    def state(self) -> list[torch.Tensor]:
        return [self.mean, self.variance]


class Asks:
    """A backward in the middle."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sigmoid().exp()
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return (y + slope).sigmoid().exp()

    def state(self) -> list[torch.Tensor]:
        return []


class Draws(Asks):
    """Random numbers, with an input and without."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, device=x.device)
        return nn.functional.dropout((x.exp() * noise).sigmoid(), 0.3).exp()

    def state(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()]


@pytest.mark.parametrize("kind", [Generated, Statistics, Asks, Draws])
def test_what_a_tape_runs_again_is_exact_and_changes_nothing_twice(kind: type[Any]) -> None:
    found = []
    for taped in (False, True):
        function, x = kind(), VECTORS.clone().requires_grad_()
        torch.manual_seed(1)
        if taped:
            tape = Tape(DROP_ALL, "cpu")
            with saved_tensors_hooks(tape.pack, Tape.unpack), tape:
                result = function(x)
        else:
            result = function(x)
        (result * VECTORS).sum().backward()
        assert x.grad is not None
        found.append([result.detach(), x.grad, *function.state()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_second_run_does_not_cast_what_the_first_did_not(autocast: bool) -> None:
    found = []
    for taped in (False, True):
        x, weight = VECTORS.clone().requires_grad_(), torch.ones(16, 16)
        tape = Tape(DROP_ALL, "cpu")
        if taped:
            with saved_tensors_hooks(tape.pack, Tape.unpack), tape:
                result = (x @ weight).sigmoid().exp()
        else:
            result = (x @ weight).sigmoid().exp()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result.sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


class Cache:
    """What a unit writes to while it runs, so that its code cannot be run again."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.extra = nn.Linear(16, 16), False

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.kept.append(x)
        return torch.tanh(torch.tanh(self.inner(torch.sin(x) if self.extra else x)))


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x.square().mean()


def test_a_unit_on_a_tape_that_runs_other_ops_than_planned_is_told() -> None:
    model = WithCache()
    trace = memfit.trace(Step(model, VECTORS), target="cpu")
    plan = memfit.plan(trace, budget="1GiB", options=SolveOptions(force=("blocks.0",)), progress=False)
    plan.apply(model)
    model.blocks[0].extra = True  # type: ignore[assignment]
    with pytest.warns(PlanDrift, match=r"'blocks.0' does not run as planned: its op 0 is aten\.sin"):
        model(VECTORS).backward()
