"""One policy for all micro-batches: the folded program has the optimum of the full one with equal policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.solve import Problem, SolveOptions, minimum_budget_bytes, solve
from memfit.solve.checkpoint import CheckpointModel
from memfit.solve.micro_batches import count_micro_batches, find_micro_batches
from memfit.solve.milp import Limits, Status


class Layer(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, inner), nn.Linear(inner, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def built() -> nn.Sequential:
    return nn.Sequential(Layer(32), Layer(96), Layer(64), nn.Linear(16, 40))


def traced(accumulation_steps: int) -> Trace:
    step = Step(
        built(),
        torch.randn(24, 16),
        loss=lambda output, _: output.float().log_softmax(-1).square().mean(),
        accumulation_steps=accumulation_steps,
    )
    return memfit.trace(step, target="cpu")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.of(Runtime.of(traced(3), Roofline()), Target.parse("cpu"))


@pytest.mark.parametrize("part", [0.0, 0.2, 0.5, 0.8])
def test_the_folded_optimum_is_that_of_the_full_program_with_equal_policies(problem: Problem, part: float) -> None:
    least, members = minimum_budget_bytes(problem), problem.micro_batches
    assert least is not None and members is not None and problem.min_budget is not None and problem.min_budget.proven
    budget = least + int((problem.baseline_bytes - least) * part)
    solved = solve(problem, budget)
    assert solved.status is Status.OPTIMAL and solved.choice is not None and solved.replay is not None
    assert solved.replay.peak_bytes <= budget
    for group in members.members:
        assert np.array_equal(solved.choice[list(group)], solved.choice[list(members.members[-1])])
    full = CheckpointModel(problem.program(budget))
    for group in members.members[:-1]:
        for one, other in zip(group, members.members[-1], strict=True):
            for x, y in zip(full.x[one], full.x[other], strict=True):
                full.milp.row([(x, 1.0), (y, -1.0)], lower=0.0, upper=0.0)
    tied = full.milp.solve(Limits())
    assert tied.status is Status.OPTIMAL
    assert solved.recompute_ms == pytest.approx(tied.objective, abs=1e-4)


def test_no_smaller_budget_has_equal_policies(problem: Problem) -> None:
    least = minimum_budget_bytes(problem)
    assert least is not None
    assert solve(problem, least).status is Status.OPTIMAL
    assert solve(problem, least - 2048).status is Status.INFEASIBLE


def test_policies_of_their_own_are_never_slower() -> None:
    trace = traced(3)
    same = Problem.of(Runtime.of(trace, Roofline()), Target.parse("cpu"))
    own = Problem.of(Runtime.of(trace, Roofline()), Target.parse("cpu"), SolveOptions(micro_batches="own"))
    least = minimum_budget_bytes(same)
    assert least is not None and own.micro_batches is None
    for part in (0.1, 0.4, 0.7):
        budget = least + int((same.baseline_bytes - least) * part)
        assert solve(own, budget).recompute_ms <= solve(same, budget).recompute_ms + 1e-6


def test_passes_that_are_not_alike_are_left_apart() -> None:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for rows in (24, 8):
            model(torch.randn(rows, 16)).square().mean().backward()
        model[:2](torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = memfit.trace(step, target="cpu")
    assert count_micro_batches(trace) is None
    problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("cpu"))
    assert problem.micro_batches is None
    assert count_micro_batches(traced(1)) == 1 and count_micro_batches(traced(3)) == 3


def test_micro_batches_of_other_shapes_have_policies_of_their_own() -> None:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for rows in (24, 8):
            model(torch.randn(rows, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = memfit.trace(step, target="cpu")
    assert count_micro_batches(trace) == 2
    problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("cpu"))
    assert find_micro_batches(trace, problem.candidates) is None


def test_other_words_for_the_option_are_refused() -> None:
    with pytest.raises(memfit.InputError, match="write 'same' or 'own'"):
        SolveOptions(micro_batches="each")  # type: ignore[arg-type]
