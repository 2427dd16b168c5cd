"""`Report`: the record that every output starts from, times and memory of a step with and without a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from memfit.capture import Step, Trace
from memfit.cost import Cost, Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.plans import Plan, build_policy, resolve_cost, shard_options_of
from memfit.solve import Curve, Problem, SolveOptions, build_curve
from memfit.tradeoff import Policy, Unit

if TYPE_CHECKING:
    from memfit.verify import Verification


@dataclass(frozen=True, kw_only=True)
class Report:
    """A step on its target. `plan` is None for one that is only explained.

    `problem` has the trace, the times of its ops and how it is sharded. `title` is what the step is, in words, where
    whoever made the report knows more than the trace does.
    """

    problem: Problem
    plan: Plan | None
    curve: Curve | None = None
    verification: Verification | None = None
    title: str = ""

    @classmethod
    def of(
        cls,
        plan: Plan,
        step: Step | Trace,
        *,
        cost: Cost | str | None = None,
        curve: Curve | None = None,
        verification: Verification | None = None,
        title: str = "",
        options: SolveOptions | None = None,
    ) -> Report:
        """Build the report of a plan on the step that it was made for; another step is refused (`PlanMismatch`).

        `options` are those that the plan was made with, of which its document knows only what it decided.
        """
        if isinstance(step, Step):
            from memfit.verify import (
                capture_for_plan,  # where nothing is verified, `verify` and the engines are not loaded
            )

            trace = capture_for_plan(plan, step)
        elif isinstance(step, Trace):
            trace = step
            plan.check(trace)
        else:
            raise InputError(f"a report is of a plan and its memfit.Step or memfit.Trace, not a {type(step).__name__}")
        target = Target.parse(
            trace.hardware,
            ranks=plan.ranks,
            ranks_per_node=plan.target.ranks_per_node,
            intra_node_link=plan.target.intra_node_link,
            inter_node_link=plan.target.inter_node_link,
            **plan.target.settings,
        )
        runtime = Runtime.of(trace, resolve_cost(cost, target))
        problem = Problem.of(runtime, target, options or SolveOptions(shard=shard_options_of(plan)))
        return cls(problem=problem, plan=plan, curve=curve, verification=verification, title=title)

    @classmethod
    def of_trace(cls, trace: Trace, *, target: Target | None = None, cost: Cost | str | None = None) -> Report:
        """Build the report of a step without a plan."""
        aim = target or Target.parse(trace.hardware)
        return cls(problem=Problem.of(Runtime.of(trace, resolve_cost(cost, aim)), aim), plan=None)

    @property
    def trace(self) -> Trace:
        """The step; under sharding as it was captured, whole."""
        return self.problem.trace

    @property
    def target(self) -> Target:
        """The hardware."""
        return self.problem.target

    @property
    def runtime(self) -> Runtime:
        """Times of the ops as one rank runs them."""
        return self.problem.runtime

    @cached_property
    def baseline(self) -> Timeline:
        """Memory at every instant when nothing is checkpointed, sharded where the target has several ranks."""
        return self.problem.replay(())

    @property
    def chosen(self) -> tuple[tuple[Unit, Policy], ...]:
        """What the plan checkpoints, and how."""
        units = {unit.name: unit for unit in self.problem.units}
        entries = () if self.plan is None else self.plan.checkpoint
        return tuple((units[each.unit], build_policy(each)) for each in entries)

    @cached_property
    def planned(self) -> Timeline | None:
        """Memory at every instant under the plan; None without one, or when it is infeasible."""
        if self.plan is None or self.plan.predicted is None:
            return None
        return self.problem.replay(self.chosen)

    def with_curve(self, points: int = 16) -> Report:
        """Return the same report with the whole trade-off."""
        return replace(self, curve=build_curve(self.problem, points=points))
