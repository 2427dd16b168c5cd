"""torchtitan's Llama and Qwen3, in its order of modules, parameters and ops.

Reserved bytes depend on the order in which blocks are asked for: half a GiB of activations that finds no small block
takes a piece out of a block of logits, and these need a new one. So these models follow their source line by line where
`step_models.py`, which is for times, does not: `torchtitan/models/llama/model.py` of 2024 to 2025 (BSD-3-Clause).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel

from memfit import Step, spec
from tests.evidence.step_models import Checkpointing, Shape, selective

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
linear = partial(nn.Linear, bias=False)


class RMSNorm(nn.Module):
    """The one that torchtitan had until March 2025."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


def build_norm(shape: Shape, dim: int | None = None) -> nn.Module:
    dim = dim or shape.width
    return nn.RMSNorm(dim, eps=1e-5) if shape.fused_norm else RMSNorm(dim)


def apply_rotary_emb(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate with complex numbers, as Llama does."""
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis[: xq.shape[1]].view(1, xq.shape[1], 1, -1)
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def rotate_halves(xq: torch.Tensor, xk: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate with cosines and sines, as Qwen3 does."""
    width = xq.shape[-1]
    cache = cache[: xq.shape[1]].view(-1, xq.shape[1], 1, 2 * width)
    cos, sin = cache[..., :width].to(xq.dtype), cache[..., width:].to(xq.dtype)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)

    xq_out = (xq * cos) + (turned(xq) * sin)
    xk_out = (xk * cos) + (turned(xk) * sin)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x: torch.Tensor, n_rep: int) -> torch.Tensor:
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    return (
        torch.unsqueeze(x, dim=3)
        .expand(bs, slen, n_kv_heads, n_rep, head_dim)
        .reshape(bs, slen, n_kv_heads * n_rep, head_dim)
    )


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.qk_norm = shape.head is not None
        inner, keys = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
        if self.qk_norm:  # Qwen3
            self.q_norm, self.k_norm = build_norm(shape, shape.head_width), build_norm(shape, shape.head_width)
        self.wq = linear(shape.width, inner)
        self.wk, self.wv = linear(shape.width, keys), linear(shape.width, keys)
        self.wo = linear(inner, shape.width)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        bs, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bs, seqlen, -1, self.shape.head_width)
        xk = xk.view(bs, seqlen, -1, self.shape.head_width)
        xv = xv.view(bs, seqlen, -1, self.shape.head_width)
        if self.qk_norm:
            xq, xk = self.q_norm(xq), self.k_norm(xk)
            xq, xk = rotate_halves(xq, xk, freqs_cis)
        else:
            xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        times = self.shape.heads // self.shape.key_value_heads
        keys, values = repeat_kv(xk, times), repeat_kv(xv, times)
        xq, xk, xv = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        output = output.transpose(1, 2).contiguous()
        output = output.view(bs, seqlen, -1)
        return self.wo(output)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = linear(shape.width, shape.feed_forward)
        self.w2 = linear(shape.feed_forward, shape.width)
        self.w3 = linear(shape.width, shape.feed_forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        self.attention_norm, self.ffn_norm = build_norm(shape), build_norm(shape)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """The whole model; with `float_output` it returns float32 logits, as it did until the end of 2024."""

    def __init__(self, shape: Shape, length: int, *, float_output: bool) -> None:
        super().__init__()
        self.float_output = float_output
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        if shape.head is None:
            freqs_cis = torch.zeros(length, shape.head_width // 2, dtype=torch.complex64)
        else:
            freqs_cis = torch.zeros(length, 2 * shape.head_width, dtype=torch.float32)
        self.register_buffer("freqs_cis", freqs_cis, persistent=False)
        self.layers = nn.ModuleDict({str(number): TransformerBlock(shape) for number in range(shape.layers)})
        self.norm = build_norm(shape)
        self.output = linear(shape.width, shape.vocabulary)
        if shape.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        h = self.norm(h)
        output = self.output(h)
        return output.float() if self.float_output else output


def apply_ac(model: Transformer, checkpointing: Checkpointing) -> None:
    """torchtitan's activation checkpointing, with torch's own wrapper."""
    for number, (name, block) in enumerate(list(model.layers.named_children()), start=1):
        if checkpointing == "none" or (checkpointing == "every second" and number % 2):
            continue
        options: dict[str, Any] = {"context_fn": selective} if checkpointing == "selective" else {}
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False, **options))


def cross_entropy_loss(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))


def chunked_cross_entropy_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """torchtitan's, March 2025: eight chunks of the sequence, one after another."""
    chunks = 8
    labels_chunks = list(labels.chunk(chunks, dim=1))
    logits_chunks = list(logits.chunk(chunks, dim=1))
    total: Any = 0.0
    for logits_chunk, labels_chunk in zip(logits_chunks, labels_chunks, strict=True):
        total += cross_entropy_loss(logits_chunk, labels_chunk)
    return total / chunks


def titan_step(
    shape: Shape,
    *,
    batch: int,
    length: int,
    checkpointing: Checkpointing,
    optimizer: Callable[..., torch.optim.Optimizer],
    loss: Loss = cross_entropy_loss,
    float_output: bool = False,
    keep_output: bool = False,
    layers: int | None = None,
) -> Step:
    """A step of torchtitan's trainer, `zero_grad` first and gradients clipped; nothing is allocated."""

    def build() -> nn.Module:
        sized = replace(shape, layers=layers or shape.layers)
        model = Transformer(sized, length, float_output=float_output)
        apply_ac(model, checkpointing)
        cast: dict[int, nn.Parameter] = {}
        for module in model.modules():  # parameters alone: the rotary buffer stays as it is
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    made = cast.setdefault(id(parameter), nn.Parameter(parameter.to(torch.bfloat16)))
                    module._parameters[name] = made
        return model

    return Step(
        build, spec((batch, length), torch.int64), loss=loss, optimizer=optimizer, clip_grad_norm=1.0,
        zero_grad="before_forward", keep_output=keep_output,
    )  # fmt: skip
