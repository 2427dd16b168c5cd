"""How a shape is trained: as torchtitan does, with what it takes for defaults (its job_config.py, 2025).

Parameters and AdamW's state in float32, compute in bfloat16, AdamW's fused step, gradients clipped to a norm of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.capture import Step, spec
from memfit.presets.models.bert import BERT, BERTSizes
from memfit.presets.models.gpt2 import GPT2, GPT2Sizes
from memfit.presets.models.llama import Llama, LlamaSizes
from memfit.presets.models.mixtral import Mixtral, MixtralSizes
from memfit.presets.models.vit import ViT, ViTSizes
from memfit.presets.problems import NotTaken, WrongRequest
from memfit.presets.shape import Shape

ADAMW = partial(torch.optim.AdamW, lr=8e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
BATCH = 1
NO_BATCH = "one sample since no --batch was given"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStep:
    """A step with what it is, in words, and what was chosen because nothing was given."""

    step: Step
    title: str
    notes: tuple[str, ...] = ()


def trained(model: Callable[[], nn.Module], batch: Mapping[str, torch.Tensor]) -> Step:
    """The training step of a model that computes its own loss."""
    return Step(model, batch, optimizer=ADAMW, autocast=torch.bfloat16, clip_grad_norm=1.0)


def shape_step(shape: Shape, *, batch: int | None = None, seq: int | None = None) -> NamedStep:
    """The training step of a shape: one sample unless given, sequences as long as the shape's own."""
    size = resolve_count("batch", batch, BATCH)
    described = f"{shape.title}, {_counted(shape.parameters)} parameters"
    notes = [NO_BATCH] if batch is None else []
    if isinstance(shape.sizes, ViTSizes):
        images = f"{shape.sizes.image} x {shape.sizes.image}"
        if seq is not None:
            raise NotTaken(
                f"seq={seq} (--seq) makes no sense for {shape.name}, which takes images of {images}", "leave it out"
            )
        pixels = spec((size, shape.sizes.channels, shape.sizes.image, shape.sizes.image))
        step = trained(partial(ViT, shape.sizes), {"images": pixels, "labels": spec((size,), torch.int64)})
        return NamedStep(step=step, title=f"{described}, batch {size}, images of {images}", notes=tuple(notes))
    length = resolve_count("seq", seq, shape.seq)
    if shape.longest and length > shape.longest:
        raise WrongRequest(
            f"seq={length} (--seq) is more than {shape.name} has positions for; give at most {shape.longest}"
        )
    if seq is None:
        notes.append("that long since no --seq was given")
    tokens = {name: spec((size, length), torch.int64) for name in ("tokens", "labels")}
    step = trained(_language_model(shape.sizes, length), tokens)
    return NamedStep(step=step, title=f"{described}, batch {size}, sequences of {length}", notes=tuple(notes))


def resolve_count(name: str, value: Any, default: int) -> int:
    """A whole number of at least 1, or the default."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WrongRequest(f"{name} (--{name}) is {value!r}; write a whole number of at least 1")
    return value


def _counted(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _language_model(sizes: LlamaSizes | GPT2Sizes | BERTSizes, length: int) -> Callable[[], nn.Module]:
    if isinstance(sizes, MixtralSizes):
        return partial(Mixtral, sizes, length)
    if isinstance(sizes, LlamaSizes):
        return partial(Llama, sizes, length)
    return partial(GPT2, sizes) if isinstance(sizes, GPT2Sizes) else partial(BERT, sizes)
