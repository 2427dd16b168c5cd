"""Another implementation of the optimizer's step, where that step stands in the way of a faster plan."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.cost import Cost, Runtime
from memfit.solve import Problem, Solved, Status, blocker_of, solve
from memfit.trace import Phase, Step, trace
from memfit.trace.optimizers import Implementation, implementations_of_step, step_with

_NEAR = 0.95
"""A step that comes as near to the budget as this has a part in what is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was solved, and with which implementation of the optimizer's step; None is the one that was given."""

    problem: Problem
    solved: Solved
    implementation: Implementation | None

    @property
    def step_ms(self) -> float:
        """The time of the step under the plan, infinite when there is none."""
        return self.problem.runtime.total_ms + self.problem.exposed_ms + self.solved.recompute_ms


def optimizer_binds(answer: Answer) -> bool:
    """Whether nothing fits because of the optimizer's step, or something is recomputed because of it."""
    problem, solved = answer.problem, answer.solved
    if solved.status is Status.INFEASIBLE:
        return problem.least is not None and blocker_of(problem, problem.least.choice).phase is Phase.OPTIMIZER
    if not solved.chosen or solved.replay is None:
        return False
    ops = problem.timeline.trace.ops
    levels = zip(solved.replay.during_step_bytes.tolist(), ops, strict=False)
    return max((level for level, op in levels if op.phase is Phase.OPTIMIZER), default=0) > _NEAR * solved.budget_bytes


def best_implementation(answer: Answer, step: Step, cost: Cost) -> Answer:
    """The fastest answer over the ways in which the optimizer can do its step."""
    best, problem = answer, answer.problem
    for kind in implementations_of_step(step):
        with step_with(step, kind) as other:
            captured = trace(other, target=problem.target)
        if captured.fingerprint == problem.timeline.trace.fingerprint:
            continue
        tried = Problem.of(Runtime.of(captured, cost), problem.target, problem.options)
        found = Answer(problem=tried, solved=solve(tried, answer.solved.budget_bytes), implementation=kind)
        if found.solved.choice is not None and found.step_ms < best.step_ms:
            best = found
    return best
