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
from memfit.capture import Trace
from memfit.capture.step import WarmUp
from memfit.hardware import Target
from memfit.memory import Reserved, reserved
from tests.evidence.generated_models import CNN, MLP, Encoder, settings
from tests.evidence.timm_models import has_timm, load_timm

RUNS = Path(__file__).parent / "single_gpu.csv"
GPU = "a100-sxm-40gb"
MIB = 1 << 20
WORKSPACE_SEGMENT_MIB = 20
"""The file's constants were read off runs for which memfit counted no workspace of cuBLAS; one segment holds both."""
OUT_OF_MEMORY = "OOM"
_SAMPLED = 6
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

    @cached_property
    def trace(self) -> Trace:
        """The captured step."""
        return memfit.trace(self.step(), target=GPU)

    @cached_property
    def reserved(self) -> Reserved:
        """What the caching allocator reserves, cuDNN's workspace not counted."""
        return reserved(self.trace, Target.parse(GPU).device)

    @property
    def predicted_mib(self) -> float:
        """Reserved bytes and the machine's context."""
        return self.reserved.peak_reserved_bytes / MIB + self.context_mib

    @property
    def error(self) -> float:
        """How much more than measured is predicted; only for runs that were measured."""
        assert self.measured_mib is not None
        return self.predicted_mib / self.measured_mib - 1.0

    @property
    def convolves(self) -> bool:
        """Whether it has convolutions that are not depthwise, for which cuDNN may take a workspace."""
        return any(op.name.startswith("aten.convolution") for op in self.trace.ops)

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
    """A row for each family: how many runs, and how far off predictions are."""
    lines = [
        "| models | runs | memfit: median error | 90 % | from | to | FakeTensor: median error | out of memory, told |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in ("mlp", "transformer", "cnn", "timm"):
        own = [run for run in runs if run.family == family]
        measured = [run for run in own if run.measured_mib is not None]
        if not measured:
            continue
        errors = np.array([run.error for run in measured])
        fake = [
            abs((run.fake_tensor_mib + run.context_mib) / run.measured_mib - 1.0)
            for run in measured
            if run.fake_tensor_mib is not None and run.measured_mib is not None
        ]
        failed = [run for run in own if run.measured_mib is None]
        told = sum(out_of_memory(run) for run in failed)
        cells = [family, f"{len(own)}", f"{np.median(np.abs(errors)):.1%}", f"{np.quantile(np.abs(errors), 0.9):.1%}"]
        cells += [
            f"{errors.min():+.1%}",
            f"{errors.max():+.1%}",
            f"{np.median(fake):.1%}" if fake else "none published",
        ]
        cells.append(f"{told} of {len(failed)}" if failed else "none was")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def out_of_memory(run: SingleGpuRun) -> bool:
    """Whether the step does not fit, cuDNN's workspace not counted."""
    limit = Target.parse(GPU).device.memory_total_bytes - int(run.context_mib * MIB)
    return run.reserved.peak_allocated_bytes > limit or (
        reserved(run.trace, Target.parse(GPU).device, limit_bytes=limit).out_of_memory_op is not None
    )
