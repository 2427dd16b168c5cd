"""The built-in decoders as stages of a pipeline: `pp` of a mesh, run by PyTorch's 1F1B schedule, one sample at a time.

A rank holds as many layers as the others, the first also the embedding, the last the norm, the head and the loss. The
stages between are like the first without the embedding, so the first and the last say what a pipeline needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from memfit.errors import InputError
from memfit.presets.context_parallel import divided

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from memfit.presets.models.llama import Llama


class LlamaStage(nn.Module):
    """The part of a decoder that one rank of a pipeline holds, and the schedule that runs it."""

    schedule: Schedule1F1B | None = None
    """Made in the first step, which knows the batch."""

    def __init__(self, whole: Llama, mesh: DeviceMesh) -> None:
        super().__init__()
        index, count, layers = mesh.get_local_rank(), mesh.size(), len(whole.layers)
        if layers % count:
            raise InputError(f"pp {count}: {layers} layers cannot be divided by {count}")
        self.first, self.last, self.mesh = index == 0, index == count - 1, mesh
        each = layers // count
        self.embedding = whole.embedding if self.first else None
        self.layers = nn.ModuleList(list(whole.layers)[index * each : (index + 1) * each])
        self.norm, self.head = (whole.norm, whole.head) if self.last else (None, None)
        self.loss = whole.loss
        self.register_buffer("cosine", whole.cosine, persistent=False)
        self.register_buffer("sine", whole.sine, persistent=False)
        if self.first and self.last:
            raise InputError("a pipeline of one stage is the model itself")
        if whole.head.weight is whole.embedding.weight:
            raise InputError(f"pp {count}: the head's weight is the embedding's, and they are on different ranks")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, (self.cosine, self.sine))
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def _schedule(stage: LlamaStage, samples: int) -> Schedule1F1B:
    """Return the schedule of a stage: every sample is a micro-batch."""
    pipe = stage.mesh
    if samples < pipe.size():
        raise InputError(f"pp {pipe.size()}: a batch of {samples} has fewer micro-batches than there are stages")
    made = PipelineStage(
        stage, pipe.get_local_rank(), pipe.size(), torch.device(pipe.device_type), group=pipe.get_group()
    )
    return Schedule1F1B(made, samples, loss_fn=stage.loss)


def run_stage(
    model: LlamaStage,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    compute: torch.dtype | None = None,
    largest_norm: float | None = None,
) -> None:
    """Run one step of a pipeline; gradients are clipped by the norm of all stages' together."""
    if model.schedule is None:
        model.schedule = _schedule(model, batch["tokens"].shape[0])
    autocast = torch.autocast(model.mesh.device_type, dtype=compute, enabled=compute is not None)
    with divided(model, batch) as own, autocast:
        given = (own["tokens"],) if model.first else ()
        target: dict[str, Any] = {"target": own["labels"]} if model.last else {}
        model.schedule.step(*given, **target)
    if largest_norm is not None:
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        squared = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
        dist.all_reduce(squared, group=model.mesh.get_group())
        nn.utils.clip_grads_with_norm_(model.parameters(), largest_norm, squared.sqrt())
    optimizer.step()
    optimizer.zero_grad()
