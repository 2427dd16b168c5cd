"""Experts that ranks share, trained on each process of the tests and captured as each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.distributed.parallel_case import Case

WIDTH, HIDDEN, TOKENS, EXPERTS = 32, 64, 24, 4


class Experts(nn.Module):
    """The experts of this rank: each of them computes what all ranks send for it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, WIDTH, HIDDEN).normal_(std=0.02))
        self.down = nn.Parameter(torch.empty(count, HIDDEN, WIDTH).normal_(std=0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(nn.functional.silu(torch.bmm(x, self.up)), self.down)


class Mixture(nn.Module):
    """Each expert takes as many tokens as the others (expert choice), so that all ranks send equal parts."""

    group: Any

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS // ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x)
        scores = self.router(tokens).softmax(-1)
        weights, chosen = scores.t().topk(len(x) // EXPERTS, dim=-1)  # of each expert, the tokens that it takes
        sent = tokens[chosen].flatten(0, 1)
        received = self._exchange(sent).view(self.ranks, EXPERTS // self.ranks, -1, WIDTH)
        computed = self.experts(received.transpose(0, 1).flatten(1, 2))
        returned = computed.view(EXPERTS // self.ranks, self.ranks, -1, WIDTH).transpose(0, 1).flatten(0, 2)
        weighted = self._exchange(returned) * weights.reshape(-1, 1)
        return x.index_add(0, chosen.flatten(), weighted)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        return functional.all_to_all_single_autograd(x.contiguous(), None, None, self.group)


class Model(nn.Module):
    def __init__(self, ranks: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture(ranks) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(mesh: DeviceMesh, shard: bool = False, layers: int = 2) -> nn.Module:
    """Build the experts of this rank along `ep`; ranks of `dp` shard them, and everything else."""
    model = Model(mesh["ep"].size(), layers)
    for layer in model.layers:
        layer.group = mesh["ep"].get_group()
        if shard:
            fully_shard(layer.experts, mesh=mesh["dp"])
            fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]) if shard else model


def _case(sizes: dict[str, int], **options: Any) -> Case:
    return Case(functools.partial(build, **options), sizes, _batch)


def _batch(make: Callable[..., torch.Tensor]) -> torch.Tensor:
    return make((TOKENS, WIDTH))


CASES = {
    "expert parallel": _case({"ep": 2}),
    "expert parallel of a sharded model": _case({"dp": 2, "ep": 2}, shard=True),
}
