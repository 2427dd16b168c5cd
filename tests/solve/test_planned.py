"""The step under a plan as allocations: levels, events, and what the allocator reserves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from llama import Shape, training_step
from torch import nn

import memfit
from memfit import Step, spec
from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Phase, Trace
from memfit.cost import Roofline, Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.memory import BETWEEN, CATEGORIES, Interval, Timeline, events, reserved
from memfit.memory.allocator import FREE, simulate
from memfit.solve import Candidate, Problem, Program, minimum_budget_bytes, solve
from memfit.tradeoff import Frontier, Policy, Unit, build_recompute
from memfit.tradeoff.columns import TraceColumns
from memfit.tradeoff.policy import Role, UnitColumns, lost_inputs
from tests.solve.level_replay import Replay, replay_levels
from tests.solve.planned_steps import facts_of, make, op, planned_steps, policy_saving, storage, unit

MIB = 1 << 20
H100 = Target.parse("h100-sxm").device
CPU = Target.parse("cpu").device
SHAPE = Shape(layers=4, hidden=512, heads=8, key_value_heads=4, feed_forward=1024, vocabulary=8000)
UNIT = unit("unit", 1, 4, 6, 8)
Chosen = list[tuple[Unit, Policy]]


def replay(
    trace_columns: TraceColumns,
    chosen: Iterable[tuple[Unit, Policy]],
    *,
    intervals: tuple[Interval, ...] = (),
    removed: frozenset[int] = frozenset(),
) -> Timeline:
    recomputes = [build_recompute(trace_columns, unit, policy) for unit, policy in chosen]
    rounding = trace_columns.rounding_bytes
    return Timeline.of(trace_columns.trace, rounding, recomputes=recomputes, intervals=intervals, removed=removed)


def small_step(scale: int = 1, device: str = "cpu") -> TraceColumns:
    """A parameter and its state; a unit of ops 1 to 3 whose input goes with op 1; its backward is ops 6 and 7.

    Storages 3 and 6 are saved by the unit alone, 4 is a temporary of it, 5 its result, which the loss (4) reads.
    """
    ops = (
        op(Phase.FORWARD, makes=(2,)),
        op(Phase.FORWARD, reads=(2, 0), makes=(3,)),
        op(Phase.FORWARD, reads=(3,), makes=(4,), workspace=5 * scale),
        op(Phase.FORWARD, reads=(4,), makes=(5, 6)),
        op(Phase.LOSS, reads=(5,)),
        op(Phase.BACKWARD),
        op(Phase.BACKWARD),
        op(Phase.BACKWARD),
        op(Phase.OPTIMIZER, reads=(0, 1)),
    )
    storages = (
        storage(100 * scale, BEFORE_STEP, AFTER_STEP, category=Category.PARAMETER),
        storage(50 * scale, BEFORE_STEP, AFTER_STEP, category=Category.OPTIMIZER_STATE),
        storage(10 * scale, 0, 1),
        storage(20 * scale, 1, 6, saved_by=(2,), released=3),
        storage(30 * scale, 2, 3, category=Category.TEMPORARY),
        storage(40 * scale, 3, 4),
        storage(7 * scale, 3, 7, saved_by=(3,)),
    )
    return facts_of(make(ops, storages, device))


def test_a_unit_without_saved_results_is_made_again_in_full() -> None:
    trace_columns = small_step()
    found = replay(trace_columns, [(UNIT, policy_saving(trace_columns, UNIT))])
    assert found.op.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 9]
    assert found.run.tolist() == [NO_INDEX] * 6 + [0] * 3 + [NO_INDEX] * 4
    assert found.during_bytes.tolist() == [160, 180, 215, 257, 200, 160, 180, 215, 257, 177, 157, 150, 150]
    assert found.before_bytes.tolist() == [150, 160, 180, 210, 200, 160, 160, 180, 210, 177, 157, 150, 150]
    again = (7, 8, 9, 10)  # in place of storages 3 to 6
    assert [event[:2] for event in events(found.allocations)] == [
        *((0, 100), (1, 50)),
        (2, 10),
        (3, 20),
        *((4, 30), (11 + 2, 5), (11 + 2, FREE)),
        *((5, 40), (6, 7), (3, FREE), (4, FREE), (6, FREE)),
        (5, FREE),
        (again[0], 20),
        *((again[1], 30), (11 + 7, 5), (11 + 7, FREE)),
        *((again[2], 40), (again[3], 7), (2, FREE), (again[1], FREE), (again[2], FREE)),
        (again[0], FREE),
        (again[3], FREE),
    ]


def test_a_result_that_is_saved_stays_until_the_second_run_is_over() -> None:
    """Op 2 returns storage 4 again: no second workspace, and 4 is there once, held for backward and not temporary."""
    trace_columns = small_step()
    found = replay(trace_columns, [(UNIT, policy_saving(trace_columns, UNIT, 1))])
    assert found.op.tolist() == [0, 1, 2, 3, 4, 5, 1, 3, 6, 7, 8, 9]
    assert found.during_bytes.tolist() == [160, 180, 215, 257, 230, 190, 210, 257, 177, 157, 150, 150]
    assert found.by_category[Category.TEMPORARY].tolist() == [0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0]


def test_what_the_second_run_does_not_reach_is_not_held_for_it() -> None:
    """Op 3 is saved and only op 1 runs again: of what op 3 made, 6 stays for backward and 5 goes with the loss."""
    trace_columns = small_step()
    found = replay(trace_columns, [(UNIT, policy_saving(trace_columns, UNIT, 2))])
    assert found.op.tolist() == [0, 1, 2, 3, 4, 5, 1, 6, 7, 8, 9]
    assert found.during_bytes.tolist() == [160, 180, 215, 257, 207, 167, 187, 177, 157, 150, 150]


def test_what_a_second_run_makes_is_told_from_what_it_replaces() -> None:
    trace_columns = small_step()
    found = replay(trace_columns, [(UNIT, policy_saving(trace_columns, UNIT))])
    assert found.peak_instant == 3 and found.recomputed_unit(3) is None and found.recomputed_unit(8) == "unit"
    largest = found.largest_at(8, 3)
    assert [(each.size_bytes, each.storage, each.remade) for each in largest] == [
        (100, 0, None),
        (50, 1, None),
        (40, 5, "unit"),
    ]
    assert found.by_category_during(8) == {
        Category.PARAMETER: 100,
        Category.ACTIVATION: 77,
        Category.OPTIMIZER_STATE: 50,
        Category.TEMPORARY: 30,
    }


def test_a_unit_that_runs_again_right_after_its_forward_lacks_what_it_dropped() -> None:
    """As a loss may: its results go, and come again before the next op."""
    ops = (op(Phase.FORWARD, makes=(0,)), op(Phase.FORWARD, reads=(0,)), op(Phase.BACKWARD))
    trace_columns = facts_of(make(ops, (storage(10, 0, 2, saved_by=(1,)),)))
    loss = unit("loss", 0, 2, 2, 3)
    assert replay(trace_columns, [(loss, policy_saving(trace_columns, loss))]).during_bytes.tolist() == [
        10,
        10,
        10,
        10,
        0,
    ]


def test_an_input_that_two_units_need_is_there_once_until_the_last_has_run_again() -> None:
    ops = (
        op(Phase.FORWARD, makes=(0,)),
        op(Phase.FORWARD, reads=(0,), makes=(1,)),
        op(Phase.FORWARD, reads=(0,), makes=(2,)),
        op(Phase.LOSS),
        op(Phase.BACKWARD),
        op(Phase.BACKWARD),
    )
    storages = (storage(100, 0, 2), storage(10, 1, 5, saved_by=(1,)), storage(20, 2, 4, saved_by=(2,)))
    trace_columns = facts_of(make(ops, storages))
    units = (unit("first", 1, 2, 5, 6), unit("second", 2, 3, 4, 5))
    chosen = [(each, policy_saving(trace_columns, each)) for each in units]
    found = replay(trace_columns, chosen)
    assert [each.name for each in found.units] == ["second", "first"]
    assert found.op.tolist() == [0, 1, 2, 3, 2, 4, 1, 5, 6]
    assert found.during_bytes.tolist() == [100, 110, 120, 100, 120, 120, 110, 10, 0]


@given(planned_steps())
def test_events_are_well_formed_and_their_level_is_the_timeline(step: tuple[TraceColumns, Chosen]) -> None:
    found = replay(*step)
    lives = found.allocations
    live: dict[int, int] = {}
    during = np.full(lives.instants + 1, NO_INDEX)
    instant = NO_INDEX
    for key, n_bytes, _ in events(found.allocations):
        own = key < len(lives.alloc_at)
        here = int((lives.free_after if n_bytes == FREE else lives.alloc_at)[key]) if own else key - len(lives.alloc_at)
        assert here >= instant, "in the order of instants"
        for passed in range(max(0, instant), here):
            during[passed] = max(during[passed], sum(live.values()))
        instant = here
        if n_bytes == FREE:
            during[instant] = max(during[instant], sum(live.values()))
            assert key in live, "freed once, after its malloc"
            del live[key]
        else:
            assert key not in live and n_bytes >= 0
            live[key] = n_bytes
    for passed in range(max(0, instant), lives.instants + 1):
        during[passed] = max(during[passed], sum(live.values()))
    assert during.tolist() == found.during_bytes.tolist()
    assert set(live) == {number for number in range(len(lives.alloc_at)) if lives.free_after[number] == AFTER_STEP}, (
        "what stays after the step, and nothing else"
    )
    assert simulate(events(found.allocations)).peak_requested_bytes == found.peak_bytes


@given(planned_steps())
def test_levels_are_those_of_the_replay_but_for_what_it_counts_again(step: tuple[TraceColumns, Chosen]) -> None:
    trace_columns, chosen = step
    timeline = Timeline.of(trace_columns.trace)
    judged = replay_levels(program_of(timeline), trace_columns, candidates(chosen))
    compare(trace_columns, chosen, judged, replay(trace_columns, chosen))


def program_of(timeline: Timeline) -> Program:
    return Program(timeline.before_bytes, timeline.during_bytes, 1, ())


def candidates(chosen: Chosen) -> list[tuple[Candidate, Policy]]:
    empty = Frontier(policies=(), exact=True, discardable_bytes=0)
    return [(Candidate(unit=u, policies=(), frontier=empty, outer=NO_INDEX), policy) for u, policy in chosen]


def compare(trace_columns: TraceColumns, chosen: Chosen, judged: Replay, found: Timeline) -> None:
    """The replay's levels, less `counted_again`, are those of the timeline: while ops run and run again."""
    again, in_runs = counted_again(trace_columns, chosen)
    assert (judged.during_bytes - again).tolist() == found.during_bytes[found.step_instants].tolist()
    policies = {each.name: policy for each, policy in chosen}
    reruns = {each.unit: each.during_bytes for each in judged.reruns}
    for number, each in enumerate(found.units):
        levels = reruns[each.name][list(policies[each.name].recomputed)] - in_runs[each.name]
        assert levels.tolist() == found.during_bytes[found.recompute_instants(number)].tolist()


