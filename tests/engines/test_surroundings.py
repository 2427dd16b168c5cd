"""Gradients stay exact when what surrounds a unit changes between its runs, or between steps."""

from __future__ import annotations

import copy
import pickle
import types
import warnings
from collections.abc import Callable

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import memfit
from memfit.engines.attachment import attached
from memfit.errors import StateError
from memfit.plans import Plan
from memfit.solve import SolveOptions
from tests.engines.engine_cases import plan_for

Run = Callable[[nn.Module], None]
X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def squares(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.sigmoid(F.gelu(self.a(x))))


class Blocks(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tight(
    model: nn.Module,
    x: torch.Tensor,
    part: float = 0.0,
    autocast: torch.dtype | None = None,
    force: tuple[str, ...] = (),
) -> Plan:
    """A plan at a part of the way from the smallest budget to the baseline."""
    step = memfit.Step(model, x, loss=squares, optimizer=None, autocast=autocast)
    plan = plan_for(step, part, SolveOptions(force=force))
    assert plan.checkpoint
    return plan


def same_as_plain(model: nn.Module, plan: Plan, run: Run, steps: int = 3) -> None:
    """Gradients and buffers of the planned model beside those of a copy."""
    plain = copy.deepcopy(model)
    plan.apply(model)
    try:
        for step in range(steps):
            for each in (plain, model):
                each.zero_grad()
                torch.manual_seed(step)
                run(each)
            for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                assert torch.equal(one.grad, other.grad), (step, name)
            for (name, one), other in zip(plain.named_buffers(), model.buffers(), strict=True):
                assert torch.equal(one, other), (step, name)
    finally:
        plan.remove(model)


def train(model: nn.Module, x: torch.Tensor = X) -> None:
    squares(model(x), x).backward()


@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.7])
def test_backward_may_run_inside_autocast(part: float) -> None:
    """Weights that autocast has cast are cached, and cast again in other places."""

    def run(model: nn.Module) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            train(model)

    model = Blocks()
    same_as_plain(model, tight(model, X, part, torch.bfloat16), run)


def test_inputs_may_come_in_another_memory_format() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 3, padding=1), nn.Sigmoid())

    model, images = Blocks(block), torch.randn(2, 4, 8, 8)
    formats = iter([each for each in (torch.contiguous_format, torch.channels_last) * 2 for _ in range(2)])

    def run(each: nn.Module) -> None:
        train(each, images.contiguous(memory_format=next(formats)))

    same_as_plain(model, tight(model, images), run, steps=4)


class Smoothed(Block):
    """Reads a buffer and then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(F.gelu(self.a(x)) * self.mean.clone())
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean())
        return self.b(hidden.exp())


class Counted(Block):
    """Binds another tensor to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.b(torch.sigmoid(F.gelu(self.a(x) / self.count)))


@pytest.mark.parametrize("block", [Smoothed, Counted])
def test_buffers_that_a_unit_changes_are_read_as_in_its_first_run(block: type[Block]) -> None:
    model = Blocks(block)
    same_as_plain(model, tight(model, X), train)


def test_a_unit_that_changes_buffers_and_does_not_run_as_planned_is_run_without_its_plan() -> None:
    def run(model: nn.Module) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = squares(model(X), X)
        loss.backward()

    model = Blocks(Smoothed)
    plan = tight(model, X)  # without autocast
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_as_plain(model, plan, run)


def test_a_unit_run_whole_whose_input_is_overwritten_is_an_error_and_not_another_gradient() -> None:
    class Overwrites(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            y = self.blocks[0](x)
            x.mul_(2) if torch.is_autocast_enabled("cpu") else None
            return self.blocks[1](y) + x

    model = Overwrites(lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Sigmoid(), nn.Linear(64, 16)), count=2)
    plan = tight(model, X)
    plan.apply(model)
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("ignore")
        train(model)  # learns that it is not as planned, and drops nothing
        with pytest.raises((StateError, RuntimeError), match=r"cannot be run again|modified by an inplace operation"):
            train(model)


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.Dropout(0.3, inplace=True)])
def test_a_unit_may_begin_by_overwriting_its_input(first: nn.Module) -> None:
    class Residual(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x * 1)
            return x

    def block() -> nn.Module:
        return nn.Sequential(copy.deepcopy(first), nn.Linear(16, 64), nn.GELU(), nn.Sigmoid(), nn.Linear(64, 16))

    model = Residual(block)
    same_as_plain(model, tight(model, X), train)


