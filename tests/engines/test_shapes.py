"""Random lengths: a unit learns its recipe on a few shapes and knows it for the others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture import Step
from memfit.cost import Runtime
from memfit.engines import unit as engine
from memfit.engines.shapes import InputFamily, dense_stride, order_of
from memfit.hardware import Target
from memfit.solve import Problem, SolveOptions, minimum_budget_bytes
from tests.engines.engine_cases import plan_for
from tests.engines.test_exact import squares

WIDTH = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Branches(Attention):
    """Other ops for long inputs, of which as many tensors are saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        return x + self.down(nn.functional.gelu(y) if x.shape[1] < 12 else nn.functional.silu(y))


def built(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(3)))


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    first = engine.PolicyCompiler.run_forward

    def noted(self: Any, args: Any, kwargs: Any) -> Any:
        found.append(tuple(args[0].shape))
        return first(self, args, kwargs)

    monkeypatch.setattr(engine.PolicyCompiler, "run_forward", noted)
    return found


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    squares(model(x), None).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("kind", [Attention, Branches])
def test_random_lengths_are_learnt_a_few_times_and_give_the_same_bits(
    kind: type[nn.Module], part: float, learnt: list[Any]
) -> None:
    plan = plan_for(Step(built(kind), torch.randn(2, 10, WIDTH), loss=squares), part)
    assert plan.checkpoint
    model, plain = built(kind), built(kind)
    plan.apply(model)
    units = len({entry.module for entry in plan.checkpoint})
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(16):
            length = int(torch.randint(2, 24, (), generator=generator))
            rows = int(torch.randint(2, 5, (), generator=generator)) if kind is Attention else 2
            x = torch.randn(rows, length, WIDTH, generator=generator)
            for one, other in zip(gradients(model, x), gradients(plain, x), strict=True):
                assert torch.equal(one, other)
    if kind is Attention:
        assert len(learnt) <= 6 * units, learnt


def test_a_unit_that_saves_products_knows_other_lengths_too(learnt: list[Any]) -> None:
    class Flops:
        def op_ms(self, trace: Any) -> Any:
            import numpy as np

            return np.array([op.flops / 1e9 + 1e-6 for op in trace.ops])

    import memfit

    trace = memfit.trace(Step(built(Attention), torch.randn(2, 10, WIDTH), loss=squares), target="cpu")
    problem = Problem.of(Runtime.of(trace, Flops()), Target.parse("cpu"))
    least = minimum_budget_bytes(problem)
    assert least is not None
    budget = least + (problem.baseline_bytes - least) // 2
    plan = memfit.plan(trace, budget=budget, cost=Flops(), options=SolveOptions(), progress=False)
    assert any(entry.saved_ops for entry in plan.checkpoint)
    model, plain = built(Attention), built(Attention)
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in range(2, 18):
            x = torch.randn(2, length, WIDTH)
            for one, other in zip(gradients(model, x), gradients(plain, x), strict=True):
                assert torch.equal(one, other)
    units = len({entry.module for entry in plan.checkpoint})
    assert len(learnt) <= 4 * units, learnt


class Padded(nn.Module):
    """Pads its rows to a multiple of 8: a size that two lengths make look like the length itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(512, 64).requires_grad_(False), nn.Linear(64, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        y = self.a(nn.functional.pad(x, (0, 0, 0, -rows % 8)))
        w = y.repeat(1, 16).flip(0)[:rows]
        z = (y[:rows].sin().repeat(1, 16) * w).exp().tanh().sigmoid()
        return x + self.b(z.view(rows, 16, 64).mean(1))


def test_saved_results_of_other_sizes_than_predicted_are_not_handed_out() -> None:
    plan = plan_for(Step(built(Padded), torch.randn(64, 512), loss=squares), 0.2)
    assert any(entry.saved_ops for entry in plan.checkpoint)
    model, plain = built(Padded), built(Padded)
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in (64, 128, 100, 77, 96, 33):
            x = torch.randn(length, 512)
            for one, other in zip(gradients(model, x), gradients(plain, x), strict=True):
                assert torch.equal(one, other), length


def test_strides_of_dense_tensors_are_known_by_their_order() -> None:
    tensor = torch.empty(2, 3, 4, 5)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2)):
        turned = tensor.permute(order)
        found = order_of(tuple(turned.shape), turned.stride())
        assert found is not None and dense_stride(tuple(turned.shape), found) == turned.stride()
    assert order_of((2, 3), (6, 2)) is None and order_of((2, 3), (0, 1)) is None


def test_a_family_with_one_member_or_none_predicts_nothing() -> None:
    assert InputFamily().predict((2, 3)) is None