def counted_again(trace_columns: TraceColumns, chosen: Chosen) -> tuple[np.ndarray, dict[str, int]]:
    """What the replay counts beyond one life of each storage that units newly hold, by op and by second run.

    It counts an input from the end of each unit that needs it, a saved result from its end in the unit.
    """
    held: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for each, policy in chosen:
        problem = UnitColumns.of(trace_columns, each)
        for number in lost_inputs(trace_columns, each).tolist():
            held[number].append((each.end, each.backward_begin))
        low, high = np.searchsorted(trace_columns.forward_alloc_at, (each.begin, each.end))
        for place, number in enumerate(trace_columns.forward_storages[low:high].tolist()):
            alloc_at, ends = int(problem.alloc_at[place]), int(problem.ends[place])
            if problem.role[place] == Role.FRESH and alloc_at in policy.saved and alloc_at <= policy.stop:
                held[number].append((min(each.begin + ends + 1, each.end), each.backward_begin))
    moments = np.arange(len(trace_columns.trace.ops) + 1)
    by_op = np.zeros(len(moments), np.int64)
    in_runs = dict.fromkeys((each.name for each, _ in chosen), 0)
    for number, spans in held.items():
        size, free_after, until = (
            int(trace_columns.size[number]),
            int(trace_columns.free_after[number]),
            max(again for _, again in spans),
        )
        by_op -= size * ((free_after < moments) & (moments < until))
        for begin, again in spans:
            by_op += size * ((begin <= moments) & (moments < again))
        for each, _ in chosen:
            at = each.backward_begin
            counted = sum(begin < at <= again for begin, again in spans)
            in_runs[each.name] += size * (counted - int(free_after < at <= until))
    return by_op, in_runs


