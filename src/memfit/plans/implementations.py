"""The best way for the optimizer to do its step, where a plan may choose it."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture import Step, trace
from memfit.capture.optimizers import Implementation, implementations_of_step, step_with
from memfit.cost import Cost, Runtime
from memfit.solve import Problem, Solved, solve


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

    def better_than(self, other: Answer) -> bool:
        """Whether it is faster, or nearer to the budget when neither fits."""
        if self.solved.choice is None and other.solved.choice is None:
            mine, theirs = self.solved.minimum_budget_bytes, other.solved.minimum_budget_bytes
            return mine is not None and (theirs is None or mine < theirs)
        return self.step_ms < other.step_ms


def best_implementation(answer: Answer, step: Step, cost: Cost) -> Answer:
    """The fastest answer over the ways in which the optimizer can do its step."""
    best, problem = answer, answer.problem
    for kind in implementations_of_step(step):
        with step_with(step, kind) as other:
            captured = trace(other, target=problem.target)
        if captured.fingerprint == problem.trace.fingerprint:
            continue
        tried = Problem.of(Runtime.of(captured, cost), problem.target, problem.options)
        found = Answer(problem=tried, solved=solve(tried, answer.solved.budget_bytes), implementation=kind)
        if found.better_than(best):
            best = found
    return best
