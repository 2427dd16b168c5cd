"""Plans that offload, from the step to what was measured, on a CPU whose disk is taken to be fast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import InputError
from memfit.hardware import OffloadLink, Target
from memfit.plans import Inputs, Plan, plan_problem
from memfit.solve import SolveOptions

LINK = OffloadLink(name="disk", to_host_bytes_per_s=2e9, to_device_bytes_per_s=2e9)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class ByChannels(nn.Module):
    """Products over a dimension that is not the last, as in a UNet's attention: torch adds their bias in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = x.view(8, -1, 64).transpose(1, 2).contiguous().transpose(1, 2)
        return x + self.down(nn.functional.gelu(self.up(grid))).reshape(x.shape)


def step_of(block: type[nn.Module]) -> memfit.Step:
    torch.manual_seed(0)
    model = nn.Sequential(*(block(64) for _ in range(5)))
    return memfit.Step(model, torch.randn(512, 64), loss=lambda out, _: out.square().mean())


@pytest.mark.parametrize("block", [Block, ByChannels])
@pytest.mark.parametrize("part", [0.4, 0.6])
def test_a_plan_that_offloads_is_faster_fits_its_budget_and_runs_to_the_same_bits(
    part: float, block: type[nn.Module]
) -> None:
    def step() -> memfit.Step:
        return step_of(block)

    target = Target.parse("cpu")
    target = replace(target, device=replace(target.device, disk=LINK))
    tight = memfit.plan(step(), target=target, budget="1KiB", progress=False)
    least, most = tight.minimum_budget_bytes, tight.baseline.peak_bytes
    assert least is not None
    budget = int(least + part * (most - least))
    without = memfit.plan(step(), target=target, budget=budget, progress=False)
    plan = memfit.plan(step(), target=target, budget=budget, progress=False, options=SolveOptions(offload=True))
    assert any(entry.offload for entry in plan.checkpoint) and plan.gap == 0
    assert "offloaded: " in str(plan) and "waiting for offload" in str(plan)
    assert plan.predicted is not None and without.predicted is not None
    assert plan.predicted.step_ms <= without.predicted.step_ms
    found = plan.verify(step(), 1, time_tolerance=None)
    assert found.exactness is not None and found.exactness.equal
    assert found.peak.measured_bytes == found.peak.predicted_bytes <= budget


def test_every_unit_offloads_all_that_is_hidden_where_that_is_asked_for() -> None:
    target = Target.parse("cpu")
    target = replace(target, device=replace(target.device, disk=LINK))
    inputs = Inputs.of(step_of(Block), target=target, options=SolveOptions(offload="hidden"), progress=False)
    plan, problem = plan_problem(inputs, budget="1GiB")
    link = problem.offload_link
    assert link is not None
    hidden = {
        candidate.unit.name: candidate.window.hidden_bytes(link)
        for candidate in problem.candidates
        if candidate.window is not None and candidate.forced
    }
    moved = {entry.unit: entry.offloaded_bytes for entry in plan.checkpoint if entry.offload}
    assert moved.keys() == hidden.keys() and all(moved[name] <= hidden[name] for name in moved)
    assert plan.predicted is not None and not plan.predicted.recompute_ms
    free, _ = plan_problem(
        Inputs.of(step_of(Block), target=target, options=SolveOptions(offload=True), progress=False), budget="1GiB"
    )
    assert not free.checkpoint
    found = plan.verify(step_of(Block), 1, time_tolerance=None)
    assert found.exactness is not None and found.exactness.equal
    assert found.peak.measured_bytes == found.peak.predicted_bytes


def offloading_plan(**options: Any) -> Plan:
    target = Target.parse("cpu")
    target = replace(target, device=replace(target.device, disk=LINK))
    solver = SolveOptions(offload="hidden", **options)
    return memfit.plan(step_of(Block), target=target, budget="1GiB", options=solver, progress=False)


@pytest.mark.parametrize("decide", [("loss",), ("segments",), ("loss", "segments")])
def test_what_is_hidden_is_offloaded_whatever_else_is_decided(decide: Any) -> None:
    alone = offloading_plan()
    assert alone.checkpoint and offloading_plan(decide=decide).checkpoint == alone.checkpoint


def test_units_around_one_that_must_be_checkpointed_do_not_offload() -> None:
    inside = offloading_plan(force=("0.norm",))
    names = {entry.unit for entry in inside.checkpoint}
    assert "0.norm" in names and "0" not in names and len(names) > 1
    whole = offloading_plan(force=("",))
    assert [entry.unit for entry in whole.checkpoint] == [""]


def test_an_offload_that_is_no_setting_is_refused() -> None:
    with pytest.raises(InputError, match="write True, False or 'hidden'"):
        SolveOptions(offload="all")  # type: ignore[arg-type]
