"""A planned model gives the losses and gradients of the plain one, to the last bit, whatever its modules are like."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture import Step
from memfit.plans import Plan
from memfit.solve import SolveOptions
from memfit.tradeoff import find_units
from tests.engines.engine_cases import both, plan_for, run_steps, same


class Block(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Keywords(nn.Module):
    """Keyword arguments, several outputs, inputs that are no tensors, a tensor given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Mixed(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, rest = self.inner(x, scale=0.5, mode="sum", pair=(x, x * 2), flags={"twice": True, "none": None})
        return self.head(out) + rest["mean"]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(
        self,
        x: torch.Tensor,
        *,
        scale: float,
        mode: str,
        pair: tuple[torch.Tensor, torch.Tensor],
        flags: dict[str, Any],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = self.second(torch.tanh(self.first(pair[0] * scale + pair[1])))
        if flags["twice"]:
            y = y.sigmoid() * y
        return y + x, {"mean": y.mean(-1, keepdim=True)}


class Shared(nn.Module):
    """One module called three times, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(11, 16), Block(), nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class Frozen(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)


class Normalized(nn.Module):
    """Statistics that a run updates."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu().mean((2, 3)))


class Checkpointed(Blocks):
    """torch's own checkpointing inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.blocks[2](x))


class Notes:
    """Something that changes while modules run."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return torch.cat(self.seen, dim=1)


class Remembers(nn.Module):
    """Like attention with a cache of keys: run twice, its code would see the cache of the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Reader() for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        notes = Notes()
        for layer in self.layers:
            x = layer(x, notes)
        return self.head(x)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, notes: Notes) -> torch.Tensor:
        keys = notes.add(self.key(x))
        scores = self.drop(torch.softmax(x @ keys.transpose(1, 2), dim=-1))
        return x + scores @ keys + torch.tanh(self.value(x)).exp()


class TwiceAsked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        a = x.exp()
        ctx.save_for_backward(a, x)
        return a * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (ctx.saved_tensors[0] * ctx.saved_tensors[1] + ctx.saved_tensors[0])


class Custom(nn.Module):
    """A custom function whose backward asks for its saved tensors one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = CustomInner(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


class CustomInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(TwiceAsked.apply(self.first(x).tanh()).sigmoid())


def squares(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def tokens_loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch.flatten())


VECTORS, IMAGES = torch.randn(6, 16), torch.randn(2, 3, 12, 12)
SEQUENCE, TOKENS = torch.randn(2, 5, 16), torch.arange(10).reshape(2, 5)
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dropout": (Blocks, VECTORS, {}),
    "keywords": (Keywords, VECTORS, {}),
    "shared and tied": (Shared, TOKENS, {"loss": tokens_loss}),
    "frozen": (Frozen, VECTORS, {}),
    "batch norm": (Normalized, IMAGES, {}),
    "checkpointed": (Checkpointed, VECTORS, {}),
    "a cache": (Remembers, SEQUENCE, {}),
    "custom function": (Custom, VECTORS, {}),
    "autocast": (Blocks, VECTORS, {"autocast": torch.bfloat16}),
    "accumulation": (Blocks, VECTORS, {"accumulation_steps": 3}),
    "no optimizer": (Blocks, VECTORS, {"optimizer": None}),
    "clipped": (Blocks, VECTORS, {"clip_grad_norm": 0.1, "optimizer": torch.optim.SGD}),
}


def case(name: str) -> tuple[Any, Step]:
    build, batch, options = CASES[name]
    options = {"loss": squares, **options}
    if options.get("optimizer") is torch.optim.SGD:
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    return build, Step(build(), batch, **options)


def every_unit(step: Step) -> list[Plan]:
    """A plan for each unit of the step that can give something up, dropping all it can."""
    trace = memfit.trace(step, target="cpu")
    found = []
    for unit in dict.fromkeys(unit.name for unit in find_units(trace)):
        try:
            plan = memfit.plan(trace, budget="1GiB", options=SolveOptions(force=(unit,)), progress=False)
        except memfit.InputError:
            continue
        found.append(plan)
    return found


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_planned_steps_are_equal_to_the_last_bit(name: str, part: float) -> None:
    build, step = case(name)
    plan = plan_for(step, part)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, planned, _, _ = both(build, step, plan)
    assert same(plain, planned)


@pytest.mark.parametrize("name", CASES)
def test_every_unit_can_be_the_one_that_runs_again(name: str) -> None:
    build, step = case(name)
    plans = every_unit(step)
    assert plans, "no unit could be forced"
    for plan in plans:
        assert len(plan.checkpoint) >= 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plain, planned, _, _ = both(build, step, plan, steps=2)
        assert same(plain, planned), [entry.unit for entry in plan.checkpoint]


def test_another_shape_of_input_is_learnt_and_equal() -> None:
    build, step = case("dropout")
    plan = plan_for(step)
    plain, planned, model, _ = both(build, step, plan)
    torch.manual_seed(0)
    other = build()
    other.load_state_dict(plain.state)
    model.load_state_dict(planned.state)
    longer = step.with_batch(torch.randn(31, 16))
    assert same(
        run_steps(longer, other, step.build_optimizer(other)), run_steps(longer, model, step.build_optimizer(model))
    )


class Wavering(nn.Module):
    """Its code takes another way every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = WaveringInner(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x, self.inner.odd))


class WaveringInner(Block):
    odd = False

    def forward(self, x: torch.Tensor, odd: Any = False) -> torch.Tensor:
        y = super().forward(x)
        if self.odd:
            y = y.tanh().sigmoid() * y
        return y


def test_a_unit_that_takes_another_way_is_still_exact() -> None:
    step = Step(Wavering(), VECTORS, loss=squares)
    plan = plan_for(step, options=SolveOptions(force=("inner",)))
    runs = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Wavering()
        optimizer = step.build_optimizer(model)
        if planned:
            plan.apply(model, optimizer)
        found = []
        for number in range(6):
            model.inner.odd = number in (2, 3, 5)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(run_steps(step, model, optimizer, 1))
        runs.append(found)
    assert all(same(one, other) for one, other in zip(*runs, strict=True))


def test_a_graph_that_is_kept_can_be_gone_through_twice() -> None:
    build, step = case("dropout")
    plan = plan_for(step)
    gradients = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = build()
        if planned:
            plan.apply(model)
        torch.manual_seed(1)
        loss = squares(model(VECTORS), None)
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_gradients_of_gradients_are_those_of_the_plain_model() -> None:
    plan = plan_for(Step(Blocks(), VECTORS, loss=squares))
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        if planned:
            plan.apply(model)
        torch.manual_seed(1)
        first = torch.autograd.grad(squares(model(VECTORS), None), list(model.parameters()), create_graph=True)
        sum(each.square().sum() for each in first).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_step_after_one_that_failed_is_exact() -> None:
    build, step = case("shared and tied")
    plan = plan_for(step)
    _, planned, model, _ = both(build, step, plan)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((2, 5), 99))
    torch.manual_seed(0)
    other = build()
    other.load_state_dict(planned.state)
    model.zero_grad()
    assert same(
        run_steps(step, other, step.build_optimizer(other)), run_steps(step, model, step.build_optimizer(model))
    )
