"""The GPT that is trained, and the ways to train it on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from memfit.sharded import Precision, shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and its batch."""

    name: str
    width: int
    layers: int
    vocabulary: int
    batch: int
    length: int
    half: bool = False


SIZES = (
    Size(name="26 M parameters", width=512, layers=8, vocabulary=1024, batch=2, length=256),
    Size(name="57 M parameters", width=768, layers=8, vocabulary=512, batch=1, length=256),
    Size(name="6 M parameters, bfloat16", width=256, layers=8, vocabulary=512, batch=1, length=32, half=True),
)
KINDS = ("DDP", "FSDP2", "FSDP2 kept", "memfit", "memfit kept")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def trained(size: Size, kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    """A model on this rank, its optimizer, and what runs one step and gives the loss."""
    torch.manual_seed(0)
    model: nn.Module = GPT(size)
    dtype = torch.bfloat16 if size.half else None
    if kind.startswith("FSDP2"):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if size.half else None)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, reshard_after_forward=kind == "FSDP2")
        fully_shard(model, mp_policy=policy)  # the root is kept, by default as by memfit
    elif kind.startswith("memfit"):
        shard(model, keep=kind == "memfit kept", precision=Precision(param_dtype=dtype))
    elif kind == "DDP":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(torch.distributed.get_rank())
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.length))

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=size.half and kind == "DDP"):
            output = model(tokens)
        loss = F.cross_entropy(output.float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, optimizer, step
