"""torchtitan's llama3 as its own code parallelizes it, and the same model plain, for the planner."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from memfit import Step, spec
from memfit.sharding import ShardOptions


def job(
    flavor: str = "debugmodel",
    *,
    checkpointing: str = "none",
    tensor_parallel: int = 1,
    batch: int = 2,
    length: int = 128,
) -> JobConfig:
    """A configuration of llama3; `checkpointing` is none, full, op (selective), or a number: every so many layers."""
    config = JobConfig()
    config.model.name, config.model.flavor = "llama3", flavor
    config.training.local_batch_size, config.training.seq_len = batch, length
    config.parallelism.tensor_parallel_degree = tensor_parallel
    if checkpointing in ("none", "full"):
        config.activation_checkpoint.mode = checkpointing
    else:
        config.activation_checkpoint.mode = "selective"
        config.activation_checkpoint.selective_ac_option = checkpointing
    return config


class Headed(nn.Module):
    """torchtitan's Transformer with norm and output in a module of their own, which FSDP2 is given as one unit."""

    def __init__(self, args: TransformerModelArgs) -> None:
        super().__init__()
        model = Transformer(args)
        self.tok_embeddings, self.layers = model.tok_embeddings, model.layers
        self.head = nn.Sequential(model.norm, model.output)
        self.register_buffer("freqs_cis", model.freqs_cis, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis, attention_masks=None, positions=None)
        return self.head(h)


def plain_step(config: JobConfig, args: TransformerModelArgs) -> Step:
    """A configuration's step without its parallelize function; parameters are in bfloat16, as FSDP2 gathers them."""
    args = copy.deepcopy(args)
    args.update_from_config(config)

    def build() -> nn.Module:
        model = Headed(args)
        for parameter in model.parameters():  # not the buffer, which is complex
            parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """What torchtitan's trainer does with one micro-batch."""
        tokens, labels = batch
        optimizer.zero_grad()
        pred = model(tokens)
        loss = cross_entropy_loss(pred, labels) / float(labels.numel())
        del pred
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm, foreach=True)
        optimizer.step()

    shape = (config.training.local_batch_size, config.training.seq_len)
    optimizer = partial(torch.optim.AdamW, lr=8e-4, fused=config.optimizer.implementation == "fused")
    return Step(build, (spec(shape, torch.int64), spec(shape, torch.int64)), optimizer=optimizer, run=run)


def shard_options(layers: int) -> ShardOptions:
    """How torchtitan's `apply_fsdp` wraps llama3, in the planner's words."""
    return ShardOptions(
        shard_dtype="float32",
        param_dtype="bfloat16",
        reduce_dtype="float32",
        keep_last=True,
        units=("tok_embeddings", *(f"layers.{number}" for number in range(layers)), "head"),
    )
