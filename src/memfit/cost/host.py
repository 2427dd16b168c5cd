"""What the host needs beside the kernels, measured on steps so small that it decides their time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from memfit.capture import Phase, Step, Trace, call_model, trace
from memfit.cost.runtime import Times
from memfit.hardware import Device, HostTimes

_REPEATS = 31
_CALLS = 2000
_LEAST_MS = 1e-5


class KernelTimes(Protocol):
    """Something that knows how long the kernels of a trace take."""

    def kernel_ms(self, trace: Trace) -> Times: ...


def measure_host(kernels: KernelTimes, device: Device) -> HostTimes:
    """The host's times: a view and a module call by themselves, an op by what is left of whole phases."""
    view_ms, call_ms = _view_ms(), _call_ms()
    spare_ms, counts = np.zeros(3), np.zeros(3)
    for step in tiny_steps():
        captured = trace(step, target=device)
        kernel = kernels.kernel_ms(captured) if device.type == "cpu" else np.zeros(len(captured.ops))
        measured = phases_ms(step, device.type)
        calls = sum(call.phase is not Phase.BACKWARD for call in captured.calls)
        spare_ms += measured
        spare_ms[0] -= calls * call_ms
        for op, op_ms in zip(captured.ops, kernel, strict=True):
            place = _PLACES[op.phase]
            spare_ms[place] -= view_ms if op.view else op_ms
            counts[place] += not op.view
    forward_ms, backward_ms, optimizer_ms = np.maximum(spare_ms / counts, _LEAST_MS).tolist()
    return HostTimes(
        forward_ms=forward_ms, backward_ms=backward_ms, optimizer_ms=optimizer_ms, view_ms=view_ms, call_ms=call_ms
    )


_PLACES = {Phase.FORWARD: 0, Phase.LOSS: 0, Phase.BACKWARD: 1, Phase.OPTIMIZER: 2}


