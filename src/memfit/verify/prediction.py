"""The step as the plan says it runs: its trace, captured again, and memory at every instant of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from memfit.capture import Step, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.plans import Engine, Plan, PlanMismatch, build_policy, shard_options_of
from memfit.sharding import shard
from memfit.solve import Problem, SolveOptions, replay
from memfit.tradeoff import TraceColumns, find_units


def capture_for_plan(plan: Plan, step: Step) -> Trace:
    """Capture the step; raise `PlanMismatch` when the plan is for another step.

    A trace tells whether its optimizer had state when it was captured. A plan for either is a plan for both.
    """
    found = plan.trace_of(step)
    try:
        plan.check(found)
    except PlanMismatch as mismatch:
        optimizer = step.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise
        with without_state(optimizer) if optimizer.state else _with_state(optimizer):
            found = plan.trace_of(step)
        try:
            plan.check(found)
        except PlanMismatch:
            raise mismatch from None
    return found


def replay_plan(plan: Plan, captured: Trace, *, planned: bool = True) -> Timeline:
    """Return the timeline of the step with the plan's units checkpointed, or with none."""
    trace_columns = TraceColumns.of(captured, np.zeros(len(captured.ops)))
    found = {unit.name: unit for unit in find_units(captured)}
    entries = plan.checkpoint if planned else ()
    return replay(trace_columns, [(found[entry.unit], build_policy(entry)) for entry in entries])


def replay_on_ranks(plan: Plan, captured: Trace, engine: Engine, *, planned: bool = True, rank: int = 0) -> Timeline:
    """Return the timeline of a rank with the plan's units sharded by an engine and checkpointed, or not.

    The engines have different buffers; a plan predicts those of its own, on the first rank.
    """
    options = shard_options_of(plan, engine)
    target = Target.parse(plan.target.device, ranks=plan.ranks, **plan.target.settings)
    timeline = Timeline.of(captured, target.device.allocator.rounding_bytes)
    rank %= options.shard_ranks(target.ranks)
    sharding = shard(timeline, Runtime.of(captured, Roofline()), target, options, rank=rank)
    problem = Problem(
        timeline=timeline,
        runtime=sharding.runtime,
        target=target,
        sharding=sharding,
        options=SolveOptions(shard=options),
    )
    found = {unit.name: unit for unit in problem.units}
    entries = plan.checkpoint if planned else ()
    return problem.replay([(found[entry.unit], build_policy(entry)) for entry in entries])


@contextlib.contextmanager
def without_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Clear an optimizer's state inside the block, and restore it."""
    kept = dict(optimizer.state)
    optimizer.state.clear()
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(kept)


@contextlib.contextmanager
def _with_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give an optimizer the state that a step with zero gradients makes; parameters are restored by the caller."""
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        optimizer.state.clear()
