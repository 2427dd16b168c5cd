"""A plan's policies as a file of torch's selective checkpointing: it runs without memfit, to the same bits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.hardware import OffloadLink, Target
from memfit.memory import measured
from memfit.plans.build import build_checkpoint
from memfit.report import to_torch_policy, write_torch_policy
from memfit.solve import SolveOptions
from memfit.tradeoff import TraceColumns, UnitColumns, find_units
from memfit.tradeoff.policy import build_policy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down, self.drop = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module")
def planned() -> tuple[memfit.Plan, torch.Tensor]:
    x = torch.randn(16, 128, 64)
    step = memfit.Step(build(), x, loss=lambda output, _: output.square().mean(), optimizer=torch.optim.SGD)
    options = SolveOptions(forbid=("<loss>",))
    full = memfit.plan(step, target="cpu", options=options, budget=1)
    assert full.minimum_budget_bytes is not None
    budget = (full.minimum_budget_bytes + full.baseline.peak_bytes) // 2
    return memfit.plan(step, target="cpu", options=options, budget=budget), x


def test_the_file_trains_to_the_same_bits_in_less_memory(
    planned: tuple[memfit.Plan, torch.Tensor], tmp_path: Path
) -> None:
    plan, x = planned
    assert any(entry.saved_ops for entry in plan.checkpoint), "the plan saves nothing: the policy would not be tried"
    write_torch_policy(plan, tmp_path / "policy.py")
    namespace: dict[str, object] = {}
    exec((tmp_path / "policy.py").read_text(), namespace)
    plain, exported = build(), build()
    namespace["apply"](exported)  # type: ignore[operator]
    expected = train(plain, x)
    assert all(map(torch.equal, train(exported, x), expected))
    peaks = []
    for model in (plain, exported):
        model.zero_grad()
        with measured() as truth:
            train(model, x)
        peaks.append(truth.peak_bytes)
    saved = plan.baseline.peak_bytes - plan.predicted.peak_bytes  # type: ignore[union-attr]
    assert peaks[0] - peaks[1] >= 0.9 * saved


class WritesLater(nn.Module):
    """An op writes to a product after it, and another product of the same name is not saved."""

    def __init__(self, *, side: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.side = nn.Linear(256, 64) if side else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.gelu(self.up(self.norm(x)))
        if self.side is not None:
            x = x + self.side(wide)
        narrow = self.down(wide)
        narrow.mul_(2)
        return x + F.gelu(narrow)


@pytest.mark.parametrize("side", [False, True])
def test_results_that_are_written_to_after_the_recompute_ends_keep_their_bits(side: bool) -> None:
    """Many policies of a unit are exported by themselves, also with a result offloaded: some gave other gradients."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(WritesLater(side=side))

    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    step = memfit.Step(build(), x, loss=lambda output, _: output.square().mean(), optimizer=torch.optim.SGD)
    target = Target.parse("cpu")
    disk = OffloadLink(name="disk", to_host_bytes_per_s=2e9, to_device_bytes_per_s=2e9)
    target = replace(target, device=replace(target.device, disk=disk))
    trace = memfit.trace(step, target=target)
    plain = memfit.plan(trace, target=target, progress=False)
    columns = TraceColumns.of(trace, np.ones(len(trace.ops)))
    unit = next(unit for unit in find_units(trace) if unit.name == "0")
    unit_columns = UnitColumns.of(columns, unit)
    expected = train(build(), x)
    tried = 0
    places = np.arange(unit_columns.groups)
    for dropped in (*(places <= last for last in places), *(places == one for one in places)):
        policy = build_policy(unit_columns, dropped)
        for away in ((), policy.saved[-1:]):
            entry = build_checkpoint(trace, unit, replace(policy, offload=away))
            plan = msgspec.structs.replace(plain, checkpoint=(entry,))
            namespace: dict[str, object] = {}
            exec(to_torch_policy(plan), namespace)
            exported = build()
            namespace["apply"](exported)  # type: ignore[operator]
            assert all(map(torch.equal, train(exported, x), expected)), (policy.stop, policy.saved, away)
            tried += 1
    assert tried > 20


def test_the_file_needs_no_memfit(planned: tuple[memfit.Plan, torch.Tensor], tmp_path: Path) -> None:
    write_torch_policy(planned[0], tmp_path / "policy.py")
    code = "import sys, policy; assert 'memfit' not in sys.modules; print(len(policy.SAVED))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(ended.stdout) == len(planned[0].checkpoint)


def test_what_it_leaves_out_is_said(planned: tuple[memfit.Plan, torch.Tensor]) -> None:
    assert "Left out" not in to_torch_policy(planned[0])
    step = memfit.Step(nn.Linear(8, 512), memfit.spec((4096, 8)), loss=lambda out, _: out.exp().tanh().sum())
    recomputed = memfit.plan(step, target="cpu", options=SolveOptions(force=("<loss>",)))
    assert "the loss outside of the model is recomputed" in to_torch_policy(recomputed)


def test_a_plan_that_does_not_fit_has_none(planned: tuple[memfit.Plan, torch.Tensor]) -> None:
    step = memfit.Step(nn.Linear(8, 8), memfit.spec((16, 8)), loss=lambda output, _: output.sum())
    with pytest.raises(memfit.InputError, match="no policies to export"):
        to_torch_policy(memfit.plan(step, target="cpu", budget=1))