def phases_ms(step: Step, device_type: str, repeats: int = _REPEATS) -> Times:
    """Medians of forward, backward and optimizer."""
    with torch.random.fork_rng(devices=[]):
        model = step.build_model().to(device_type)
        batch = tuple(each.to(device_type) for each in (step.batch if isinstance(step.batch, tuple) else (step.batch,)))
        optimizer = step.build_optimizer(model)
        assert optimizer is not None
        laps = []
        for _ in range(repeats):
            began = time.perf_counter()
            loss = call_model(model, batch)
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            del loss
            optimizer.step()
            optimizer.zero_grad()
            laps.append((forward - began, backward - forward, time.perf_counter() - backward))
            if device_type == "cuda":
                torch.cuda.synchronize()
    return np.median(np.array(laps[repeats // 4 :]), axis=0) * 1e3


def _view_ms() -> float:
    tensor = torch.zeros(4, 4, requires_grad=True)
    return _each_ms(lambda: tensor.transpose(0, 1))


def _call_ms() -> float:
    module, tensor = nn.Identity(), torch.zeros(1)
    return max(_LEAST_MS, _each_ms(lambda: module(tensor)) - _each_ms(lambda: module.forward(tensor)))


def _each_ms(function: Callable[[], object]) -> float:
    laps = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for _ in range(_CALLS // _REPEATS):
            function()
        laps.append((time.perf_counter() - began) / (_CALLS // _REPEATS))
    return statistics.median(laps) * 1e3


# -- Small training steps in plain torch that hold ops of every family: what calibration measures ---------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a reference step is."""

    batch: int
    length: int
    width: int
    layers: int = 3
    vocabulary: int = 1000

    @property
    def heads(self) -> int:
        return max(1, self.width // 32)


TINY = Size(batch=1, length=8, width=32, layers=4, vocabulary=64)
SIZES = (
    Size(batch=2, length=32, width=64),
    Size(batch=2, length=128, width=128),
    Size(batch=4, length=128, width=256),
    Size(batch=4, length=256, width=128),
    Size(batch=2, length=256, width=512, vocabulary=4000),
)


_EXPERTS, _CHOSEN = 4, 2


class Block(nn.Module):
    """A transformer block; `plain` spells attention and norm out, as many models do."""

    def __init__(self, size: Size, plain: bool, number: int) -> None:
        super().__init__()
        self.heads, self.plain, self.number = size.heads, plain, number
        self.first, self.second = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.scale = nn.Parameter(torch.ones(size.width))
        self.inner = nn.Linear(size.width, 3 * size.width, bias=not plain)
        self.outer = nn.Linear(size.width, size.width, bias=not plain)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.gate = nn.Linear(size.width, 4 * size.width) if plain else None
        self.down = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.outer(self.attend(self.norm(x, self.first), cosine, mask)))
        h = self.norm(x, self.second)
        h = F.gelu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + self.dropout(self.down(h))

    def norm(self, x: torch.Tensor, layer: nn.LayerNorm) -> torch.Tensor:
        if not self.plain:
            return layer(x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale

    def attend(self, x: torch.Tensor, cosine: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        split = (x.size(0), x.size(1), self.heads, -1)
        query, key, value = (part.view(split).transpose(1, 2) for part in self.inner(x).chunk(3, dim=-1))
        query = query * cosine + torch.cat((-key, query), dim=-1)[..., : query.size(-1)] * cosine
        if not self.plain:
            dropout = 0.1 if self.number % 3 == 1 else 0.0
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.number % 3 == 0, dropout_p=dropout)
        else:
            scores = query @ key.transpose(-1, -2) / key.size(-1) ** 0.5
            scores = self.dropout(scores.masked_fill(mask, -1e9).softmax(-1))
            mixed = scores @ value
        return mixed.transpose(1, 2).reshape(x.shape)


class Language(nn.Module):
    """Embedding, blocks, head and cross entropy."""

    def __init__(self, size: Size, plain: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size, plain, number) for number in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        angles = torch.outer(torch.arange(size.length).float(), torch.rand(size.width // size.heads))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("mask", torch.ones(size.length, size.length).triu(1).bool(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class Experts(nn.Module):
    """A mixture of experts: tokens are sorted by expert, multiplied in groups, and put back in their order."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, _EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(_EXPERTS, size.width, 6 * size.width) / size.width**0.5)
        self.down = nn.Parameter(torch.randn(_EXPERTS, 3 * size.width, size.width) / size.width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(_CHOSEN, dim=-1)
        expert, order = chosen.flatten().sort()
        ends = torch.histc(expert.float(), bins=_EXPERTS, min=0, max=_EXPERTS - 1).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x[order // _CHOSEN], self.up, offs=ends).chunk(2, dim=-1)
        mixed = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        mixed = mixed * weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        return x + mixed[back].view(len(x), _CHOSEN, -1).sum(1)


class Routed(nn.Module):
    """Embedding, mixtures of experts, head and cross entropy."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Experts(size) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens.flatten())
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), tokens.flatten())


class Image(nn.Module):
    """Convolutions with the usual norms and activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 1),
            nn.Sigmoid(),
            nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1, groups=2 * width),
            nn.Upsample(scale_factor=2),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(image).flatten(1)), label)


class Recurrent(nn.Module):
    """A recurrent network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.recurrent(x)[0][:, -1]), label)


def language_step(
    size: Size, *, plain: bool, autocast: torch.dtype | None = None, dtype: torch.dtype = torch.float32
) -> Step:
    """A language model's step with AdamW, in bf16 where autocast or the parameters' dtype say so."""
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.length))
    return Step(
        Language(size, plain).to(dtype), tokens, optimizer=partial(torch.optim.AdamW, lr=1e-4), autocast=autocast
    )


def routed_step(size: Size, dtype: torch.dtype = torch.float32) -> Step:
    """The step of a mixture of experts with AdamW."""
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.length))
    return Step(Routed(size).to(dtype), tokens, optimizer=partial(torch.optim.AdamW, lr=1e-4))


def image_step(width: int, side: int) -> Step:
    """A convolutional network's step with SGD."""
    batch = (torch.randn(4, 3, side, side), torch.randint(0, 10, (4,)))
    return Step(Image(width), batch, optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9))


def sequence_step(width: int, length: int) -> Step:
    """A recurrent network's step with Adam."""
    batch = (torch.randn(8, length, width), torch.randint(0, 10, (8,)))
    return Step(Recurrent(width), batch, optimizer=partial(torch.optim.Adam, lr=1e-4))


def reference_steps() -> Iterator[tuple[str, Step]]:
    """The steps whose ops calibration measures."""
    for size in SIZES:
        name = f"{size.batch} x {size.length} x {size.width}"
        yield f"language model, {name}", language_step(size, plain=False)
        yield f"spelt out, {name}", language_step(size, plain=True)
    yield "bf16 language model", language_step(SIZES[1], plain=False, autocast=torch.bfloat16)
    yield "bf16 language model", language_step(SIZES[2], plain=True, autocast=torch.bfloat16)
    for size, plain in product(SIZES[1:4], (False, True)):
        name = f"{size.batch} x {size.length} x {size.width}"
        yield f"language model in bf16, {name}", language_step(size, plain=plain, dtype=torch.bfloat16)
    for size, dtype in product(SIZES[1:4], (torch.float32, torch.bfloat16)):
        name = f"{size.batch} x {size.length} x {size.width}"
        yield f"experts in {str(dtype).removeprefix('torch.')}, {name}", routed_step(size, dtype)
    for width, side in ((16, 16), (32, 32), (64, 32)):
        yield f"images, {width} x {side}", image_step(width, side)
    for width, length in ((32, 16), (128, 64)):
        yield f"recurrent, {width} x {length}", sequence_step(width, length)


def tiny_steps() -> Iterator[Step]:
    """Steps so small that the host decides their time."""
    yield language_step(TINY, plain=False)
    yield language_step(TINY, plain=True)
    yield image_step(8, 8)
