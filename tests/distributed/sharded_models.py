"""Small models of several kinds, for tests of the sharded runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 67


class Recompute:
    """How a model checkpoints: around each block, inside of blocks, around pairs of blocks, or not."""

    def __init__(self, where: str | None = None, *, reentrant: bool = False) -> None:
        self.where = where
        self.reentrant = reentrant

    def call(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, checkpointed if this is where."""
        if self.where == where and torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=self.reentrant)
        return function(*args)

    def chain(self, blocks: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
        """Blocks one after another."""
        if self.where != "several":
            for block in blocks:
                x = self.call("units", block, x)
            return x
        for first in range(0, len(blocks), 2):
            x = self.call("several", nn.Sequential(*blocks[first : first + 2]), x)
        return x


class Attention(nn.Module):
    """Multi-head attention over a context, or with a bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, length, width = x.shape
        over = x if context is None else context
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = self.key_value(over).view(batch, over.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, recompute: Recompute | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.recompute = recompute or Recompute()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.dropout(self.recompute.call("inside", self.wide, x))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder; `tied` shares the embedding with the head."""

    def __init__(
        self,
        *,
        vocabulary: int = VOCABULARY,
        width: int = 32,
        layers: int = 3,
        tied: bool = False,
        dropout: float = 0.0,
        recompute: Recompute | None = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute or Recompute()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout, self.recompute) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.recompute.chain(list(self.blocks), self.embedding(tokens))
        return self.head(self.norm(x))


class DecoderBlock(nn.Module):
    """A block that also attends to a context; the first owns the position bias that all use, as in T5."""

    def __init__(self, width: int, heads: int, *, cross: bool, owns_bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.cross = Attention(width, heads) if cross else None
        self.wide = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
        self.distances = nn.Embedding(8, heads) if owns_bias else None

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.distances is not None:
            places = torch.arange(x.shape[1])
            bias = self.distances((places[:, None] - places[None]).abs().clamp(max=7)).permute(2, 0, 1)[None]
        x = x + self.attention(self.norm(x), bias=bias)
        if self.cross is not None:
            x = x + self.cross(x, context)
        return x + self.wide(x), bias


class Stack(nn.Module):
    """Blocks of an encoder or a decoder."""

    def __init__(self, embedding: nn.Embedding, width: int, layers: int, *, cross: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(
            DecoderBlock(width, 2, cross=cross, owns_bias=number == 0) for number in range(layers)
        )

    def forward(self, tokens: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x, bias = self.embedding(tokens), None
        for block in self.blocks:
            x, bias = block(x, context=context, bias=bias)
        return x


class T5(nn.Module):
    """An encoder and a decoder with one embedding, which is also the head."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, width)
        self.encoder = Stack(self.shared, width, layers, cross=False)
        self.decoder = Stack(self.shared, width, layers, cross=True)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(tokens, self.encoder(tokens)))


class Convolutions(nn.Module):
    """A block of a CNN that changes its input in place, unless it is going to be computed again from it."""

    def __init__(self, channels: int, *, in_place: bool) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=in_place)
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(self.relu(x))) + x


class CNN(nn.Module):
    """Convolutions with batch norm; tokens become an image."""

    def __init__(self, channels: int = 6, layers: int = 3, recompute: Recompute | None = None) -> None:
        super().__init__()
        self.recompute = recompute or Recompute()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Convolutions(channels, in_place=recompute is None) for _ in range(layers))
        self.head = nn.Linear(channels, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.stem(tokens[:, None, None].expand(-1, -1, 4, -1) / VOCABULARY)
        x = self.recompute.chain(list(self.blocks), x)
        return self.head(x.mean(2).transpose(1, 2))


class Experts(nn.Module):
    """A block whose tokens go to one of several experts each; an expert without tokens is left out.

    With `every` it runs on none, and gets zeros as gradients.
    """

    def __init__(self, width: int, experts: int, *, every: bool) -> None:
        super().__init__()
        self.every = every
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (mine,) = torch.where(chosen == number)
            if len(mine) or self.every:
                mixed = mixed.index_add(0, mine, expert(flat[mine]) * weight[mine, None])
        return x + mixed.view_as(x)


class MoE(nn.Module):
    """A mixture of experts: ranks use different ones, and some nobody uses."""

    def __init__(self, width: int = 16, layers: int = 2, experts: int = 5, *, every: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Experts(width, experts, every=every) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :3])
        for block in self.blocks:
            x = block(x)
        return self.head(x).repeat_interleave(3, 1)[:, : tokens.shape[1]]


class Odd(nn.Module):
    """Parameters of several dtypes, a scalar, tiny and empty ones, an unused one, and one that rank 0 alone uses."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.wide = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(3, width).bfloat16())
        self.unused = nn.Parameter(torch.randn(7))
        self.mine = nn.Parameter(torch.randn(width))
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.scale + self.single + self.empty.sum() + self.wide.float()
        x = x + self.narrow.float().sum(0)
        return x * self.mine if self.rank == 0 else x


class Chain(nn.Module):
    """An embedding, modules one after another, and a head."""

    def __init__(self, *modules: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(modules)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM as a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Often(nn.Module):
    """Calls its block several times, in a row or side by side."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.block = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in a row":
            return self.block(self.block(x))
        left, right = self.block(x), self.block(2 * x)
        return left * right.tanh()


class Dropped(nn.Module):
    """A block that one rank leaves out: it gives its input."""

    def __init__(self, width: int, *, left_out: bool) -> None:
        super().__init__()
        self.left_out = left_out
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.left_out else torch.relu(self.linear(x))


class Dangling(Chain):
    """Runs a block whose output nobody uses."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width), width=width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        self.blocks[1](x)
        return self.head(self.blocks[2](x))
