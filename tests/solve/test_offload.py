"""Plans that save, recompute and offload: the optimum is that of trying all, and the replay is what rows say."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from llama import Shape, training_step

import memfit
from memfit.capture import NO_INDEX, Trace
from memfit.cost import Roofline, Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.solve import Problem, Program, SolveOptions, Status, solve
from memfit.solve.checkpoint import CheckpointModel
from memfit.solve.classes import ClassModel
from memfit.solve.dp import DynamicProgram
from memfit.solve.milp import Limits
from memfit.solve.min_budget import min_budget
from memfit.solve.search import search
from tests.solve.random_programs import best_by_trying_all, every_plan, holds, offloading_programs

RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@RELAXED
@given(offloading_programs())
def test_the_dynamic_program_proves_the_optimum_of_trying_all_plans_with_offload(program: Program) -> None:
    expected = best_by_trying_all(program)
    dp = DynamicProgram.of(program)
    assert dp is not None
    found = dp.solve(program.budget_bytes)
    if expected is None:
        assert found.choice is None and math.isinf(found.bound_ms)
        return
    assert found.choice is not None and holds(program, found.choice)
    assert math.isclose(program.recompute_ms(found.choice), expected, abs_tol=1e-6)
    assert math.isclose(found.bound_ms, expected, abs_tol=1e-6)


@RELAXED
@given(offloading_programs(mirrored=False))
def test_the_optimum_with_offload_is_found_too_when_backward_does_not_mirror_forward(program: Program) -> None:
    expected = best_by_trying_all(program)
    dp = DynamicProgram.of(program)
    assert dp is not None
    assert dp.solve(program.budget_bytes).bound_ms <= (math.inf if expected is None else expected + 1e-6)
    found = search(program)
    if expected is None:
        assert found.status is Status.INFEASIBLE
        return
    assert found.choice is not None and holds(program, found.choice)
    assert found.status is Status.OPTIMAL and math.isclose(found.recompute_ms, expected, abs_tol=1e-6)


@FEW
@given(offloading_programs() | offloading_programs(mirrored=False))
def test_the_full_program_and_the_classes_agree_with_offload(program: Program) -> None:
    expected = best_by_trying_all(program)
    model = CheckpointModel(program)
    solved = model.milp.solve(Limits())
    if expected is None:
        assert solved.status is Status.INFEASIBLE
        return
    assert math.isclose(solved.objective, expected, abs_tol=1e-6)
    assert holds(program, model.choice_of(solved.values))
    assert ClassModel(program).milp.solve(Limits()).bound <= expected + 1e-6


@FEW
@given(offloading_programs())
def test_the_smallest_budget_with_offload_is_that_of_trying_all_plans(program: Program) -> None:
    found = min_budget(program)
    assert found is not None and found.proven
    assert found.peak_bytes == min(program.peak_bytes(choice) for choice in every_plan(program))


# ---- Real steps ----

SHAPE = Shape(layers=4, hidden=512, heads=8, key_value_heads=4, feed_forward=1024, vocabulary=8000)


@pytest.fixture(scope="module")
def captured() -> Trace:
    return memfit.trace(training_step(SHAPE, length=2048, dtype=torch.float32), target="h100-sxm")


def problem_of(trace: Trace, **options: bool) -> Problem:
    return Problem.of(Runtime.of(trace, Roofline()), Target.parse("h100-sxm"), SolveOptions(**options))


def test_offload_is_never_slower_and_its_replay_fits(captured: Trace) -> None:
    plain, problem = problem_of(captured), problem_of(captured, offload=True)
    least = plain.min_budget
    assert least is not None
    faster = 0
    for part in (0.2, 0.5, 0.8):
        budget = int(least.peak_bytes + part * (plain.baseline_bytes - least.peak_bytes))
        without, found = solve(plain, budget), solve(problem, budget)
        assert found.status is Status.OPTIMAL and found.replay is not None and found.gap == 0
        assert found.replay.peak_bytes <= budget
        assert found.recompute_ms <= without.recompute_ms + 1e-9
        faster += found.recompute_ms < without.recompute_ms
    assert faster == 3


def test_the_smallest_budget_is_no_larger_with_offload(captured: Trace) -> None:
    without, found = problem_of(captured).min_budget, problem_of(captured, offload=True).min_budget
    assert without is not None and found is not None and found.peak_bytes <= without.peak_bytes


def test_what_is_offloaded_is_there_until_the_next_unit_ended_and_from_its_backward_on(captured: Trace) -> None:
    problem = problem_of(captured, offload=True)
    program = problem.program(1)
    checked = 0
    for index, candidate in enumerate(program.candidates):
        for number, policy in enumerate(candidate.policies):
            if policy.stop >= 0 or candidate.window is None:
                continue
            choice = np.full(len(program.candidates), NO_INDEX, np.int64)
            choice[index] = number
            judged = problem.replay([(candidate.unit, policy)])
            change = problem.replay(()).during_bytes - judged.during_step_bytes
            expected = np.zeros_like(change)
            expected[candidate.window.next.end : candidate.window.next.backward_begin] = policy.offloaded_bytes
            assert np.array_equal(change, expected)
            assert np.array_equal(change, program.freed(choice))
            checked += 1
    assert checked


def test_a_recompute_beside_copies_finds_them_back(captured: Trace) -> None:
    """The next unit's recompute is as much higher as was offloaded beside it: copies are back ahead of it."""
    problem = problem_of(captured, offload=True)
    by_name = {candidate.unit.name: candidate for candidate in problem.candidates}
    first, second = by_name["layers.1"], by_name["layers.2"]
    assert first.window is not None and first.window.next == second.unit
    offloads = max((each for each in first.policies if each.stop < 0), key=lambda each: each.offloaded_bytes)
    recomputes = next(each for each in second.policies if each.stop >= 0 and not each.offload)
    alone = problem.replay([(second.unit, recomputes)])
    both = problem.replay([(first.unit, offloads), (second.unit, recomputes)])
    assert np.array_equal(
        both.during_bytes[both.recompute_instants(0)], alone.during_bytes[alone.recompute_instants(0)]
    )
    before = int(both.step_instants[second.unit.backward_begin - 1])
    assert alone.during_bytes[before] - both.during_bytes[before] == offloads.offloaded_bytes


