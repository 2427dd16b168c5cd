"""Whether the caching allocator has room for a step: with the margin, without it, at its limit, or not at all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from torch import nn
from torch.optim import SGD

import memfit
from memfit import Step, spec
from memfit.hardware import Target
from memfit.memory import Room, Timeline, find_room, judge_room, reserved
from tests.devices import without_workspaces

MIB = 1 << 20


def step_of(width: int, rows: int) -> Timeline:
    """A step that begins with the gradients of the one before, which `zero_grad` frees first."""
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    step = Step(
        model, spec((rows, width)), loss=lambda output, _: output.sum(), optimizer=SGD, zero_grad="before_forward"
    )
    return Timeline.of(memfit.trace(step, target=without_workspaces("h100-sxm")), 512)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return step_of(2048, 4096)


def target_with(usable_bytes: int) -> Target:
    """A rank that has so much for tensors, and a margin of 3 % beside."""
    device = replace(without_workspaces("h100-sxm"), memory_total_bytes=math.ceil(usable_bytes * 1.03))
    return Target.parse(device, context="0MiB", margin=0.03)


@pytest.mark.parametrize("spare_mib", [-250, -200, -100, -60, -30, -10, -2, 0, 2, 40])
def test_a_quick_answer_is_the_judgement_where_there_is_room(timeline: Timeline, spare_mib: int) -> None:
    wanted = reserved(timeline.allocations, without_workspaces("h100-sxm")).peak_reserved_bytes
    target = target_with(wanted + spare_mib * MIB)
    judged = judge_room(target, timeline)
    enough, wanted_bytes = find_room(target, timeline)
    assert wanted_bytes == judged.wanted_bytes == wanted
    assert enough == (judged if judged.room is Room.ENOUGH else None)
    assert (judged.room is Room.ENOUGH) or spare_mib < 0


def test_a_step_that_reserves_less_than_the_device_has_is_never_too_large(timeline: Timeline) -> None:
    """Levels count old gradients beside what the first op makes, and `zero_grad` has freed them by then."""
    wanted = reserved(timeline.allocations, without_workspaces("h100-sxm")).peak_reserved_bytes
    assert judge_room(target_with(wanted), timeline).room is Room.ENOUGH
