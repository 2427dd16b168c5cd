"""What cuDNN may take for convolutions: a range in what is reserved, and in what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step, Trace, trace
from memfit.hardware import Target, load_device
from memfit.memory import Room, Timeline, judge_room, reserved, reserved_range
from memfit.memory.convolution_workspace import CAP, convolution_workspaces

A100 = load_device("a100-sxm-40gb")
MIB = 1 << 20


def captured(*layers: nn.Module, channels: int = 16, target: str = "a100-sxm-40gb") -> Trace:
    step = Step(nn.Sequential(*layers), torch.empty(8, channels, 64, 64), loss=lambda out, _: out.sum())
    return trace(step, target=target)


def test_at_most_it_is_some_times_input_output_and_filter() -> None:
    found = convolution_workspaces(captured(nn.Conv2d(16, 32, 3, padding=1)))
    assert found is not None
    tensors = 4 * (8 * 16 * 64 * 64 + 8 * 32 * 64 * 64 + 32 * 16 * 9)
    assert sorted({*found.tolist()}) == [0, 3 * tensors] and (found > 0).sum() == 2, "forward and backward"


def test_trying_all_algorithms_takes_more() -> None:
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = True
        tried = captured(nn.Conv2d(16, 32, 3))
    finally:
        torch.backends.cudnn.benchmark = before
    chosen = captured(nn.Conv2d(16, 32, 3))
    assert tried.cudnn_benchmark and not chosen.cudnn_benchmark and tried.fingerprint == chosen.fingerprint
    most, less = convolution_workspaces(tried), convolution_workspaces(chosen)
    assert most is not None and less is not None and most.max() > 1.5 * less.max()


def test_a_cap_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured(nn.Conv2d(16, 32, 3))
    monkeypatch.setenv(CAP, "2")
    capped = convolution_workspaces(found)
    assert capped is not None and capped.max() == 2 * MIB


@pytest.mark.parametrize("layer", [nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16)])
def test_depthwise_convolutions_and_steps_without_any_take_none(layer: nn.Module) -> None:
    found = captured(layer)
    assert convolution_workspaces(found) is None
    timeline = Timeline.of(found, 512)
    assert reserved_range(A100, timeline) == (reserved(found, A100).peak_reserved_bytes,) * 2


def test_a_cpu_has_none() -> None:
    assert convolution_workspaces(captured(nn.Conv2d(16, 32, 3), target="cpu")) is None


def test_a_step_fits_when_it_does_with_the_largest_workspaces() -> None:
    found = captured(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)))
    timeline = Timeline.of(found, 512)
    low, high = reserved_range(A100, timeline)
    assert low < high

    def room_with(usable_bytes: int) -> Room:
        rules = replace(A100.allocator, margin=0.0)
        device = replace(
            A100, memory_total_bytes=usable_bytes, context_bytes=0, context_low_bytes=None, allocator=rules
        )
        return judge_room(Target.parse(device), timeline).room

    assert room_with(high) is Room.ENOUGH
    assert room_with((low + high) // 2) is Room.MARGIN
    assert room_with(low // 2) is Room.TOO_LITTLE


def test_the_plan_and_what_it_prints_have_the_range() -> None:
    plan = memfit.plan(captured(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))), progress=False)
    found = plan.predicted
    assert found is not None and found.peak_reserved_low_bytes is not None
    assert found.peak_reserved_high_bytes is not None
    assert found.peak_reserved_bytes == (found.peak_reserved_low_bytes + found.peak_reserved_high_bytes) // 2
    assert " to " in found.reserved and found.reserved in str(plan)
    assert memfit.Plan.from_json(plan.to_json()) == plan
