"""Modules on which memfit and PyTorch's `SACEstimator` are compared, and both their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import sac_estimator as peer
from torch.utils._pytree import tree_leaves
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import memfit
from memfit.capture import Step, Trace
from memfit.compat import SACEstimator

BYTES_PER_MS = 1e9
"""The bandwidth both sides are given."""


class Perceptron(nn.Module):
    """In-place activations and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Convolutional(nn.Module):
    """Batch norm, pooling and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(torch.relu(x + self.body(x)))


class LlamaStack(nn.Module):
    """Two decoder layers of transformers' Llama."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, use_cache=False
        )
        config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, layer_idx=index) for index in range(2))
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary)
        return x


class GPT2Stack(nn.Module):
    """Two blocks of transformers' GPT-2, with dropout after attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(n_positions=16, n_embd=32, n_head=4, attn_pdrop=0.0, use_cache=False)
        config._attn_implementation = "sdpa"
        self.blocks = nn.ModuleList(GPT2Block(config, layer_idx=index) for index in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "perceptron": (Perceptron, lambda: torch.ones(8, 16)),
    "convolutional": (Convolutional, lambda: torch.ones(2, 3, 8, 8)),
    "llama": (LlamaStack, lambda: torch.ones(2, 16, 32)),
    "gpt2": (GPT2Stack, lambda: torch.ones(2, 16, 32)),
}


def _touched_bytes(tensor: torch.Tensor) -> int:
    """An expanded dimension counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


class Timer:
    """Runs an op and says how long its bytes take, in place of the prototype's roofline, which asks a GPU.

    It keeps all results: the prototype knows storages by addresses, which are used again once a storage is gone.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        out = func(*args, **(kwargs or {}))
        self.kept.append(out)
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
        return out, sum(map(_touched_bytes, tensors)) / BYTES_PER_MS


def ask_peer(build: Callable[[], nn.Module], batch: Callable[[], Any]) -> peer.SACEstimator:
    """The prototype's answer on fake CPU tensors."""
    estimator = peer.SACEstimator()
    timer = Timer()
    with FakeTensorMode():
        model = build()
        given = batch()
        with estimator("operator-level-cost-model"):
            estimator._estimate_runtime = timer
            output = model(given)
    del output
    return estimator


def mean_of(output: Any, _: Any) -> torch.Tensor:
    tensor = output if isinstance(output, torch.Tensor) else output.last_hidden_state
    return tensor.mean()


def captured(build: Callable[[], nn.Module], batch: Callable[[], Any]) -> Trace:
    return memfit.trace(Step(build(), batch(), loss=mean_of, optimizer=torch.optim.SGD), target="cpu")


def ask_memfit(build: Callable[[], nn.Module], batch: Callable[[], Any]) -> SACEstimator:
    """memfit's answer, with as much time for a byte."""
    trace = captured(build, batch)
    op_ms = np.array([op.read_bytes + op.written_bytes for op in trace.ops]) / BYTES_PER_MS
    return SACEstimator.of(trace, op_ms)


def theirs(estimator: peer.SACEstimator, what: str) -> dict[str, Any]:
    """One of the prototype's dictionaries, by paths without the model's class."""
    return {name.partition(".")[2]: value for name, value in getattr(estimator, what).items()}