class WideNorm(nn.Module):
    """A norm in another dtype: autograd does not save its input, so a plan that checkpoints it must hold that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.double()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = WideNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mixed_step() -> Step:
    def build() -> nn.Module:
        return nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 8))

    return Step(build, spec((4096, 64)), loss=lambda out, _: out.square().mean())


def traced(name: str) -> Trace:
    if name == "mixed":
        return memfit.trace(mixed_step(), target="h100-sxm")
    step = training_step(SHAPE, length=512, dtype=getattr(torch, name))
    return memfit.trace(step, target="h100-sxm")


@pytest.fixture(scope="module", params=["float32", "bfloat16", "mixed"])
def problem(request: pytest.FixtureRequest) -> Problem:
    return Problem.of(Runtime.of(traced(request.param), Roofline()), Target.parse("h100-sxm"))


def budgets(problem: Problem) -> list[int]:
    least = minimum_budget_bytes(problem)
    assert least is not None
    return [least + (problem.baseline_bytes - least) * part // 4 for part in range(5)]


def find_units(chosen: tuple[tuple[Candidate, Policy], ...]) -> Chosen:
    return [(candidate.unit, policy) for candidate, policy in chosen]


def test_plans_of_real_models_have_the_levels_that_judged_them(problem: Problem) -> None:
    some = False
    for budget in budgets(problem):
        solved = solve(problem, budget)
        chosen = find_units(solved.chosen)
        some |= bool(chosen)
        found = replay(problem.trace_columns, chosen)
        assert solved.replay is not None
        compare(
            problem.trace_columns,
            chosen,
            replay_levels(problem.program(budget), problem.trace_columns, solved.chosen),
            found,
        )
        assert found.peak_bytes == solved.replay.peak_bytes
        taken_ms = found.instant_ms(problem.runtime.op_ms)
        assert taken_ms.sum() == pytest.approx(problem.runtime.total_ms + solved.recompute_ms)
        for number, each in enumerate(found.units):
            for instant in found.recompute_instants(number).tolist():
                assert found.recomputed_unit(instant) == each.name
                assert each.begin <= found.op[instant] < each.end
                assert each.module in ("", found.module_of(instant)) or found.module_of(instant).startswith(each.module)
    assert some, "no budget needed a plan"


def test_held_inputs_are_those_that_the_frontier_counts(problem: Problem) -> None:
    trace_columns = problem.trace_columns
    for candidate in problem.candidates:
        held = int(trace_columns.size[lost_inputs(trace_columns, candidate.unit)].sum())
        assert held == UnitColumns.of(trace_columns, candidate.unit).input_bytes


def test_without_a_plan_everything_is_as_captured(problem: Problem) -> None:
    trace = problem.trace_columns.trace
    found = replay(problem.trace_columns, ())
    assert np.array_equal(found.during_by_row, problem.timeline.during_by_row)
    assert np.array_equal(found.before_by_row, problem.timeline.before_by_row)
    assert reserved(found.allocations, H100) == reserved(trace, H100)


def test_a_tight_plan_reserves_no_more_than_no_plan_and_no_less_than_its_peak(problem: Problem) -> None:
    solved = solve(problem, budgets(problem)[0])
    found = replay(problem.trace_columns, find_units(solved.chosen))
    settled = reserved(found.allocations, H100)
    assert settled.peak_requested_bytes == int(found.allocations.levels()[1].sum(axis=0).max())
    assert found.peak_bytes <= settled.peak_allocated_bytes <= settled.peak_reserved_bytes
    whole = reserved(problem.trace_columns.trace, H100)
    assert settled.peak_allocated_bytes < whole.peak_allocated_bytes
    assert settled.peak_reserved_bytes <= whole.peak_reserved_bytes


def test_reserved_memory_of_the_small_step_by_hand() -> None:
    """In MiB: segments are as large as what they are made for, 20 below 10."""
    trace_columns = small_step(MIB, "h100-sxm")
    found = replay(trace_columns, [(UNIT, policy_saving(trace_columns, UNIT))])
    result = reserved(found.allocations, H100)
    assert found.peak_bytes == result.peak_allocated_bytes == 257 * MIB
    # The parameter, the input (held to the end of the second run), storages 3, 4 and 5, and a segment of 20 for the
    # workspace, then for storage 6. The second run finds them free. None of them is large enough for the state.
    assert result.first_step_reserved_bytes == (100 + 10 + 20 + 30 + 40 + 20 + 50) * MIB
    assert (result.peak_reserved_bytes, result.steps) == (result.first_step_reserved_bytes, 2)


def test_the_op_that_fails_in_a_second_run_is_named_as_in_the_trace() -> None:
    """In MiB. A buffer of 100 is made ahead of the second run, 320 in all; the state then takes half of its block.

    In the second step the cache is given back for the buffer: 10 of the input, 100 of the parameter and two of 100
    are left. Storages 3 and 4 fill the half, a workspace takes 20, and 40 for storage 5 would be 370.
    """
    trace_columns = small_step(MIB, "h100-sxm")
    buffer = Interval(category=Category.COMMUNICATION, size_bytes=100 * MIB, begin=6, end=8)
    found = replay(trace_columns, [(UNIT, policy_saving(trace_columns, UNIT))], intervals=(buffer,))
    failed = reserved(found.allocations, H100, limit_bytes=340 * MIB)
    assert (failed.out_of_memory_op, failed.steps, failed.retries) == (3, 2, 2)
    assert reserved(found.allocations, H100, limit_bytes=420 * MIB).out_of_memory_op is None


def test_without_a_cache_reserved_is_the_peak() -> None:
    trace_columns = small_step()
    found = replay(trace_columns, [(UNIT, policy_saving(trace_columns, UNIT))])
    result = reserved(found.allocations, CPU)
    assert result.peak_reserved_bytes == result.peak_allocated_bytes == found.peak_bytes == 257


def test_intervals_of_sharding_stand_for_the_storages_they_replace() -> None:
    """A shard of 25 for the parameter; it is gathered (100) ahead of the forward and, before the second run, ahead
    of the backward; a gradient (9) is made by op 6 itself and stays."""
    trace_columns = small_step()
    intervals = (
        Interval(category=Category.PARAMETER, size_bytes=25, begin=BEFORE_STEP, end=AFTER_STEP),
        Interval(category=Category.GATHERED_PARAMETER, size_bytes=100, begin=1, end=4, module="unit"),
        Interval(category=Category.GATHERED_PARAMETER, size_bytes=100, begin=6, end=8, module="unit"),
        Interval(category=Category.GRADIENT, size_bytes=9, begin=6, end=AFTER_STEP, ahead=False),
        Interval(category=Category.COMMUNICATION, size_bytes=3, begin=5, end=5),
    )
    found = replay(
        trace_columns, [(UNIT, policy_saving(trace_columns, UNIT))], intervals=intervals, removed=frozenset({0})
    )
    plain = replay(trace_columns, [(UNIT, policy_saving(trace_columns, UNIT))])
    added = found.during_bytes - plain.during_bytes
    assert added.tolist() == [-75, 25, 25, 25, -75, -75, 25, 25, 25, 34, 34, -66, -66]
    assert found.by_category[Category.GATHERED_PARAMETER].tolist() == [0, *[100] * 3, 0, 0, *[100] * 5, 0, 0]
    assert {(each.module, each.storage, each.category) for each in found.largest_at(7, 1)} == {
        ("unit", NO_INDEX, Category.GATHERED_PARAMETER)
    }
    assert simulate(events(found.allocations)).peak_requested_bytes == found.peak_bytes


def test_what_sharding_makes_before_it_frees_between_two_ops_is_an_instant() -> None:
    """Before op 6 it makes 20 while 10 of before are still there, then 5 that go at once, then 1 that stays longer."""
    trace_columns = small_step()
    moved = Category.COMMUNICATION
    intervals = (
        Interval(category=moved, size_bytes=10, begin=1, end=6, freed_order=1),
        Interval(category=moved, size_bytes=20, begin=6, end=8, made_order=0, freed_order=0, module="unit"),
        Interval(category=moved, size_bytes=5, begin=6, end=6, made_order=2, freed_order=3),
        Interval(category=moved, size_bytes=1, begin=6, end=7, made_order=4),
    )
    found = replay(trace_columns, [(UNIT, policy_saving(trace_columns, UNIT))], intervals=intervals)
    assert found.op.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 1, 2, 3, 6, 7, 8, 9]
    assert found.run.tolist() == [NO_INDEX] * 6 + [BETWEEN] * 2 + [0] * 3 + [NO_INDEX] * 4
    levels = found.by_category[moved].tolist()
    assert levels == [0, 10, 10, 10, 10, 10, 30, 25, 21, 21, 21, 21, 20, 0, 0]
    assert found.during_bytes[5:8].tolist() == [170, 190, 185]
    assert found.instant_ms(np.ones(9)).tolist() == [1] * 6 + [0] * 2 + [1] * 6 + [0]
    assert found.module_of(6) == "" and found.recomputed_unit(6) is None
    assert simulate(events(found.allocations)).peak_requested_bytes == found.peak_bytes == 257 + 21


def test_state_that_is_sharded_is_made_by_the_first_optimizer_step() -> None:
    """It takes the block of storage 4 (30 MiB); from then on 4 takes that of 5 (40), and 5 needs another."""
    trace_columns = small_step(MIB, "h100-sxm")
    shard = Interval(category=Category.OPTIMIZER_STATE, size_bytes=30 * MIB, begin=BEFORE_STEP, end=AFTER_STEP)
    found = replay(trace_columns, (), intervals=(shard,), removed=frozenset({1}))
    result = reserved(found.allocations, H100)
    assert result.first_step_reserved_bytes == (100 + 10 + 20 + 30 + 40) * MIB
    assert result.peak_reserved_bytes == result.first_step_reserved_bytes + 40 * MIB


def test_intervals_add_up_over_a_real_plan(problem: Problem) -> None:
    chosen = find_units(solve(problem, budgets(problem)[1]).chosen)
    plain = replay(problem.trace_columns, chosen)
    ops = len(problem.trace_columns.trace.ops)
    intervals = [
        Interval(category=Category.COMMUNICATION, size_bytes=512 * (1 + i), begin=i, end=min(2 * i + 3, ops))
        for i in range(0, ops // 2, 7)
    ]
    found = replay(problem.trace_columns, chosen, intervals=intervals)
    added = (found.during_by_row - plain.during_by_row)[CATEGORIES.index(Category.COMMUNICATION)]
    expected = np.zeros(ops + 1, np.int64)
    for each in intervals:
        expected[each.begin : each.end] += each.size_bytes
    assert np.array_equal(added[found.step_instants], expected)
    # While a unit runs again, what is made ahead of the op after it is there, and what goes before that op is not.
    for number, each in enumerate(found.units):
        assert set(added[found.recompute_instants(number)].tolist()) == {int(expected[each.backward_begin])}


def test_units_inside_one_another_are_refused() -> None:
    trace_columns = small_step()
    policy = policy_saving(trace_columns, UNIT)
    inner = (unit("inner", 2, 3, 6, 7), replace(policy, recomputed=(0,)))
    with pytest.raises(InputError, match="'inner' lies inside 'unit'"):
        replay(trace_columns, [(UNIT, policy), inner])


@pytest.mark.parametrize(("begin", "end"), [(10, NO_INDEX), (-2, 3), (0, -5)])
def test_an_interval_outside_of_the_step_is_refused(begin: int, end: int) -> None:
    interval = Interval(category=Category.PARAMETER, size_bytes=1, begin=begin, end=end)
    with pytest.raises(InputError, match="9 ops"):
        replay(small_step(), (), intervals=(interval,))
