"""Decisions say why a result is kept that would be cheap to make again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.analysis.explaining import explain
from memfit.analysis.report import Report
from memfit.capture import Trace
from memfit.report.decisions import list_decisions
from memfit.report.markdown import to_markdown
from memfit.solve import SolveOptions


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64))


class Frozen(Normalised):
    """Batch norm that only uses its statistics."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[1].eval()
        return self


class Shifting(nn.Module):
    """Adds a buffer, and changes it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.zeros(64))
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x + self.shift
        self.shift.add_(1.0)
        return self.layer(shifted.square()).tanh().exp()


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return self.layer(x * noise).tanh().exp()


class Chain(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def report_of(kind: type[nn.Module]) -> tuple[Trace, Report]:
    step = memfit.Step(Chain(kind).train(), memfit.spec((4096, 64)), optimizer=torch.optim.SGD)
    trace = memfit.trace(step, target="cpu")
    plan = memfit.plan(trace, options=SolveOptions(force=("blocks.0", "blocks.1")), progress=False)
    return trace, Report.of(plan, trace)


@pytest.mark.parametrize(
    ("kind", "op", "reason"),
    [
        (Normalised, "native_batch_norm", "updates running statistics"),
        (Shifting, "add.Tensor", "reads what is overwritten before its backward"),
        (Noisy, "rand.generator", "draws from a generator of its own"),
    ],
)
def test_what_cannot_run_again_says_why_it_is_kept(kind: type[nn.Module], op: str, reason: str) -> None:
    trace, report = report_of(kind)
    kept = [row["keeps"] for row in list_decisions(report) if row["decision"] != "kept"]
    assert kept and all(f"{op} ({reason})" in each for each in kept)
    assert reason in to_markdown(report)
    assert report.plan is not None
    found = explain(report.plan, trace, levers=False, progress=False).checkpointing
    assert found is not None
    assert f"its op {reason}" in {each.why for each in found.still_held}


def test_what_could_run_again_has_no_such_reason() -> None:
    _, report = report_of(Frozen)
    rows = [row for row in list_decisions(report) if row["decision"] != "kept"]
    assert rows and not any("(" in row["keeps"] for row in rows)
