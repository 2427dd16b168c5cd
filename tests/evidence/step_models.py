"""The models of published training runs, as their sources wrote them, in plain torch.

llm-foundry's table is of torch 1.13 and the first FlashAttention ("TODO: Update tables with torch 2.0" stands beside
it), about half as fast as the second: MPT has the memory-efficient backend here, which is about as fast. torchtitan's
figures have cuDNN's attention off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memfit import Step, spec

Checkpointing = Literal["none", "full", "every second", "selective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a language model."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    head: int | None = None
    fused_norm: bool = False
    tied: bool = False
    gated: bool = True

    @property
    def head_width(self) -> int:
        return self.head or self.width // self.heads


def mpt(layers: int, width: int, heads: int) -> Shape:
    """llm-foundry's MPT: layer norm, learned positions, one product for queries, keys and values, no biases."""
    return Shape(
        layers=layers, width=width, heads=heads, key_value_heads=heads, feed_forward=4 * width, vocabulary=50368,
        fused_norm=True, tied=True, gated=False,
    )  # fmt: skip


def llama(layers: int, width: int, heads: int, keys: int, feed_forward: int, vocabulary: int, **kw: Any) -> Shape:
    """torchtitan's Llama."""
    return Shape(
        layers=layers, width=width, heads=heads, key_value_heads=keys, feed_forward=feed_forward,
        vocabulary=vocabulary, **kw,
    )  # fmt: skip


SHAPES = {
    "MPT 125m": mpt(12, 768, 12),
    "MPT 350m": mpt(24, 1024, 16),
    "MPT 760m": mpt(24, 1536, 12),
    "MPT 1b": mpt(24, 2048, 16),
    "MPT 3b": mpt(32, 2560, 20),
    "MPT 7b": mpt(32, 4096, 32),
    "MPT 13b": mpt(40, 5120, 40),
    "MPT 30b": mpt(48, 7168, 56),
    "MPT 70b": mpt(80, 8192, 64),
    "Llama 2 7B": llama(32, 4096, 32, 32, 11008, 32000),
    "Llama 2 13B": llama(40, 5120, 40, 40, 13824, 32000),
    "Llama 2 70B": llama(80, 8192, 64, 8, 28672, 32000),
    "Llama 3 8B": llama(32, 4096, 32, 8, 14336, 128256),
    "Llama 3 70B": llama(80, 8192, 64, 8, 28672, 128256),
    "Llama 3.2 3B": llama(28, 3072, 24, 8, 8192, 128256, tied=True),
    "Qwen3 32B": llama(64, 5120, 64, 8, 25600, 151936, head=128, fused_norm=True),
}


class RMSNorm(nn.Module):
    """torchtitan's own: float32 inside, spelt out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


class FusedRMSNorm(RMSNorm):
    """One kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-5)


def norm(shape: Shape) -> nn.Module:
    if not shape.gated:
        return nn.LayerNorm(shape.width, bias=False)
    return FusedRMSNorm(shape.width) if shape.fused_norm else RMSNorm(shape.width)


class Block(nn.Module):
    """Attention and feed-forward, as MPT or as Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inner, keys = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
        linear = partial(nn.Linear, bias=False)
        self.norms = nn.ModuleList([norm(shape), norm(shape)])
        if shape.gated:
            self.query = linear(shape.width, inner)
            self.key, self.value = linear(shape.width, keys), linear(shape.width, keys)
            self.gate = linear(shape.width, shape.feed_forward)
        else:
            self.joined = linear(shape.width, 3 * inner)
        self.output = linear(inner, shape.width)
        self.up, self.down = linear(shape.width, shape.feed_forward), linear(shape.feed_forward, shape.width)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norms[0](x), rotary)
        h = self.norms[1](x)
        h = F.silu(self.gate(h)) * self.up(h) if self.shape.gated else F.gelu(self.up(h))
        return x + self.down(h)

    def attend(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.shape.head_width)
        if self.shape.gated:
            query, key, value = (part(x).view(split) for part in (self.query, self.key, self.value))
            query, key = rotate(query, rotary), rotate(key, rotary)
            times = self.shape.heads // self.shape.key_value_heads
            if times > 1:
                key, value = (repeat(each, times) for each in (key, value))
        else:
            query, key, value = (part.view(split) for part in self.joined(x).chunk(3, dim=-1))
        backend = SDPBackend.FLASH_ATTENTION if self.shape.gated else SDPBackend.EFFICIENT_ATTENTION
        with sdpa_kernel(backend):
            mixed = F.scaled_dot_product_attention(
                *(each.transpose(1, 2) for each in (query, key, value)), is_causal=True
            )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """torchtitan's rotary embedding, with complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotary.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def repeat(x: torch.Tensor, times: int) -> torch.Tensor:
    """Keys or values for every query head."""
    batch, length, heads, width = x.shape
    return x[:, :, :, None, :].expand(batch, length, heads, times, width).reshape(batch, length, heads * times, width)


class Language(nn.Module):
    """The whole model."""

    def __init__(self, shape: Shape, length: int, checkpointing: Checkpointing, wide_logits: bool) -> None:
        super().__init__()
        self.shape, self.checkpointing, self.wide_logits = shape, checkpointing, wide_logits
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.gated else nn.Embedding(length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        rotary = self.rotary
        for number, block in enumerate(self.blocks):
            if self.checkpointing == "none" or (self.checkpointing == "every second" and number % 2):
                x = block(x, rotary)
            elif self.checkpointing == "selective":
                x = checkpoint(block, x, rotary, use_reentrant=False, context_fn=selective)
            else:
                x = checkpoint(block, x, rotary, use_reentrant=False)
        logits = self.head(self.norm(x))
        return logits.float() if self.wide_logits else logits


def selective() -> Any:
    """torchtitan's policy: keep attention and every second product."""
    seen = {"forward": 0, "recompute": 0}
    kept = {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            mode = "recompute" if context.is_recompute else "forward"
            seen[mode] += 1
            return CheckpointPolicy.PREFER_RECOMPUTE if seen[mode] % 2 == 0 else CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def training_step(
    shape: Shape, *, layers: int, batch: int, length: int, checkpointing: Checkpointing, wide_logits: bool,
    optimizer: Callable[..., torch.optim.Optimizer],
) -> Step:  # fmt: skip
    """A step of the model with so many of its layers; nothing is allocated."""

    def build() -> nn.Module:
        model = Language(replace(shape, layers=layers), length, checkpointing, wide_logits).to(torch.bfloat16)
        rotary = torch.zeros(length, shape.head_width // 2, dtype=torch.complex64)
        model.register_buffer("rotary", rotary, persistent=False)
        return model

    tokens = spec((batch, length), torch.int64)
    return Step(build, tokens, loss=next_token_loss, optimizer=optimizer)
