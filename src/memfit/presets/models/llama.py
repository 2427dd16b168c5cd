"""Decoders with rotary positions, grouped heads and a gated feed-forward: Llama 3, Qwen3 and their like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from memfit.presets.models.layers import CrossEntropy, Embedding, RMSNorm

Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes:
    """The sizes of a decoder. `query_key_norm` is Qwen3's norm of every head before rotation."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head: int
    feed_forward: int
    vocabulary: int
    rope_theta: float
    norm_epsilon: float
    tied: bool = False
    query_key_norm: bool = False


class Attention(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.query = nn.Linear(sizes.hidden, sizes.heads * sizes.head, bias=False)
        self.key = nn.Linear(sizes.hidden, sizes.key_value_heads * sizes.head, bias=False)
        self.value = nn.Linear(sizes.hidden, sizes.key_value_heads * sizes.head, bias=False)
        self.output = nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias=False)
        normed = sizes.query_key_norm
        self.query_norm = RMSNorm(sizes.head, sizes.norm_epsilon) if normed else nn.Identity()
        self.key_norm = RMSNorm(sizes.head, sizes.norm_epsilon) if normed else nn.Identity()

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        split = (*x.shape[:2], -1, self.head)
        query = rotated(self.query_norm(self.query(x).view(split)).transpose(1, 2), rotary)
        key = rotated(self.key_norm(self.key(x).view(split)).transpose(1, 2), rotary)
        value = self.value(x).view(split).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)
        self.down = nn.Linear(sizes.feed_forward, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(sizes.hidden, sizes.norm_epsilon)
        self.attention = Attention(sizes)
        self.feed_forward_norm = RMSNorm(sizes.hidden, sizes.norm_epsilon)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The whole model: logits, or the loss when labels are given, so that nothing holds logits through backward."""

    def __init__(self, sizes: LlamaSizes, length: int) -> None:
        super().__init__()
        self.embedding = Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden, sizes.norm_epsilon)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.embedding.weight
        self.loss: nn.Module = CrossEntropy()
        frequencies = sizes.rope_theta ** -(torch.arange(0, sizes.head, 2).float() / sizes.head)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        rotary = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, rotary)
        logits = self.head(self.norm(x))
        return logits if labels is None else self.loss(logits, labels)


def rotated(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate queries or keys by their positions, in float32; return them in their own dtype."""
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)
