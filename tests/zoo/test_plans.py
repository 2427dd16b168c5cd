"""Plans of real models: more budget is never slower, replayed peaks are within it, what cannot be met is said."""

from __future__ import annotations

import pytest
import torch

import memfit
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.solve import Limits, Problem, Solved, Status, minimum_budget_bytes, solve
from memfit.solve.checkpoint import CheckpointModel
from tests.zoo.zoo_models import STEPS

SWEPT = ("llama", "gpt2", "bert", "vit", "unet", "resnet")
SLICE = {"gpt2", "resnet"}
BUDGETS = 50
TIGHT = 0.95


def problem_of(name: str, ranks: int = 1) -> Problem:
    torch.manual_seed(0)
    trace = memfit.trace(STEPS[name](), target="cpu")
    return Problem.of(Runtime.of(trace, Roofline()), Target.parse("cpu", ranks=ranks))


def nothing_is_faster(problem: Problem, solved: Solved) -> bool:
    """Whether the program of all units, asked for anything faster, has no answer; a proof of its own."""
    model = CheckpointModel(problem.program(solved.budget_bytes))
    costs = [
        (x, policy.recompute_ms)
        for candidate, row in zip(model.program.candidates, model.x, strict=True)
        for x, policy in zip(row, candidate.policies, strict=True)
    ]
    model.milp.row(costs, upper=solved.recompute_ms * (1 - 1e-4) - 1e-5)
    return model.milp.solve(Limits()).status is Status.INFEASIBLE


def marked(names: tuple[str, ...]) -> list:
    return [
        pytest.param(name, marks=[pytest.mark.zoo, *([pytest.mark.zoo_slice] if name in SLICE else [])])
        for name in names
    ]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", marked(SWEPT))
def test_more_budget_is_never_slower_and_every_replay_fits(name: str, ranks: int) -> None:
    problem = problem_of(name, ranks)
    least = minimum_budget_bytes(problem)
    assert least is not None
    most = problem.baseline_bytes
    last: Solved | None = None
    for place in range(BUDGETS):
        budget = least + (most - least) * place // (BUDGETS - 1)
        solved = solve(problem, budget)
        assert solved.status is Status.OPTIMAL and solved.gap < 1e-9
        assert solved.replay is not None and solved.replay.peak_bytes <= budget
        if last is not None:
            assert solved.recompute_ms <= last.recompute_ms + 1e-9
        if solved.chosen and solved.replay.peak_bytes < TIGHT * budget:
            assert nothing_is_faster(problem, solved)
        last = solved


@pytest.mark.parametrize("name", marked(tuple(STEPS)))
def test_a_budget_that_cannot_be_met_names_the_smallest_that_can(name: str) -> None:
    problem = problem_of(name)
    hopeless = solve(problem, problem.timeline.start_bytes // 2)
    assert hopeless.status is Status.INFEASIBLE and hopeless.minimum_budget_bytes is not None
    at_least = solve(problem, hopeless.minimum_budget_bytes)
    assert at_least.status is Status.OPTIMAL
    assert at_least.replay is not None and at_least.replay.peak_bytes <= hopeless.minimum_budget_bytes