def test_equal_layers_share_a_frontier_with_offload_where_the_next_ones_are_equal(captured: Trace) -> None:
    frontiers = {candidate.unit.name: candidate.frontier for candidate in problem_of(captured, offload=True).candidates}
    assert frontiers["layers.1"] is frontiers["layers.2"]
    assert any(policy.offload for policy in frontiers["layers.2"].policies)
    assert frontiers["layers.3"] is not frontiers["layers.2"]  # beside the last norm there is less time


@pytest.mark.parametrize("part", [0.0, 0.5, 0.8])
def test_units_offload_no_more_than_the_host_has_room_for(captured: Trace, part: float) -> None:
    """Any choice stays within the limit, in pinned buffers of powers of two, and more room is never slower."""
    unlimited = problem_of(captured, offload=True)
    least = unlimited.min_budget
    assert least is not None
    budget = int(least.peak_bytes + 0.4 * (unlimited.baseline_bytes - least.peak_bytes))

    def taken(problem: Problem, budget: int) -> tuple[int, float]:
        found = solve(problem, budget)
        return problem.host_bytes((each.unit, policy) for each, policy in found.chosen), found.recompute_ms

    needed, fastest_ms = taken(unlimited, budget)
    assert needed > 0
    limit = int(part * needed)
    target = Target.parse("h100-sxm", host_memory=limit)
    limited = Problem.of(Runtime.of(captured, Roofline()), target, SolveOptions(offload=True))
    most = (max(limited.host_bytes([(each.unit, one)]) for one in each.policies) for each in limited.candidates)
    assert sum(most) <= limit
    assert any(policy.offload for each in limited.candidates for policy in each.policies) == (part > 0)
    assert taken(limited, budget)[1] >= fastest_ms - 1e-9
    enough = Target.parse("h100-sxm", host_memory=100 * needed)
    assert taken(replace(unlimited, target=enough), budget)[1] == pytest.approx(fastest_ms)


def test_a_plan_with_offload_is_a_document_that_says_over_what(captured: Trace) -> None:
    problem = problem_of(captured)
    least = problem.min_budget
    assert least is not None
    budget = (least.peak_bytes + problem.baseline_bytes) // 2
    plan = memfit.plan(captured, target="h100-sxm", budget=budget, options=SolveOptions(offload=True))
    again = memfit.Plan.from_json(plan.to_json())
    assert again == plan and plan.predicted is not None and plan.predicted.peak_bytes <= budget
    offloading = [entry for entry in plan.checkpoint if entry.offload]
    assert offloading and plan.offload_link and plan.offload_link.to_host_bytes_per_s > 0
    modules = {unit.module for unit in problem.units}
    assert all(entry.offload_next in modules for entry in offloading)
    assert all(entry.offload_next is msgspec.UNSET for entry in plan.checkpoint if not entry.offload)
    assert any("offload" in note for note in plan.notes)
    assert any("of pinned host memory" in note for note in plan.notes)
    limited = memfit.plan(
        captured, target=Target.parse("h100-sxm", host_memory=0), budget=budget, options=SolveOptions(offload=True)
    )
    assert limited.target.host_memory_bytes == 0 == limited.target.settings["host_memory"]
    assert not limited.offload_link
    assert plan.predicted.step_ms == pytest.approx(
        plan.baseline.step_ms + plan.predicted.recompute_ms + (plan.predicted.exposed_offload_ms or 0.0)
    )


def test_a_cpu_whose_disk_was_not_measured_does_not_offload() -> None:
    shape = Shape(layers=2, hidden=32, heads=2, key_value_heads=1, feed_forward=64, vocabulary=100)
    step = training_step(shape, length=16, dtype=torch.float32)
    with pytest.raises(InputError, match="memfit calibrate"):
        memfit.plan(step, target="cpu", options=SolveOptions(offload=True))
