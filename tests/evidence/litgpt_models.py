"""litgpt's GPT with LoRA on queries and values or with adapters, as it was when its resource table was measured.

Lightning-AI/litgpt @8641822 (Apache-2.0): `lit_gpt/model.py`, `lora.py`, `adapter.py`, `adapter_v2.py` and scripts
in `finetune/`. Parameters are in bfloat16, the rotary cache is float32, logits come in chunks of 128 positions, which
Fabric casts to float32. An adapter is a prompt of ten positions, from the third block on, to which queries attend by
themselves; in its second version every product has a scale and a bias, and norms are trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from memfit import Step, spec

RANK = 8
SCALING = 16 / RANK
DROPOUT = 0.05
CHUNK = 128
PROMPT, FIRST_PROMPTED = 10, 2
Tuning = Literal["lora", "adapter", "adapter v2"]
TRAINED: dict[Tuning, tuple[str, ...]] = {
    "lora": ("lora_",),
    "adapter": ("adapter_", "gating_factor"),
    "adapter v2": ("adapter_", "gating_factor", "norm_", "ln_f"),
}
"""What the names of trained parameters begin with, or have in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """What differs between the models of the table."""

    layers: int
    width: int
    vocabulary: int
    rotary: float
    shared_norm: bool = False
    head_bias: bool = False
    approximate: str = "none"
    heads: int = 32

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def rotated(self) -> int:
        return int(self.rotary * self.head_width)


SHAPES = {
    "phi1.5": GPTShape(
        layers=24, width=2048, vocabulary=51200, rotary=0.5, shared_norm=True, head_bias=True, approximate="tanh"
    ),
    "stablelm3b": GPTShape(layers=16, width=4096, vocabulary=50688, rotary=0.25),
}


