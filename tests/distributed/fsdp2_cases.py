"""Small models of unequal blocks, and the steps in which FSDP2 and the model of it are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memfit import Step

WIDTH, HIDDEN, TOKENS = 64, (128, 256, 192, 321), 101


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Four blocks between two layers; 321 rows do not divide by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(map(Block, HIDDEN))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shared(Model):
    """The second block runs twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.head(x)


class BlocksOnly(Model):
    """The inputs of the first block need no gradient, and the output of the last is the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Identity()


class Frozen(Model):
    """Two blocks and some weights are not trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight.requires_grad_(False)
        for module in (self.inner, self.blocks[0], self.blocks[2]):
            module.requires_grad_(False)


class TransformerBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(seen)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """Its embedding is also its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(map(TransformerBlock, HIDDEN))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is trained."""

    model: Callable[[], nn.Module] = Model
    units: tuple[str, ...] = tuple(f"blocks.{number}" for number in range(len(HIDDEN)))
    mixed: bool = False
    in_backward: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def batch(self) -> torch.Tensor:
        if self.model is Transformer:
            return torch.zeros((2, 8), dtype=torch.int64)
        return torch.zeros((4, WIDTH if self.model is BlocksOnly else 16))

    def step(self, model: nn.Module | Callable[[], nn.Module], batch: torch.Tensor) -> Step:
        options = dict(self.options)
        if self.mixed:
            options["autocast"] = torch.bfloat16
        if self.in_backward:
            return Step(model, batch, optimizer=None, run=_forward_and_backward)
        return Step(model, batch, loss=_loss, **{"optimizer": _sgd, **options})


def train_in_backward(model: nn.Module) -> None:
    """Step on each parameter as soon as it has its gradient."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_descend)


def _descend(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.01)  # type: ignore[arg-type]
    parameter.grad = None


def _forward_and_backward(model: nn.Module, _: Any, batch: torch.Tensor) -> None:
    _loss(model(batch), None).backward()


def _loss(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.float().square().mean()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, foreach=False)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


_NESTED = tuple(f"blocks.{number}{end}" for number in range(len(HIDDEN)) for end in (".down", ""))

EMBEDDING_CASE = "transformer, mixed precision"
CASES = {
    "plain": Case(options={"optimizer": _adamw}),
    "gradients kept": Case(options={"set_to_none": False}),
    "accumulation": Case(options={"accumulation_steps": 2}),
    "mixed precision": Case(mixed=True),
    "mixed precision, accumulation": Case(mixed=True, options={"accumulation_steps": 3}),
    "shared block": Case(model=Shared),
    "shared block, accumulation": Case(model=Shared, options={"accumulation_steps": 2}),
    "shared block, mixed precision": Case(model=Shared, mixed=True),
    "blocks only": Case(model=BlocksOnly),
    "frozen parameters": Case(model=Frozen),
    "nested units": Case(units=_NESTED),
    "optimizer in backward": Case(in_backward=True),
    "transformer": Case(model=Transformer),
    "transformer, accumulation": Case(model=Transformer, options={"accumulation_steps": 2}),
    EMBEDDING_CASE: Case(model=Transformer, mixed=True),
}
