"""Traces with replicated blocks are those of captures that run every block (Note [Repeated blocks])."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit import Step, trace
from memfit.errors import MemfitError

BLOCKS = 9
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SINGLE = partial(torch.optim.AdamW, foreach=False, fused=False)
FOREACH = partial(torch.optim.AdamW, foreach=True)


class Block(nn.Module):
    def __init__(self, index: int, size: int = 16) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> Any:
        x = x * shared[0] if shared else x
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class InTuple(Block):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, scale: float = 1.0) -> Any:
        x = super().forward(x) * scale
        return {"x": x if bias is None else x + bias, "bias": bias, "weights": None}


class Normed(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.batch_norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(super().forward(x, *shared))


class Model(nn.Module):
    def __init__(self, kind: type[Block] = Block, way: str = "plain") -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(16))
        self.trained = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(kind(i) for i in range(BLOCKS))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        kept = []
        for i, block in enumerate(self.blocks):
            kept.append(x)
            if self.way == "plain":
                x = block(x)
            elif self.way == "shared":
                x = block(x, self.scale)
            elif self.way == "trained together":
                x = block(x, self.trained)
            elif self.way == "dict":
                x = block(x, bias=self.scale, scale=0.5)["x"]
            elif self.way == "checkpointed" or (self.way == "every other" and i % 2):
                x = checkpoint(block, x, use_reentrant=False)
            elif self.way == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            elif self.way == "one differs" and i == 5:
                x = block(x, self.scale)
            elif self.way == "op between":
                x = block(x) + 1
            elif self.way == "left out" and i == 4:
                continue
            elif self.way == "twice" and i == 4:
                x = block(block(x))
            elif self.way == "random" and torch.rand(()) > 0.5:
                continue
            else:
                x = block(x)
            if self.way == "forgets":
                kept.clear()
        if self.way == "stacked":
            x = torch.stack(kept).mean(0) + x
        if self.way == "one of the middle":
            x = x + kept[5]
        if self.way == "weights":
            x = x + sum(block.up.bias.sum() for block in self.blocks)  # type: ignore[union-attr, operator]
        return self.head(x).square().mean()


class ReadsIndex(Block):
    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        x = super().forward(x, *shared)
        return x.relu() if self.index % 4 == 3 else x


class Counting(Block):
    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        self.index += 1
        return super().forward(x, *shared)


class Auxiliary(Block):
    losses: ClassVar[list[torch.Tensor]] = []

    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        x = super().forward(x, *shared)
        Auxiliary.losses.append(x.mean())
        return x


def auxiliary_loss(output: torch.Tensor, _: Any) -> torch.Tensor:
    losses, Auxiliary.losses = Auxiliary.losses, []
    return output + torch.stack(losses).sum()


def frozen_in_eval() -> Step:
    model = Model()
    for block in model.blocks:
        block.dropout.eval()  # type: ignore[union-attr]
    return Step(model, torch.randn(2, 4), optimizer=SGD)


def with_hook() -> Step:
    model = Model()
    model.blocks[4].register_forward_hook(lambda module, args, output: output * 2)
    return Step(model, torch.randn(2, 4), optimizer=SGD)


def with_gradient_hook() -> Step:
    model = Model()
    model.blocks[4].up.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[union-attr]
    return Step(model, torch.randn(2, 4), optimizer=SGD)


def other_rate() -> Step:
    model = Model()
    for i, block in enumerate(model.blocks):
        block.dropout.p = 0.01 * i  # type: ignore[union-attr]
    return Step(model, torch.randn(2, 4), optimizer=SGD)


def tied() -> Step:
    model = Model()
    model.blocks[4].up.weight = model.blocks[2].up.weight  # type: ignore[union-attr]
    return Step(model, torch.randn(2, 4), optimizer=SGD)


def make(kind: type[Block] = Block, way: str = "plain", **options: Any) -> Step:
    return Step(lambda: Model(kind, way), torch.randn(2, 4), **{"optimizer": SGD, **options})


REPLICATED: dict[str, Callable[[], Step]] = {
    "plain": make,
    "model": lambda: Step(Model(), torch.randn(2, 4), optimizer=SGD),
    "eval": frozen_in_eval,
    "shared": lambda: make(way="shared"),
    "dict": lambda: make(InTuple, "dict"),
    "batch norm": lambda: make(Normed),
    "forgets": lambda: make(way="forgets"),
    "single": lambda: make(optimizer=SINGLE, clip_grad_norm=1.0),
    "foreach": lambda: make(optimizer=FOREACH, clip_grad_norm=1.0),
    "autocast": lambda: make(autocast=torch.bfloat16, clip_grad_norm=1.0),
    "accumulation": lambda: make(way="shared", accumulation_steps=2, autocast=torch.bfloat16),
    "gradients stay": lambda: make(zero_grad="before_backward"),
    "no zero_grad": lambda: make(zero_grad=False),
}
TWICE = ("gradients stay", "no zero_grad")
"""Steps that begin with the gradients of the one before: these are captured twice."""
RUN: dict[str, Callable[[], Step]] = {
    "every other": lambda: make(way="every other"),
    "trained together": lambda: make(way="trained together"),
    "reentrant": lambda: make(way="reentrant"),
    "one differs": lambda: make(way="one differs"),
    "op between": lambda: make(way="op between"),
    "left out": lambda: make(way="left out"),
    "twice": lambda: make(way="twice"),
    "random": lambda: make(way="random"),
    "stacked": lambda: make(way="stacked"),
    "one of the middle": lambda: make(way="one of the middle"),
    "weights": lambda: make(way="weights"),
    "reads its index": lambda: make(ReadsIndex),
    "changes itself": lambda: make(Counting),
    "auxiliary losses": lambda: make(Auxiliary, loss=auxiliary_loss),
    "hook": with_hook,
    "gradient hook": with_gradient_hook,
    "other rate": other_rate,
    "tied": tied,
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks ran: each has one norm. What the test file itself keeps is put back after a capture."""
    counts = [0]
    forward = nn.LayerNorm.forward

    def counted(self: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return forward(self, x)

    monkeypatch.setattr(nn.LayerNorm, "forward", counted)
    return counts


def both(step: Step, target: str, ran: list[int]) -> tuple[bytes, bytes]:
    """Return the trace of a full capture and the other one."""
    found = []
    for replicate in (False, True):
        ran[0] = 0
        torch.manual_seed(0)
        found.append(msgspec.msgpack.encode(trace(step, target=target, replicate=replicate)))
    return found[0], found[1]


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("name", REPLICATED)
def test_equal_blocks_are_captured_once_with_the_same_trace(name: str, target: str, ran: list[int]) -> None:
    step = REPLICATED[name]()
    full, replicated = both(step, target, ran)
    assert replicated == full
    assert ran[0] == 5 * step.accumulation_steps * (2 if name in TWICE else 1)


def test_checkpointed_blocks_are_captured_once(ran: list[int]) -> None:
    full, replicated = both(make(way="checkpointed"), "h100-sxm", ran)
    assert replicated == full
    assert ran[0] == 2 * 5


@pytest.mark.parametrize("name", RUN)
def test_what_depends_on_single_blocks_is_captured_in_full(name: str, ran: list[int]) -> None:
    full, replicated = both(RUN[name](), "h100-sxm", ran)
    assert replicated == full
    assert ran[0] >= BLOCKS - 1


@pytest.mark.parametrize("where", ["embed", "blocks.1", "blocks.8"])
def test_a_step_that_fails_before_a_block_was_left_out_runs_once(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        print("failed")
        raise ValueError("of the user")

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        forward = model.get_submodule(where).forward
        model.get_submodule(where).forward = fail
        try:
            model(batch).sum().backward()
        finally:
            model.get_submodule(where).forward = forward

    with pytest.raises(MemfitError, match="of the user"):
        trace(Step(Model(), torch.ones(2, 4), optimizer=SGD, run=run), target="h100-sxm")
    assert capsys.readouterr().out.count("failed") == (2 if where == "blocks.8" else 1)


def test_models_are_built_without_initial_values_on_meta_alone() -> None:
    kept: list[torch.Tensor] = []

    def build() -> nn.Module:
        with torch.device("cpu"):
            kept.append(nn.init.constant_(torch.empty(2), 3.0))
        return Model()

    before = nn.init.kaiming_uniform_
    trace(Step(build, torch.ones(2, 4), loss=lambda output, _: output.sum()), target="h100-sxm")
    assert kept[0].tolist() == [3.0, 3.0] and nn.init.kaiming_uniform_ is before
    assert nn.Linear(4, 4).weight.abs().sum() > 0
