"""Which ops of a module to save, beside all choices tried one by one."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._tools.sac_estimator import SACStats as TheirStats

from memfit.compat import SACStats
from memfit.compat.sac_milp import SACDecision, get_optimal_checkpointing_policy_per_module
from memfit.errors import InputError

EIGHT = SACStats(
    func_names=["op"] * 8,
    runtimes=[5, 5, 8, 15, 15, 9, 1, 5],
    memory=[0, 100, 100, 120, 0, 100, 0, 0],
    view_like_ops=[6],
    rand_ops=[4],
    saved_autograd_ops=[],
    inplace_ops=[(0, 0), (7, 5)],
    force_store_random=False,
)


def plain(runtimes: list[float], memory: list[int]) -> SACStats:
    """Ops that have nothing to do with each other."""
    return SACStats(
        func_names=["op"] * len(memory),
        runtimes=runtimes,
        memory=memory,
        view_like_ops=[],
        rand_ops=[],
        saved_autograd_ops=[],
        inplace_ops=[],
        force_store_random=False,
    )


def keeps_the_rules(stats: SACStats, choice: tuple[int, ...], budget: float) -> bool:
    random = [choice[op] for op in stats.rand_ops]
    return (
        (all(random) if stats.force_store_random else len(set(random)) <= 1)
        and not any(choice[op] for op in stats.view_like_ops)
        and all(choice[op] == (1 if op == parent else choice[parent]) for op, parent in stats.inplace_ops)
        and sum(size for size, saved in zip(stats.memory, choice, strict=True) if saved)
        <= math.ceil(budget * sum(stats.memory))
    )


def saved_ms(stats: SACStats, choice: tuple[int, ...]) -> float:
    return math.fsum(ms for ms, saved in zip(stats.runtimes, choice, strict=True) if saved)


@st.composite
def modules(draw: st.DrawFn) -> SACStats:
    count = draw(st.integers(1, 10))
    times = st.sampled_from((0.0, 1.0, 2.5)) | st.floats(0.0, 10.0)
    sizes = st.sampled_from((0, 100, 200)) | st.integers(0, 500)
    ops = st.lists(st.integers(0, count - 1), max_size=3, unique=True).map(sorted)
    written = draw(ops)
    return replace(
        plain(
            draw(st.lists(times, min_size=count, max_size=count)), draw(st.lists(sizes, min_size=count, max_size=count))
        ),
        view_like_ops=draw(ops),
        rand_ops=draw(ops),
        inplace_ops=[(op, draw(st.integers(0, op))) for op in written],
        force_store_random=draw(st.booleans()),
    )


@pytest.mark.parametrize("stats", [EIGHT, TheirStats(**asdict(EIGHT))], ids=["memfit", "torch"])
@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0, "10001000"),
        (100 / 420, "10001101"),
        (120 / 420, "10011000"),
        (200 / 420, "10101101"),
        (220 / 420, "10011101"),
        (320 / 420, "10111101"),
        (1, "11111101"),
    ],
)
def test_the_prototypes_example_has_its_known_answers(
    stats: SACStats | TheirStats, budget: float, expected: str
) -> None:
    assert "".join(map(str, get_optimal_checkpointing_policy_per_module(stats, budget))) == expected


@settings(max_examples=200, deadline=None)
@given(modules(), st.sampled_from((0.0, 0.25, 0.5, 0.75, 1.0)) | st.floats(0.0, 1.0))
def test_the_answer_is_the_best_of_all_choices_and_keeps_every_rule(stats: SACStats, budget: float) -> None:
    answer = tuple(get_optimal_checkpointing_policy_per_module(stats, budget))
    choices = [
        choice
        for choice in itertools.product((0, 1), repeat=len(stats.memory))
        if keeps_the_rules(stats, choice, budget)
    ]
    if not choices:
        assert answer == ()
        return
    assert keeps_the_rules(stats, answer, budget)
    best = max(saved_ms(stats, choice) for choice in choices)
    assert saved_ms(stats, answer) == pytest.approx(best, rel=1e-9, abs=1e-6)  # a nanosecond is nothing to the solver


def test_answers_are_plain_numbers_that_equal_the_decisions() -> None:
    answer = get_optimal_checkpointing_policy_per_module(EIGHT, 0.5)
    assert {type(each) for each in answer} == {int}
    assert answer[0] == SACDecision.SAVE and answer[6] == SACDecision.RECOMPUTE


def test_of_equal_ops_the_earliest_are_saved() -> None:
    stats = plain([2.0] * 6, [100] * 6)
    assert get_optimal_checkpointing_policy_per_module(stats, 0.5) == [1, 1, 1, 0, 0, 0]


def test_an_op_without_time_is_not_saved_for_nothing() -> None:
    assert get_optimal_checkpointing_policy_per_module(plain([0.0, 1.0, 0.0], [0, 8, 8]), 1.0) == [0, 1, 0]


def test_many_equal_layers_with_bytes_that_share_no_factor_are_decided_to_the_byte() -> None:
    """One byte less than a fill needs, and the best is another one."""
    sizes, times = (1_000_003, 700_001, 350_003), (10.0, 7.2, 3.4)
    stats = plain([*times] * 200, [*sizes] * 200)
    found = []
    for room in (3 * 1_000_003 + 2 * 700_001, 3 * 1_000_003 + 2 * 700_001 - 1):
        answer = get_optimal_checkpointing_policy_per_module(stats, (room - 0.5) / sum(stats.memory))
        assert sum(size for size, saved in zip(stats.memory, answer, strict=True) if saved) <= room
        fills = (
            sum(count * ms for count, ms in zip(counts, times, strict=True))
            for counts in itertools.product(range(14), repeat=3)
            if sum(count * size for count, size in zip(counts, sizes, strict=True)) <= room
        )
        found.append(saved_ms(stats, tuple(answer)))
        assert found[-1] == pytest.approx(max(fills))
    assert found[0] > found[1]


def test_random_ops_that_cannot_be_replayed_are_saved_or_nothing_is_answered() -> None:
    stats = replace(plain([1.0, 1.0, 9.0], [60, 60, 80]), rand_ops=[0, 1], force_store_random=True)
    assert get_optimal_checkpointing_policy_per_module(stats, 0.6) == [1, 1, 0]
    assert get_optimal_checkpointing_policy_per_module(stats, 0.5) == []


@pytest.mark.parametrize("budget", [-0.1, 1.1, math.nan])
def test_a_budget_that_is_no_share_is_refused(budget: float) -> None:
    with pytest.raises(InputError, match="memory_budget is"):
        get_optimal_checkpointing_policy_per_module(EIGHT, budget)
