"""The program's optimum is what trying every plan finds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.solve.checkpoint import CheckpointModel
from memfit.solve.classes import ClassModel
from memfit.solve.dp import WIDTHS, DpSolution, DynamicProgram
from memfit.solve.milp import Limits, Status
from memfit.solve.min_budget import min_budget
from memfit.solve.program import Program
from memfit.solve.search import SAME_MS, choose_most_freed, is_usable, search
from tests.solve.random_programs import (
    best_by_trying_all,
    every_plan,
    holds,
    many_layers,
    near_equal_layers,
    programs,
    programs_of_two_passes,
    unmirrored_programs,
)

RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def check_optimum(program: Program) -> None:
    expected = best_by_trying_all(program)
    found = search(program)
    if expected is None:
        assert found.status is Status.INFEASIBLE and found.choice is None
        return
    assert found.status is Status.OPTIMAL and found.choice is not None
    assert holds(program, found.choice)
    assert math.isclose(found.recompute_ms, expected, abs_tol=1e-6)
    assert found.gap < 1e-9


@RELAXED
@given(programs())
def test_the_optimum_of_random_module_trees_is_that_of_trying_all_plans(program: Program) -> None:
    check_optimum(program)


@RELAXED
@given(programs(layers=True))
def test_the_optimum_of_equal_layers_is_that_of_trying_all_plans(program: Program) -> None:
    check_optimum(program)


@RELAXED
@given(near_equal_layers())
def test_the_optimum_of_nested_and_nearly_equal_layers_is_that_of_trying_all_plans(program: Program) -> None:
    check_optimum(program)


@RELAXED
@given(programs_of_two_passes())
def test_the_optimum_of_accumulated_passes_is_that_of_trying_all_plans(program: Program) -> None:
    check_optimum(program)


@RELAXED
@given(unmirrored_programs())
def test_the_optimum_is_found_too_when_backward_does_not_mirror_forward(program: Program) -> None:
    check_optimum(program)


def solved_by_dp(program: Program, widths: tuple[int, ...] = WIDTHS) -> DpSolution:
    dp = DynamicProgram.of(program)
    assert dp is not None
    return dp.solve(program.budget_bytes, widths=widths)


@RELAXED
@given(programs() | near_equal_layers() | programs_of_two_passes())
def test_the_dynamic_program_alone_proves_the_optimum_where_backward_mirrors_forward(program: Program) -> None:
    expected = best_by_trying_all(program)
    found = solved_by_dp(program)
    if expected is None:
        assert found.choice is None and math.isinf(found.bound_ms)
    else:
        assert found.choice is not None and holds(program, found.choice)
        assert math.isclose(program.recompute_ms(found.choice), expected, abs_tol=1e-6)
        assert math.isclose(found.time_ms, expected, abs_tol=1e-6)
        assert math.isclose(found.bound_ms, expected, abs_tol=1e-6)


@RELAXED
@given(many_layers(), st.sampled_from([(1,), (2,), (1, 2, 3)]))
def test_a_beam_too_narrow_to_prove_a_plan_has_a_true_bound(program: Program, widths: tuple[int, ...]) -> None:
    best = solved_by_dp(program)
    assert best.time_ms == best.bound_ms
    found = solved_by_dp(program, widths)
    assert found.bound_ms <= best.time_ms <= found.time_ms
    if found.choice is not None:
        assert holds(program, found.choice)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(many_layers())
def test_the_dynamic_program_and_the_full_program_agree_on_more_layers_than_can_be_tried(program: Program) -> None:
    found = solved_by_dp(program)
    solved = CheckpointModel(program).milp.solve(Limits())
    assert (found.choice is None) == (solved.status is Status.INFEASIBLE)
    if found.choice is not None:
        assert math.isclose(found.time_ms, solved.objective, abs_tol=1e-5)


@RELAXED
@given(unmirrored_programs())
def test_bounds_of_relaxations_are_true_when_backward_does_not_mirror_forward(program: Program) -> None:
    expected = best_by_trying_all(program)
    if expected is None:
        return
    assert solved_by_dp(program).bound_ms <= expected + 1e-6
    model = ClassModel(program)
    for _ in range(10):
        relaxed = model.milp.solve(Limits())
        assert relaxed.bound <= expected + 1e-6
        if not model.add_broken_rows(model.assign(relaxed.values)):
            break


@RELAXED
@given(programs())
def test_the_full_program_alone_finds_the_optimum_too(program: Program) -> None:
    expected = best_by_trying_all(program)
    model = CheckpointModel(program)
    solved = model.milp.solve(Limits())
    if expected is None:
        assert solved.status is Status.INFEASIBLE
    else:
        assert math.isclose(solved.objective, expected, abs_tol=1e-6)
        assert is_usable(program, model.choice_of(solved.values))


@RELAXED
@given(programs())
def test_a_level_is_the_same_whether_a_plan_is_judged_by_row_or_by_op(program: Program) -> None:
    random = np.random.default_rng(0)
    for _ in range(5):
        policies = [random.integers(-1, len(each.policies)) for each in program.candidates]
        choice = np.array(policies, np.int64)
        if not program.nested(choice):
            assert is_usable(program, choice) == holds(program, choice)


@RELAXED
@given(programs() | near_equal_layers() | unmirrored_programs())
def test_the_least_budget_is_met_and_one_byte_less_is_not(program: Program) -> None:
    least = min_budget(program)
    if any(candidate.forced for candidate in program.candidates) and least is None:
        return  # two that must be checkpointed lie inside one another
    assert least is not None
    at = Program(program.before, program.during, least.peak_bytes, program.candidates)
    assert search(at).status is Status.OPTIMAL
    below = Program(program.before, program.during, least.peak_bytes - 1, program.candidates)
    assert best_by_trying_all(below) is None


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(layers=True))
def test_more_budget_never_takes_more_time(program: Program) -> None:
    last = math.inf
    for budget in np.linspace(program.budget_bytes, int(program.during.max()), 5).astype(int).tolist():
        found = search(Program(program.before, program.during, budget, program.candidates))
        if found.choice is not None:
            assert found.recompute_ms <= last + 1e-9
            last = found.recompute_ms


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(layers=True))
def test_a_first_answer_that_is_the_best_stays(program: Program) -> None:
    found = search(program)
    if found.choice is not None:
        assert search(program, start=found.choice).recompute_ms == found.recompute_ms


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_the_choice_that_drops_most_is_a_plan(program: Program) -> None:
    plans = every_plan(program)
    if plans:
        choice = choose_most_freed(program)
        assert not program.nested(choice)
        most = max(sum(policy.discarded_bytes for _, policy in program.chosen(plan)) for plan in plans)
        assert sum(policy.discarded_bytes for _, policy in program.chosen(choice)) == most


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(layers=True))
def test_however_short_the_time_what_is_returned_holds_and_its_bound_is_true(program: Program) -> None:
    found = search(program, Limits(time_limit_s=0.0))
    expected = best_by_trying_all(program)
    if found.choice is not None:
        assert expected is not None and holds(program, found.choice)
        assert found.bound_ms <= expected + 1e-6 <= found.recompute_ms + 2e-6
    elif found.status is Status.INFEASIBLE:
        assert expected is None


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(programs(), programs(layers=True), programs_of_two_passes(), unmirrored_programs()),
    st.sampled_from([0.0, 0.5, 0.999, 1.001, 2.0]),
)
def test_a_search_with_a_cutoff_finds_the_optimum_below_it_or_proves_that_there_is_none(
    program: Program, part: float
) -> None:
    expected = best_by_trying_all(program)
    cutoff_ms = part * (1.0 if expected is None else expected)
    found = search(program, cutoff_ms=cutoff_ms)
    if found.choice is not None:
        assert expected is not None and holds(program, found.choice)
    if expected is not None and expected < cutoff_ms - 2 * SAME_MS:
        assert found.status is Status.OPTIMAL
        assert math.isclose(found.recompute_ms, expected, abs_tol=1e-6)
    else:
        assert found.bound_ms >= min(cutoff_ms, math.inf if expected is None else expected) - 2 * SAME_MS
    if expected is not None:
        assert found.bound_ms <= expected + SAME_MS


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(programs(), programs(layers=True), programs_of_two_passes()), st.sampled_from([0.3, 0.9, 0.999]))
def test_a_cutoff_below_the_optimum_is_proven_without_an_integer_program(program: Program, part: float) -> None:
    expected = best_by_trying_all(program)
    if not expected:
        return

    def never(*_: object) -> None:
        raise AssertionError("the dynamic program has proven it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memfit.solve.search._by_milp", never)
        patch.setattr("memfit.solve.search._by_classes", never)
        found = search(program, cutoff_ms=part * expected)
    assert found.status in (Status.FEASIBLE, Status.UNKNOWN, Status.OPTIMAL)
    assert part * expected - 2 * SAME_MS <= found.bound_ms <= expected + SAME_MS


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(programs(), programs(layers=True), programs_of_two_passes(), unmirrored_programs()),
    st.sampled_from([0.01, 0.2, 1.0]),
    st.sampled_from([0.5, 1.1, math.inf]),
)
def test_a_plan_within_the_slack_is_good_enough_and_its_bound_is_true(
    program: Program, part: float, cutoff_part: float
) -> None:
    """Also with a cutoff, to which the slack does not apply: it is proven that no plan is below, or one is found."""
    expected = best_by_trying_all(program)
    slack_ms = part * (expected or 1.0)
    cutoff_ms = cutoff_part * (expected or 1.0)
    found = search(program, Limits(slack_ms=slack_ms), cutoff_ms=cutoff_ms)
    if expected is None:
        assert found.choice is None
        return
    assert found.bound_ms <= expected + SAME_MS
    if cutoff_part < 1.0:
        assert found.bound_ms >= cutoff_ms - 2 * SAME_MS or found.recompute_ms <= found.bound_ms + slack_ms + SAME_MS
        return
    assert found.choice is not None and holds(program, found.choice)
    assert found.recompute_ms <= expected + slack_ms + SAME_MS