class LoRAQKVLinear(nn.Module):
    """One product for queries, keys and values, with LoRA on queries and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, 3 * width)
        self.lora_A = nn.Parameter(torch.zeros(2 * RANK, width))
        self.lora_B = nn.Parameter(torch.zeros(2 * width, RANK))
        self.lora_dropout = nn.Dropout(DROPOUT)

    def zero_pad(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        result = x.new_zeros((*x.shape[:-1], 3 * self.width))
        result = result.view(-1, 3 * self.width)
        indices = torch.empty(2 * self.width, dtype=torch.int64, device=result.device)
        result = result.index_copy(1, indices, x.reshape(-1, 2 * self.width))
        return result.view((*x.shape[:-1], 3 * self.width)).transpose(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pretrained = self.linear(x)
        after_a = F.linear(self.lora_dropout(x), self.lora_A)
        after_b = F.conv1d(after_a.transpose(-2, -1), self.lora_B.unsqueeze(-1), groups=2).transpose(-2, -1)
        lora = self.zero_pad(after_b) * SCALING
        return pretrained + lora


class ScaledLinear(nn.Module):
    """A product whose result has a bias and a scale of its own."""

    def __init__(self, inner: int, outer: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer, bias=bias)
        self.adapter_bias = nn.Parameter(torch.zeros(outer))
        self.adapter_scale = nn.Parameter(torch.ones(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter_scale * (self.linear(x) + self.adapter_bias)


def linear(tuning: Tuning, inner: int, outer: int, *, bias: bool = True) -> nn.Module:
    return (ScaledLinear if tuning == "adapter v2" else nn.Linear)(inner, outer, bias=bias)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.size(-1) // 2
    x1 = x[..., :half]
    x2 = x[..., half:]
    rotated = torch.cat((-x2, x1), dim=-1)
    roped = (x * cos) + (rotated * sin)
    return roped.type_as(x)


class CausalSelfAttention(nn.Module):
    def __init__(self, shape: GPTShape, tuning: Tuning, number: int) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.attn = LoRAQKVLinear(width) if tuning == "lora" else linear(tuning, width, 3 * width)
        self.proj = linear(tuning, width, width)
        self.prompted = tuning != "lora" and number >= FIRST_PROMPTED
        if self.prompted:
            self.adapter_wte = nn.Embedding(PROMPT, width)
            self.gating_factor = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        heads, head, rotated = self.shape.heads, self.shape.head_width, self.shape.rotated
        qkv = self.attn(x)
        qkv = qkv.view(batch, length, heads, 3, head)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((1, 1, 1), dim=2)
        q = q.reshape(batch, -1, length, head)
        k = k.reshape(batch, -1, length, head)
        v = v.reshape(batch, -1, length, head)
        q_roped = apply_rope(q[..., :rotated], cos, sin)
        k_roped = apply_rope(k[..., :rotated], cos, sin)
        q = torch.cat((q_roped, q[..., rotated:]), dim=-1)
        k = torch.cat((k_roped, k[..., rotated:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, scale=head**-0.5, is_causal=True).transpose(1, 2)
        if self.prompted:
            y = y + self.gating_factor * self._of_prompt(q)
        return self.proj(y.reshape(batch, length, width))

    def _of_prompt(self, q: torch.Tensor) -> torch.Tensor:
        heads, head = self.shape.heads, self.shape.head_width
        qkv = self.attn(self.adapter_wte.weight.reshape(1, PROMPT, -1))
        qkv = qkv.view(1, PROMPT, heads, 3, head).permute(0, 2, 3, 1, 4)
        _, k, v = qkv.split((1, 1, 1), dim=2)
        k, v = (each.reshape(1, -1, PROMPT, head) for each in (k, v))
        mask = torch.ones(q.size(2), PROMPT, dtype=torch.bool, device=q.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, scale=head**-0.5)
        return y.transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, shape: GPTShape, tuning: Tuning) -> None:
        super().__init__()
        self.fc = linear(tuning, shape.width, 4 * shape.width)
        self.proj = linear(tuning, 4 * shape.width, shape.width)
        self.approximate = shape.approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        x = F.gelu(x, approximate=self.approximate)
        return self.proj(x)


class Block(nn.Module):
    """Attention and feed-forward beside one another."""

    def __init__(self, shape: GPTShape, tuning: Tuning, number: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attn = CausalSelfAttention(shape, tuning, number)
        self.norm_2 = None if shape.shared_norm else nn.LayerNorm(shape.width)
        self.mlp = MLP(shape, tuning)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        n_1 = self.norm_1(x)
        h = self.attn(n_1, cos, sin)
        n_2 = n_1 if self.norm_2 is None else self.norm_2(x)
        return x + h + self.mlp(n_2)


class GPT(nn.Module):
    """The whole model; with `wide_logits` its output is cast as Fabric does."""

    def __init__(self, shape: GPTShape, length: int, *, tuning: Tuning, wide_logits: bool) -> None:
        super().__init__()
        self.wide_logits = wide_logits
        self.lm_head = linear(tuning, shape.width, shape.vocabulary, bias=shape.head_bias)
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.h = nn.ModuleList(Block(shape, tuning, number) for number in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.to(torch.bfloat16)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(length, shape.rotated), persistent=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = any(each in name for each in TRAINED[tuning])

    def forward(self, idx: torch.Tensor) -> list[torch.Tensor]:
        x = self.wte(idx)
        for block in self.h:
            x = block(x, self.cos, self.sin)
        x = self.ln_f(x)
        logits = [self.lm_head(part) for part in x.split(CHUNK, dim=1)]
        return [each.float() for each in logits] if self.wide_logits else logits


def chunked_cross_entropy(logits: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """litgpt's loss; the last position has no target."""
    logits[-1] = logits[-1][..., :-1, :]
    targets = tokens[..., 1:]
    logit_chunks = [each.reshape(-1, each.size(-1)) for each in logits]
    target_chunks = [each.reshape(-1) for each in targets.split(logits[0].size(1), dim=1)]
    losses = [
        F.cross_entropy(logit, target, ignore_index=-1, reduction="none")
        for logit, target in zip(logit_chunks, target_chunks, strict=True)
    ]
    return torch.cat(losses).mean()


def litgpt_step(name: str, *, batch: int, length: int, wide_logits: bool = True) -> Step:
    """Two micro-batches and an optimizer step of the script; `name` is a model, and how it is tuned if not by LoRA."""
    model, _, method = name.partition(" ")
    shape: Any = SHAPES[model]
    tuning: Any = method or "lora"
    return Step(
        lambda: GPT(shape, length, tuning=tuning, wide_logits=wide_logits),
        spec((batch, length), torch.int64),
        loss=chunked_cross_entropy,
        optimizer=torch.optim.AdamW,
        accumulation_steps=2,
    )
