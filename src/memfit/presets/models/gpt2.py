"""GPT-2: a decoder with learned positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from memfit.presets.models.layers import Block, BlockSizes, CrossEntropy, Embedding, LayerNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Sizes(BlockSizes):
    """The sizes of a GPT-2."""

    vocabulary: int
    positions: int


class GPT2(nn.Module):
    """The whole model: logits, or the loss when labels are given."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.embedding = Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = Embedding(sizes.positions, sizes.hidden)
        self.dropout = nn.Dropout(sizes.dropout)
        self.layers = nn.ModuleList(
            Block(sizes, causal=True, norm_first=True, gelu="tanh") for _ in range(sizes.layers)
        )
        self.norm = LayerNorm(sizes.hidden, sizes.norm_epsilon)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.loss = CrossEntropy()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else self.loss(logits, labels)
