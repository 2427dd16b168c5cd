"""FSDP2's own code, captured on ranks that are not there, against the planner's schedule of it: event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memfit
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.presets import step_at
from memfit.sharding import ShardOptions, repeated_blocks, shard
from tests.distributed.fsdp2_cases import CASES, EMBEDDING_CASE
from tests.sharding.fsdp2_captures import (
    Setting,
    captured,
    captured_changes,
    difference,
    ordered,
    planned,
    planned_changes,
    rounding_of,
)

_SIZES = ("plain", "mixed precision", "nested units", "transformer")


def check(name: str, target: str, ranks: int, setting: Setting | None = None, *, same_step: bool = True) -> None:
    case = CASES[name]
    trace = captured(case, target, ranks, setting)
    timeline, sharding = planned(case, target, ranks, setting)
    found, expected = captured_changes(trace), planned_changes(sharding)
    assert len(found) > 100
    assert not difference(found, expected)
    assert {each.ranks for each in trace.collectives} == {ranks}
    if same_step:
        under = timeline.under_plan(intervals=sharding.allocations, removed=sharding.removed)
        assert Timeline.of(trace, rounding_of(target)).peak_bytes == under.peak_bytes


@pytest.mark.parametrize("name", CASES)
def test_buffers_streams_collectives_and_peak_are_those_of_the_planner(name: str) -> None:
    # the plain step has the embedding's result in float32 (autocast leaves it), and FSDP2 gathers bfloat16 weights
    check(name, "h100-sxm", 8, same_step=name != EMBEDDING_CASE)


@pytest.mark.parametrize("ranks", [2, 64, 512])
@pytest.mark.parametrize("name", _SIZES)
def test_groups_of_any_size(name: str, ranks: int) -> None:
    check(name, "h100-sxm", ranks)


@pytest.mark.parametrize("name", _SIZES)
def test_on_the_cpu(name: str) -> None:
    check(name, "cpu", 2)


@pytest.mark.parametrize("name", ["plain", "transformer"])
def test_a_last_unit_that_is_not_resharded(name: str) -> None:
    check(name, "h100-sxm", 8, Setting(keep_last=True))


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mixed precision", "shared block, mixed precision"])
def test_dtypes(name: str, reduce_dtype: str) -> None:
    check(name, "h100-sxm", 8, Setting(options={"param_dtype": "bfloat16", "reduce_dtype": reduce_dtype}))


@pytest.mark.slow
def test_llama_3_8b_on_64_ranks() -> None:
    step, ranks = step_at("llama3-8b", batch=1, seq=4096), 64
    plain = memfit.trace(step, target="h100-sxm")
    units = repeated_blocks(plain)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    def build(mesh: DeviceMesh) -> nn.Module:
        model = step.build_model()
        for name in (*units, ""):
            fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=half)
        return model

    trace = memfit.trace(replace(step, model=build), target="h100-sxm", mesh={"dp": ranks})
    timeline = Timeline.of(plain, 512)
    target = Target.parse("h100-sxm", ranks=ranks)
    sharding = shard(timeline, Runtime.of(plain, Roofline()), target, ShardOptions(units=units))
    # the norm of all gradients is a collective too, of some numbers, which the planner leaves out
    found = ordered(change for change in captured_changes(trace) if change[0] != "all_reduce")
    assert not difference(found, planned_changes(sharding))
    under = timeline.under_plan(intervals=sharding.allocations, removed=sharding.removed)
    assert Timeline.of(trace, 512).peak_bytes == under.peak_bytes
