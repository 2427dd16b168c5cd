"""What the terminal shows of a step's memory."""

from __future__ import annotations

import io

import torch
from rich.console import Console
from torch import nn

from memfit import Step, spec, trace
from memfit.memory import summarize
from memfit.report import print_memory
from memfit.units import display_bytes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_report_shows_the_verdict_the_peak_and_layers_as_one_row() -> None:
    step = Step(Model, spec((512, 1024)), loss=lambda out, _: out.mean())
    summary = summarize(trace(step, target="h100-sxm"))
    output = io.StringIO()
    print_memory(summary, Console(file=output, width=200))
    text = output.getvalue()
    assert "fits: needs" in text
    assert "NVIDIA H100" in text
    assert display_bytes(summary.peak_reserved_bytes) in text
    assert display_bytes(summary.peak_bytes) in text
    assert summary.peak.name.removeprefix("aten.").removesuffix(".default") in text
    assert "context" in text
    (row,) = [line for line in text.splitlines() if line.startswith("layers.*")]
    assert [part.strip() for part in row.split("│")][2:6] == ["3", "12.00 MiB", "12.00 MiB", "24.00 MiB"]
    assert "layers.0" not in text.split("modules that hold")[1]


def test_report_fits_a_narrow_terminal() -> None:
    step = Step(Model, spec((512, 1024)), loss=lambda out, _: out.mean())
    output = io.StringIO()
    print_memory(summarize(trace(step, target="h100-sxm")), Console(file=output, width=80))
    (row,) = [line for line in output.getvalue().splitlines() if line.startswith("layers.*")]
    assert [part.strip() for part in row.split("│")][:3] == ["layers.*", "3", "12.00 MiB"]
