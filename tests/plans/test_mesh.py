"""Plans for steps that were captured on their mesh as they are, beside the planner's own for the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memfit
from memfit import Step, spec
from memfit.errors import InputError, MissingFeatureError
from memfit.plans import Plan

RANKS = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float()


def build(mesh: DeviceMesh) -> nn.Module:
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def plan(model: Any, **options: Any) -> Plan:
    step = Step(model, spec((64, 128, 256)), loss=lambda output, _: output.square().mean())
    return memfit.plan(step, target="h100-sxm", progress=False, **options)


@pytest.fixture(scope="module")
def baseline() -> Plan:
    return plan(build, mesh={"dp": RANKS})


@pytest.mark.parametrize("part", [1.0, 0.9, 0.7])
def test_a_plan_is_that_of_the_plain_model(baseline: Plan, part: float) -> None:
    budget = int(baseline.baseline.peak_bytes * part)
    own, planned = plan(build, mesh={"dp": RANKS}, budget=budget), plan(Model, ranks=RANKS, budget=budget)
    assert own.baseline.peak_bytes == planned.baseline.peak_bytes
    assert own.baseline.peak_reserved_bytes == planned.baseline.peak_reserved_bytes
    assert own.predicted is not None and planned.predicted is not None
    assert own.predicted.peak_bytes == planned.predicted.peak_bytes
    assert own.predicted.peak_by_category == planned.predicted.peak_by_category
    assert own.predicted.step_ms == pytest.approx(planned.predicted.step_ms, rel=0.05)
    assert [(each.unit, each.discarded_bytes, each.recompute_peak_bytes) for each in own.checkpoint] == [
        (each.unit, each.discarded_bytes, each.recompute_peak_bytes) for each in planned.checkpoint
    ]
    assert bool(own.checkpoint) == (part < 1)


def test_the_document_has_the_mesh_and_no_shards_of_its_own(baseline: Plan) -> None:
    again = Plan.from_json(baseline.to_json())
    assert again == baseline
    assert (again.mesh, again.ranks, again.shard) == ({"dp": RANKS}, RANKS, None)
    assert '"mesh"' not in plan(Model, ranks=RANKS).to_json(), "other documents are as they were"


def test_a_trace_knows_its_mesh(baseline: Plan) -> None:
    step = Step(build, spec((64, 128, 256)), loss=lambda output, _: output.square().mean())
    trace = memfit.trace(step, target="h100-sxm", mesh=RANKS)
    assert memfit.plan(trace, progress=False) == baseline
    with pytest.raises(InputError, match="leave mesh out"):
        memfit.plan(trace, mesh={"dp": 4}, progress=False)
    with pytest.raises(InputError, match="leave ranks out"):
        memfit.plan(trace, ranks=4, progress=False)


def test_explain_and_check_capture_on_the_mesh(baseline: Plan) -> None:
    step = Step(build, spec((64, 128, 256)), loss=lambda output, _: output.square().mean())
    baseline.check(step)
    found = memfit.explain(step, target="h100-sxm", mesh={"dp": RANKS}, progress=False)
    assert "micro-batch of 32 instead of 64" in [lever.name for lever in found.levers]
    assert not any("mesh" in each for each in found.left_out), "changed steps are captured on the mesh too"


def test_it_runs_on_a_model_that_is_wrapped_and_on_no_other() -> None:
    step = Step(build, spec((64, 128, 256)), loss=lambda output, _: output.square().mean())
    trace = memfit.trace(step, target="cpu", mesh=RANKS)
    peak = memfit.plan(trace, progress=False).baseline.peak_bytes
    wanted = memfit.plan(trace, budget=int(0.8 * peak), progress=False)
    assert wanted.checkpoint
    with pytest.raises(InputError, match="wrapped on a mesh"):
        wanted.apply(Model())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        model = build(dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
        calls: list[bool] = []
        model.layers[0].norm.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))  # type: ignore[union-attr]
        wanted.apply(model)
        model(torch.zeros(64, 128, 256)).square().mean().backward()
        assert len(calls) == 2, "its first layer runs in the forward and again in the backward"
        wanted.remove(model)
    finally:
        dist.destroy_process_group()
    with pytest.raises(MissingFeatureError, match="8 ranks"):
        wanted.verify(Step(Model, torch.zeros(64, 128, 256), loss=step.loss))
