"""How named steps train: with the defaults of torchtitan (its job_config.py, 2025).

Parameters and AdamW's state in float32, compute in bfloat16, AdamW's fused step, gradients clipped to a norm of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.capture import Step
from memfit.presets.errors import WrongRequest
from memfit.presets.parallel_model import ContextParallel, ParallelModel, Pipeline, TensorParallel

ADAMW = partial(torch.optim.AdamW, lr=8e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
BATCH = 1
NO_BATCH = "one sample since no --batch was given"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStep:
    """A step with what it is, in words, and what was chosen because nothing was given."""

    step: Step
    title: str
    notes: tuple[str, ...] = ()


def training_step(
    model: Callable[[], nn.Module],
    batch: Mapping[str, torch.Tensor],
    *,
    tensor_parallel: TensorParallel | None = None,
    no_tensor_parallel: str = "",
    pipeline: Pipeline | None = None,
    context_parallel: ContextParallel | None = None,
) -> Step:
    """Return the training step of a model that computes its own loss, on one rank or on a mesh."""
    built = ParallelModel(
        build=model,
        tensor_parallel=tensor_parallel,
        no_tensor_parallel=no_tensor_parallel,
        pipeline=pipeline,
        context_parallel=context_parallel,
        compute=torch.bfloat16,
    )
    return Step(built, batch, optimizer=ADAMW, autocast=torch.bfloat16, clip_grad_norm=1.0)


def resolve_count(name: str, value: Any, default: int) -> int:
    """Return a whole number of at least 1, or the default."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WrongRequest(f"{name} (--{name}) is {value!r}; write a whole number of at least 1")
    return value


def display_count(number: int) -> str:
    """Return a number of parameters in words."""
    return f"{number / 1e9:.3g} billion" if number >= 999.5e6 else f"{number / 1e6:.3g} million"
