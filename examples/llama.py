"""A Llama-shaped language model in plain torch, and its training step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from memfit import Step, spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model; the defaults are those of Llama 3 8B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    key_value_heads: int = 8
    feed_forward: int = 14336
    vocabulary: int = 128256
    rope_theta: float = 500000.0

    @property
    def head(self) -> int:
        """The size of one attention head."""
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-5)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.head
        self.query = nn.Linear(shape.hidden, shape.heads * shape.head, bias=False)
        self.key = nn.Linear(shape.hidden, shape.key_value_heads * shape.head, bias=False)
        self.value = nn.Linear(shape.hidden, shape.key_value_heads * shape.head, bias=False)
        self.output = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        split = (*x.shape[:2], -1, self.head)
        query = rotate(self.query(x).view(split).transpose(1, 2), rotary)
        key = rotate(self.key(x).view(split).transpose(1, 2), rotary)
        value = self.value(x).view(split).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.feed_forward_norm = RMSNorm(shape.hidden)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head, 2).float() / shape.head)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, (self.cosine, self.sine))
        return self.head(self.norm(x))


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary position embedding of queries or keys."""
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every token given those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def training_step(
    shape: Shape | None = None, *, batch: int = 1, length: int = 8192, dtype: torch.dtype = torch.bfloat16
) -> Step:
    """AdamW on the whole model in one dtype; nothing is allocated, whatever the shape."""
    shape = shape or Shape()
    return Step(
        lambda: Llama(shape, length).to(dtype),
        spec((batch, length), torch.int64),
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-4),
    )
