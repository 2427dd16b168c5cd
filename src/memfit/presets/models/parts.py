"""What the models are made of besides torch's own layers: parts that compute in one dtype (Note [Precision])."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def computed(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter in the dtype of the compute: autocast's, its own without."""
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
