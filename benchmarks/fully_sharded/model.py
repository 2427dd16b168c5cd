"""The models that are trained: GPTs, a T5 with tied weights, wide linears, many tiny layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its units, and its batch on a rank.

    `unit` is the class of the modules that are gathered one at a time; `half` trains in bfloat16 with float32 shards.
    `kept` also trains it with gathered parameters left between forward and backward.
    """

    title: str
    build: Callable[[], nn.Module]
    unit: type[nn.Module]
    batch: Callable[[], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    half: bool = False
    kept: bool = False


class Block(nn.Module):
    """A transformer's block; with `cross` it attends to the encoder's output, too."""

    def __init__(self, width: int, *, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = width // 64, causal
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if cross:
            self.norm_3 = nn.LayerNorm(width)
            self.q, self.kv, self.out_2 = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self._split(self.qkv(self.norm(x)), 3)
        x = x + self.out(self._mixed(query, key, value, self.causal))
        if encoded is not None:
            (query,), (key, value) = self._split(self.q(self.norm_3(x)), 1), self._split(self.kv(encoded), 2)
            x = x + self.out_2(self._mixed(query, key, value, causal=False))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def _split(self, x: torch.Tensor, parts: int) -> torch.Tensor:
        return x.view(*x.shape[:2], parts, self.heads, -1).permute(2, 0, 3, 1, 4)

    def _mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return mixed.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class T5(nn.Module):
    """An encoder and a decoder that share one embedding, with the head as well."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(Block(width, causal=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(width, cross=True) for _ in range(layers))
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        encoded = self.shared(tokens)
        for block in self.encoder:
            encoded = block(encoded)
        encoded = self.norm(encoded)
        x = self.shared(tokens)
        for block in self.decoder:
            x = block(x, encoded)
        return self.head(self.norm_2(x) * x.shape[-1] ** -0.5)


class Layer(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.ReLU())


class Layers(nn.Module):
    """Layers one after another, and nothing else."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _on_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def _squares(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


CASES = {
    "gpt-26m": Case(
        title="GPT of 26 M parameters, batch 2 x 256",
        build=lambda: GPT(512, 8, 1024),
        unit=Block,
        batch=lambda: torch.randint(0, 1024, (2, 256)),
        loss=_on_tokens,
        kept=True,
    ),
    "gpt-57m": Case(
        title="GPT of 57 M parameters, batch 1 x 256",
        build=lambda: GPT(768, 8, 512),
        unit=Block,
        batch=lambda: torch.randint(0, 512, (1, 256)),
        loss=_on_tokens,
        kept=True,
    ),
    "gpt-6m-bf16": Case(
        title="GPT of 6 M parameters in bfloat16, batch 1 x 32",
        build=lambda: GPT(256, 8, 512),
        unit=Block,
        batch=lambda: torch.randint(0, 512, (1, 32)),
        loss=_on_tokens,
        half=True,
        kept=True,
    ),
    "t5": Case(
        title="T5 of 34 M parameters with tied weights, batch 2 x 64",
        build=lambda: T5(512, 4, 8192),
        unit=Block,
        batch=lambda: torch.randint(0, 8192, (2, 64)),
        loss=_on_tokens,
    ),
    "wide": Case(
        title="4 wide linears, 17 M parameters, batch 16",
        build=lambda: Layers(2048, 4),
        unit=Layer,
        batch=lambda: torch.randn(16, 2048),
        loss=_squares,
    ),
    "tiny": Case(
        title="200 tiny layers, 0.8 M parameters, batch 16",
        build=lambda: Layers(64, 200),
        unit=Layer,
        batch=lambda: torch.randn(16, 64),
        loss=_squares,
    ),
}
