"""The room of the caching allocator: budgets left to memfit give it some, and what cannot be helped is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import memfit
from memfit.capture import Step, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Device, Target, load_device
from memfit.plans.reservation import Room, reservation_under, with_room
from memfit.plans.searching import search
from memfit.solve import Problem, solve
from memfit.units import display_bytes
from tests.plans.test_searching import Model, loss

pytestmark = pytest.mark.slow

PLACES = 10


def of_batch(batch: int) -> Step:
    return Step(lambda: Model(512, 4), memfit.spec((batch, 512), torch.int64), loss=loss)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return memfit.trace(of_batch(8), target="h100-sxm")


def device_with(usable_bytes: int) -> Device:
    """An H100 with so much memory for tensors, all of it known to be there."""
    whole = load_device("h100-sxm")
    known = replace(whole.allocator, margin=0.0)
    return replace(whole, memory_total_bytes=usable_bytes, context_bytes=0, context_low_bytes=None, allocator=known)


def problem_on(trace: Trace, device: Device) -> Problem:
    return Problem.of(Runtime.of(trace, Roofline()), Target.parse(device))


@pytest.fixture(scope="module")
def devices(trace: Trace) -> dict[tuple[Room, Room], Device]:
    """Devices from too small to large enough, by the room of the first plan and of the one that has the most."""
    whole = problem_on(trace, load_device("h100-sxm"))
    assert whole.min_budget is not None
    low, high = whole.min_budget.peak_bytes, whole.baseline_bytes
    found: dict[tuple[Room, Room], Device] = {}
    for place in range(1, PLACES):
        device = device_with(low + (high - low) * place // PLACES)
        problem = problem_on(trace, device)
        first = solve(problem, device.usable_bytes)
        held, most = reservation_under(problem, first), with_room(problem, first)[1]
        if held is not None and most is not None:
            found.setdefault((held.room, most.room), device)
    return found


def test_a_budget_that_is_left_to_memfit_gives_the_allocator_room(
    trace: Trace, devices: dict[tuple[Room, Room], Device]
) -> None:
    device = devices[Room.TOO_LITTLE, Room.ENOUGH]
    plan = memfit.plan(trace, target=device, progress=False)
    assert plan.predicted is not None and plan.budget_bytes < device.usable_bytes
    assert plan.predicted.peak_reserved_bytes <= device.usable_bytes
    assert any(note.startswith("the budget is ") for note in plan.notes)


def test_a_budget_of_ones_own_is_kept_and_told_one_that_has_room(
    trace: Trace, devices: dict[tuple[Room, Room], Device]
) -> None:
    device = devices[Room.TOO_LITTLE, Room.ENOUGH]
    plan = memfit.plan(trace, target=device, budget=device.usable_bytes, progress=False)
    assert plan.predicted is not None and plan.budget_bytes == device.usable_bytes
    assert plan.predicted.peak_reserved_bytes > device.usable_bytes
    lower = memfit.plan(trace, target=device, progress=False).budget_bytes
    (note,) = (note for note in plan.notes if "run out" in note)
    assert f"A budget of {display_bytes(lower)} has room" in note


def test_where_no_budget_has_room_the_verdict_and_the_note_say_so(
    trace: Trace, devices: dict[tuple[Room, Room], Device]
) -> None:
    device = devices[Room.TOO_LITTLE, Room.TOO_LITTLE]
    plan = memfit.plan(trace, target=device, progress=False)
    assert plan.budget_bytes == device.usable_bytes
    (note,) = (note for note in plan.notes if "run out" in note)
    assert "No lower budget down to " in note and "expandable_segments:True" in note


def test_values_of_a_search_have_the_plans_that_plan_makes(devices: dict[tuple[Room, Room], Device]) -> None:
    device = devices[Room.TOO_LITTLE, Room.TOO_LITTLE]
    found = search(of_batch, target=device, values=[2, 6, 8], progress=False)
    for point in found.points:
        plan = memfit.plan(of_batch(point.value), target=device, progress=False)
        assert plan.predicted is not None and point.budget_bytes == plan.budget_bytes
        assert (point.peak_bytes, point.peak_reserved_bytes) == (
            plan.predicted.peak_bytes,
            plan.predicted.peak_reserved_bytes,
        )
        assert point.with_care == (plan.predicted.peak_reserved_bytes > device.usable_bytes)
    assert found.largest is not None and found.largest.value == 8 and found.largest.with_care
    assert found.best is not None and not found.best.with_care
    shown = str(found)
    assert "reserved" in shown and "!: with care" in shown and "with room for the caching allocator: up to " in shown


def test_the_largest_batch_without_care_is_found(devices: dict[tuple[Room, Room], Device]) -> None:
    found = search(of_batch, target=devices[Room.TOO_LITTLE, Room.TOO_LITTLE], progress=False)
    safe = found.largest_without_care
    assert found.exact and safe is not None and found.largest is not None
    assert {safe.value + 1} <= {point.value for point in found.points} or safe is found.largest
