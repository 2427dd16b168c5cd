"""Whole training runs on one A100 40 GB, predicted beside what nvidia-smi showed.

The runs are itu-rad/GPUMemNet's (data CC BY 4.0): 30 perceptrons, 25 convolutional networks and 15 transformer encoders
that its scripts generate, and 111 models of timm. A reading of nvidia-smi has the process's context in it, one constant
of that machine (`single_gpu.csv`, `machine_constant_mib`).
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memfit
from memfit import Step, spec
from memfit.capture.step import WarmUp
from memfit.hardware import Target
from memfit.memory import Timeline, reserved, reserved_range
from tests.evidence.generated_models import CNN, MLP, Encoder, settings
from tests.evidence.timm_models import has_timm, load_timm

RUNS = Path(__file__).parent / "single_gpu.csv"
GPU = "a100-sxm-40gb"
MIB = 1 << 20
WORKSPACE_SEGMENT_MIB = 20
"""The file's constants were read off runs for which memfit counted no workspace of cuBLAS; one segment holds both."""
OUT_OF_MEMORY = "OOM"
_SAMPLED = 8
_NAME = re.compile(r"(?P<model>.*)_batch(?P<batch>\d+)_size(?P<size>\d+)_")


@dataclass(frozen=True)
class SingleGpuRun:
    """One run: its family, the settings in its name, and what was measured and published of it."""

    family: str
    config: str
    measured_mib: float | None
    """None where the run was out of memory."""
    context_mib: float
    fake_tensor_mib: float | None

    @property
    def sampled(self) -> bool:
        """Whether it is among those that are enough for a quick look."""
        return self.family != "timm" or zlib.crc32(self.config.encode()) % _SAMPLED == 0

    def timeline(self) -> Timeline:
        """Capture the step. timm's script lets cuDNN try its algorithms, the others do not."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = self.family == "timm"
        try:
            return Timeline.of(memfit.trace(self.step(), target=GPU))
        finally:
            torch.backends.cudnn.benchmark = before

    @cached_property
    def range_mib(self) -> tuple[float, float]:
        """Reserved bytes with the least and the largest workspaces of cuDNN, and the machine's context."""
        low, high = reserved_range(Target.parse(GPU).device, self.timeline())
        return low / MIB + self.context_mib, high / MIB + self.context_mib

    @property
    def convolves(self) -> bool:
        """Whether it has convolutions for which cuDNN may take a workspace."""
        low, high = self.range_mib
        return low < high

    @property
    def error(self) -> float:
        """How much more than measured the middle of the range is; only for runs that were measured."""
        return sum(self.range_mib) / 2 / self._measured - 1.0

    def inside(self, margin: float = 0.0) -> bool:
        """Whether the measured figure is in the range, made wider by a margin; nvidia-smi shows steps of 2 MiB."""
        low, high = (each - self.context_mib for each in self.range_mib)
        return low / (1.0 + margin) - 2 <= self._measured - self.context_mib <= high * (1.0 + margin) + 2

    @property
    def out_of_memory(self) -> bool:
        """Whether the step does not fit, even without workspaces of cuDNN."""
        device = Target.parse(GPU).device
        limit_bytes = device.memory_total_bytes - int(self.context_mib * MIB)
        return reserved(self.timeline().allocations, device, limit_bytes=limit_bytes).out_of_memory_op is not None

    @property
    def _measured(self) -> float:
        assert self.measured_mib is not None, f"{self.config} was out of memory"
        return self.measured_mib

    def step(self) -> Step:
        """The step of the script that was run."""
        if self.family == "timm":
            return self._timm_step()
        given = settings(self.config)
        adam = torch.optim.Adam
        if self.family == "mlp":
            batch = int(given["batch"])
            return _step(partial(MLP, given), spec((batch, int(given["input"]))), batch, adam)
        if self.family == "transformer":
            batch, length = int(given["batch_size"]), int(given["seq_length"])
            # The script calls the model once before it trains, gradients on.
            return _step(partial(Encoder, given), spec((batch, length), torch.int64), batch, adam, warm_up="forward")
        batch, size, channels = int(given["batch"]), int(given["input_size"]), int(given["input_channels"])
        # The script prints torchinfo's summary, which runs the model without gradients.
        images = spec((batch, channels, size, size))
        return _step(partial(CNN, given), images, batch, adam, warm_up="evaluation")

    def _timm_step(self) -> Step:
        name = _NAME.match(self.config)
        assert name is not None, self.config
        batch, size = int(name["batch"]), int(name["size"])
        build = partial(_timm_model, name["model"], size)
        return _step(build, spec((batch, 3, size, size)), batch, partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def read_runs() -> list[SingleGpuRun]:
    """Every run that can be built here."""
    with RUNS.open() as file:
        runs = [_parsed(row) for row in csv.DictReader(file)]
    return [run for run in runs if run.family != "timm" or has_timm()]


def _parsed(row: dict[str, str]) -> SingleGpuRun:
    measured, fake = row["measured_nvidia_smi_mib"], row["published_faketensor_mib"]
    return SingleGpuRun(
        family=row["family"],
        config=row["config"],
        measured_mib=None if measured == OUT_OF_MEMORY else float(measured),
        context_mib=float(row["machine_constant_mib"]) - WORKSPACE_SEGMENT_MIB,
        fake_tensor_mib=float(fake) if fake else None,
    )


def _timm_model(name: str, size: int) -> nn.Module:
    timm = load_timm()
    try:
        return timm.create_model(name, img_size=size)
    except TypeError:  # most models take any size and have no such argument
        return timm.create_model(name)


def _step(
    build: Callable[[], nn.Module],
    inputs: torch.Tensor,
    batch: int,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    warm_up: WarmUp = "none",
) -> Step:
    """A loop as all of these scripts have it, `zero_grad` first."""
    criterion = nn.CrossEntropyLoss()

    def loss(output: Any, _: Any) -> torch.Tensor:
        return criterion(output, torch.empty(batch, dtype=torch.int64, device=output.device))

    return Step(build, inputs, loss=loss, optimizer=optimizer, zero_grad="before_forward", warm_up=warm_up)


def table(runs: Sequence[SingleGpuRun]) -> list[str]:
    """A row for each kind of run: how many there are, and how far off predictions are."""
    kinds = {
        "perceptrons": [run for run in runs if run.family == "mlp"],
        "transformers": [run for run in runs if run.family == "transformer"],
        "convolutional, generated": [run for run in runs if run.family == "cnn"],
        "timm, dense convolutions": [run for run in runs if run.family == "timm" and run.convolves],
        "all with dense convolutions": [run for run in runs if run.family in ("cnn", "timm") and run.convolves],
        "timm, others": [run for run in runs if run.family == "timm" and not run.convolves],
    }
    lines = [
        "| models | runs | memfit: median error | 90 % | from | to | in the range | with the margin | FakeTensor: "
        "median error | out of memory, told |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [f"| {' | '.join([kind, *_cells(own)])} |" for kind, own in kinds.items() if own]


def _cells(runs: Sequence[SingleGpuRun]) -> list[str]:
    measured = [run for run in runs if run.measured_mib is not None]
    errors = np.array([run.error for run in measured])
    fake = [
        abs((run.fake_tensor_mib + run.context_mib) / run.measured_mib - 1.0)
        for run in measured
        if run.fake_tensor_mib is not None and run.measured_mib is not None
    ]
    margin = Target.parse(GPU).rank_memory.margin
    failed = [run.out_of_memory for run in runs if run.measured_mib is None]
    return [
        f"{len(runs)}",
        f"{np.median(np.abs(errors)):.1%}",
        f"{np.quantile(np.abs(errors), 0.9):.1%}",
        f"{errors.min():+.1%}",
        f"{errors.max():+.1%}",
        *([_inside(measured, 0.0), _inside(measured, margin)] if any(run.convolves for run in runs) else ["-", "-"]),
        f"{np.median(fake):.1%}" if fake else "-",
        f"{sum(failed)} of {len(failed)}" if failed else "-",
    ]


def _inside(runs: Sequence[SingleGpuRun], margin: float) -> str:
    return f"{np.mean([run.inside(margin) for run in runs]):.0%}"
