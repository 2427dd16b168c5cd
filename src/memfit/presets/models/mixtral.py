"""Mixtral: Llama's decoder with experts in place of the feed-forward.

Tokens are sorted by expert and every expert's rows go through one grouped matrix product. No token is dropped, so every
size is that of the tokens times the experts of each, whatever the router chooses. The weights of all experts are rows
of one matrix, which any number of ranks can share; as (experts, inputs, outputs) FSDP2 would shard whole experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from memfit.presets.models.layers import computed
from memfit.presets.models.llama import Llama, LlamaSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralSizes(LlamaSizes):
    """The sizes of a Mixtral."""

    experts: int
    experts_per_token: int


class Experts(nn.Module):
    def __init__(self, sizes: MixtralSizes) -> None:
        super().__init__()
        self.experts, self.chosen = sizes.experts, sizes.experts_per_token
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.gate = nn.Parameter(_weight(sizes.experts, sizes.hidden, sizes.feed_forward))
        self.up = nn.Parameter(_weight(sizes.experts, sizes.hidden, sizes.feed_forward))
        self.down = nn.Parameter(_weight(sizes.experts, sizes.feed_forward, sizes.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        shares, experts = self.router(tokens).float().softmax(dim=-1).topk(self.chosen)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        by_expert, order = experts.flatten().sort()
        ends = torch.searchsorted(by_expert, torch.arange(self.experts, device=x.device), right=True, out_int32=True)
        place = order // self.chosen
        rows = tokens[place]
        gated = F.silu(self._each(rows, self.gate, ends))
        outputs = self._each(gated * self._each(rows, self.up, ends), self.down, ends)
        shared = outputs * shares.flatten()[order].unsqueeze(-1).to(outputs.dtype)
        return torch.zeros_like(tokens).index_add(0, place, shared).view(x.shape)

    def _each(self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return every expert's rows times its part of the weights."""
        return F.grouped_mm(rows, computed(weight).unflatten(0, (self.experts, -1)), offs=ends)


class Mixtral(Llama):
    """The whole model; its router has no loss of its own, as transformers trains it unless told."""

    def __init__(self, sizes: MixtralSizes, length: int) -> None:
        super().__init__(sizes, length)
        for layer in self.layers:
            layer.feed_forward = Experts(sizes)


def _weight(experts: int, inputs: int, outputs: int) -> torch.Tensor:
    return torch.randn(experts * inputs, outputs) * inputs**-0.5
