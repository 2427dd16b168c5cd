"""Stages of pipelines, trained on each process of the tests and captured as each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tests.distributed.parallel_case import Case

WIDTH, TOKENS, CLASSES, MICRO_BATCHES = 48, 12, 80, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Part(nn.Module):
    """Some blocks of a model; the first has the embedding, the last the head."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH) if index == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES) if index == count - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class Rank(nn.ModuleList):
    """The parts that a rank holds, with the schedule that runs them."""

    schedule: Any


def build(
    mesh: DeviceMesh, schedule: Any = ScheduleGPipe, parts: int = 1, shard: bool = False, given: bool = False
) -> nn.Module:
    """Build this rank's parts of a pipeline along `pp`; other dimensions shard each part."""
    pipe = mesh["pp"]
    count = pipe.size() * parts
    model = Rank()
    stages = []
    for index in range(pipe.get_local_rank(), count, pipe.size()):
        part = Part(index, count)
        if shard:
            for block in part.blocks:
                fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
            fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
        model.append(part)
        shapes: dict[str, Any] = {}
        if given:
            hidden = torch.empty(2, TOKENS, WIDTH, requires_grad=True)
            shapes["input_args"] = torch.zeros(2, TOKENS, dtype=torch.int64) if index == 0 else hidden
            shapes["output_args"] = hidden if index < count - 1 else torch.empty(2, TOKENS, CLASSES)
        stages.append(
            PipelineStage(part, index, count, torch.device(mesh.device_type), group=pipe.get_group(), **shapes)
        )
    given_stages: Any = stages if parts > 1 else stages[0]
    model.schedule = schedule(given_stages, MICRO_BATCHES, loss_fn=loss)
    return model


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def run(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Run one step of the pipeline."""
    tokens, labels = batch
    model.schedule.step(tokens, target=labels)
    optimizer.step()
    optimizer.zero_grad()


def _case(sizes: dict[str, int], **options: Any) -> Case:
    return Case(functools.partial(build, **options), sizes, _batch, run=run)


def _batch(make: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (2 * MICRO_BATCHES, TOKENS)
    return make(shape, dtype=torch.int64), make(shape, dtype=torch.int64)


CASES = {
    "gpipe": _case({"pp": 2}, schedule=ScheduleGPipe),
    "1f1b": _case({"pp": 2}, schedule=Schedule1F1B),
    "1f1b with shapes given": _case({"pp": 2}, schedule=Schedule1F1B, given=True),
    "interleaved": _case({"pp": 2}, schedule=ScheduleInterleaved1F1B, parts=2),
    "1f1b of sharded parts": _case({"pp": 2, "dp": 2}, schedule=Schedule1F1B, shard=True),
}
