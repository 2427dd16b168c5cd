"""Layers that the built-in models share; they compute in one dtype (Note [Precision])."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


def computed(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter in the dtype of the compute: autocast's, its own without."""
    kind = parameter.device.type
    return parameter.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else parameter


class RMSNorm(nn.Module):
    """A norm by root mean square, in the dtype of what it is given."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.epsilon)


class LayerNorm(nn.Module):
    """A norm by mean and variance, in the dtype of what it is given."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.weight.shape, weight, bias, self.epsilon)


class Embedding(nn.Embedding):
    """A table whose rows come in the dtype of the compute."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.embedding(input, computed(self.weight))


class CrossEntropy(nn.Module):
    """The mean loss in float32; positions with the label -100 do not count."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


# -- the transformer block of GPT-2, BERT and ViT ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """The sizes of a stack of blocks."""

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    norm_epsilon: float
    dropout: float = 0.0
    attention_dropout: float = 0.0


class SelfAttention(nn.Module):
    def __init__(self, sizes: BlockSizes, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = sizes.heads, causal, sizes.attention_dropout
        self.query_key_value = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(x).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, sizes: BlockSizes, *, gelu: Literal["none", "tanh"]) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.hidden, sizes.feed_forward)
        self.activation = nn.GELU(approximate=gelu)
        self.down = nn.Linear(sizes.feed_forward, sizes.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each added to its input; norms come before each (`norm_first`) or after the sum."""

    def __init__(
        self, sizes: BlockSizes, *, causal: bool, norm_first: bool, gelu: Literal["none", "tanh"] = "none"
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention_norm = LayerNorm(sizes.hidden, sizes.norm_epsilon)
        self.attention = SelfAttention(sizes, causal=causal)
        self.feed_forward_norm = LayerNorm(sizes.hidden, sizes.norm_epsilon)
        self.feed_forward = FeedForward(sizes, gelu=gelu)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self.dropout(self.attention(self.attention_norm(x)))
            return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
