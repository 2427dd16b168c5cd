"""BERT: an encoder that is trained to fill in masked words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from memfit.presets.models.layers import Block, BlockSizes, CrossEntropy, Embedding, LayerNorm, computed


@dataclass(frozen=True, slots=True, kw_only=True)
class BERTSizes(BlockSizes):
    """The sizes of a BERT."""

    vocabulary: int
    positions: int
    segments: int


class MaskedWords(nn.Module):
    """The head that gives a word for each place; its table is that of the embedding."""

    def __init__(self, sizes: BERTSizes) -> None:
        super().__init__()
        self.dense = nn.Linear(sizes.hidden, sizes.hidden)
        self.norm = LayerNorm(sizes.hidden, sizes.norm_epsilon)
        self.words = nn.Linear(sizes.hidden, sizes.vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(self.norm(F.gelu(self.dense(x))))


class BERT(nn.Module):
    """The whole model: logits of every place, or the loss when labels are given. All tokens are in one segment."""

    def __init__(self, sizes: BERTSizes) -> None:
        super().__init__()
        self.embedding = Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = Embedding(sizes.positions, sizes.hidden)
        self.segments = Embedding(sizes.segments, sizes.hidden)
        self.norm = LayerNorm(sizes.hidden, sizes.norm_epsilon)
        self.dropout = nn.Dropout(sizes.dropout)
        self.layers = nn.ModuleList(Block(sizes, causal=False, norm_first=False) for _ in range(sizes.layers))
        self.head = MaskedWords(sizes)
        self.head.words.weight = self.embedding.weight
        self.loss = CrossEntropy()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places) + computed(self.segments.weight)[0]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if labels is None else self.loss(logits, labels)