def test_an_input_may_come_to_require_gradients_after_the_unit() -> None:
    class Rectified(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.relu())

    class Adds(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            for block in self.blocks:
                x += block(x)
            return x

    model = Adds(Rectified, count=2)
    same_as_plain(model, tight(model, X, force=("blocks.0",)), train)


def test_other_parameters_for_one_call_are_those_of_the_second_run_too() -> None:
    model = Blocks()

    def run(each: nn.Module) -> None:
        other = {name: 2 * parameter for name, parameter in each.named_parameters()}
        squares(torch.func.functional_call(each, other, (X,)), X).backward()

    same_as_plain(model, tight(model, X), run)


def test_transforms_of_torch_func_run_without_the_plan() -> None:
    model = Blocks()
    plan = tight(model, X)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return squares(torch.func.functional_call(model, values, (X,)), X)

    before = torch.func.grad(loss)(parameters)
    plan.apply(model)
    after = torch.func.grad(loss)(parameters)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_slices_and_changing_numbers_are_inputs_like_others() -> None:
    class Sliced(Block):
        def forward(self, x: torch.Tensor, rows: slice = slice(None), scale: float = 1.0) -> torch.Tensor:
            return super().forward(x[rows] * scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.scale = Sliced(), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale += 0.1
            return self.block(x, slice(0, 16), scale=self.scale)

    model = Model()
    plan = tight(model, X, force=("block",))
    same_as_plain(model, plan, train, steps=5)
    plan.apply(model)
    for _ in range(5):
        train(model)
    handler = attached(model.block)
    unit = getattr(handler, "_torchdynamo_orig_callable", handler)
    assert unit is not None and len(unit._compiled) == 1, "a number that changes makes no new kind"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def test_the_kernels_of_attention_are_those_of_the_first_run() -> None:
    x = torch.randn(2, 8, 16)

    def run(model: nn.Module) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            loss = squares(model(x), x)
        loss.backward()

    model = Blocks(Attention)
    with sdpa_kernel(SDPBackend.MATH):
        plan = tight(model, x)
    same_as_plain(model, plan, run)


class Doubled(Block):
    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_copies_and_pickles_of_modules_with_a_forward_of_their_own_are_plain() -> None:
    model = Blocks(Doubled)
    for block in model.blocks:
        block.forward = block.doubled  # type: ignore[method-assign, operator]
    plan = tight(model, X)
    same_as_plain(model, plan, train)
    plan.apply(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not torch.equal(copied(X), model(X)), "the copy must use its own parameters"
    assert all(isinstance(block.__dict__["forward"], types.MethodType) for block in copied.blocks)
    assert all(block.__dict__["forward"].__self__ is block for block in copied.blocks)
    pickle.loads(pickle.dumps(model))
    plan.remove(model)


def test_a_document_that_runs_statistics_again_changes_nothing_twice() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Sigmoid(), nn.Linear(64, 16))

    model = Blocks(block)
    plan = tight(model, X)
    entries = []
    for entry in plan.checkpoint:
        moved = [op for op in entry.saved_ops if "batch_norm" in op.name or "add_" in op.name]
        saved = tuple(op for op in entry.saved_ops if op not in moved)
        again = tuple(sorted((*entry.recomputed_ops, *moved), key=lambda op: op.offset))
        entries.append(msgspec.structs.replace(entry, saved_ops=saved, recomputed_ops=again))
    assert any(one != other for one, other in zip(entries, plan.checkpoint, strict=True))
    lying = msgspec.structs.replace(plan, checkpoint=tuple(entries))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_as_plain(model, lying, train)


def test_units_inside_units_and_blocks_of_another_planned_model_are_refused() -> None:
    model = Blocks()
    plan = tight(model, X)
    entry = plan.checkpoint[0]
    inside = {"unit": f"{entry.unit}.a", "module": f"{entry.module}.a", "kind": "Linear", "end": entry.end - 1}
    inner = msgspec.structs.replace(entry, **inside)
    with pytest.raises(memfit.InputError, match="lies inside unit"):
        msgspec.structs.replace(plan, checkpoint=(inner, *plan.checkpoint)).apply(model)
    other = Blocks()
    other.blocks = model.blocks
    plan.apply(model)
    with pytest.raises(StateError, match="plan of another model"):
        plan.apply(other)
    plan.remove(model)
    plan.apply(other)
    plan.remove(other)
