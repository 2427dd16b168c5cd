"""Batches that timm's benchmark found to fit on an RTX 3090, and those that it found not to.

huggingface/pytorch-image-models `results/benchmark-train-amp` (Apache-2.0), torch 1.12: float16 autocast, channels
last, SGD with momentum, cuDNN tries its algorithms. The script lowers the batch when it runs out of memory, so the next
larger one did not fit. Attention was not fused then.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import memfit
from memfit import Step, spec
from memfit.hardware import Target
from memfit.memory import Room, Timeline, judge_room
from tests.evidence.timm_models import has_timm, load_timm

RUNS = Path(__file__).parent / "timm_fits.csv"
GPU = "rtx-3090"
SIZE = 224


@dataclass(frozen=True)
class TimmBatch:
    """A model, a batch, and whether the benchmark ran with it."""

    model: str
    batch: int
    fits: bool

    @property
    def name(self) -> str:
        return f"timm {self.model}, batch {self.batch}"

    def room(self) -> Room:
        """Whether memfit finds room for the step."""
        images = spec((self.batch, 3, SIZE, SIZE)).to(memory_format=torch.channels_last)
        criterion = nn.CrossEntropyLoss()
        step = Step(
            partial(_build, self.model),
            images,
            loss=lambda output, _: criterion(output, torch.empty(self.batch, dtype=torch.int64, device=output.device)),
            optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            autocast=torch.float16,
            zero_grad="before_forward",
        )
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            timeline = Timeline.of(memfit.trace(step, target=GPU))
        finally:
            torch.backends.cudnn.benchmark = before
        return judge_room(Target.parse(GPU), timeline).room


def read_batches() -> list[TimmBatch]:
    """Every batch of the file; none without timm."""
    if not has_timm():
        return []
    with RUNS.open() as file:
        rows = list(csv.DictReader(file))
    return [
        TimmBatch(row["model"], int(row[column]), column == "fits")
        for row in rows
        for column in ("fits", "does_not")
        if row[column]
    ]


def _build(name: str) -> nn.Module:
    timm = load_timm()
    timm.layers.set_fused_attn(False)
    try:
        return timm.create_model(name).to(memory_format=torch.channels_last)
    finally:
        timm.layers.set_fused_attn(True)
