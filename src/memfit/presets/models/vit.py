"""Vision transformers that classify images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from memfit.presets.models.layers import Block, BlockSizes, CrossEntropy, LayerNorm, computed


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTSizes(BlockSizes):
    """The sizes of a vision transformer; images are square."""

    image: int
    patch: int
    channels: int
    classes: int


class ViT(nn.Module):
    """The whole model: a logit for each class, or the loss when labels are given."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        patches = (sizes.image // sizes.patch) ** 2
        self.patches = nn.Conv2d(sizes.channels, sizes.hidden, sizes.patch, stride=sizes.patch)
        self.summary = nn.Parameter(torch.zeros(1, 1, sizes.hidden))
        self.positions = nn.Parameter(torch.zeros(1, 1 + patches, sizes.hidden))
        self.dropout = nn.Dropout(sizes.dropout)
        self.layers = nn.ModuleList(Block(sizes, causal=False, norm_first=True) for _ in range(sizes.layers))
        self.norm = LayerNorm(sizes.hidden, sizes.norm_epsilon)
        self.head = nn.Linear(sizes.hidden, sizes.classes)
        self.loss = CrossEntropy()

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        summary = computed(self.summary).expand(len(images), -1, -1)
        x = self.dropout(torch.cat((summary, patches), dim=1) + computed(self.positions))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)[:, 0])
        return logits if labels is None else self.loss(logits, labels)
