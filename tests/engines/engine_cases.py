"""Plans on real models: how tests make a plan and compare a planned run with a plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import memfit
from memfit.capture import Step
from memfit.cost import Roofline, Runtime
from memfit.engines import plan_of_model
from memfit.hardware import Target
from memfit.plans import Plan
from memfit.solve import Problem, SolveOptions, minimum_budget_bytes


@dataclass
class Ran:
    """What steps left behind."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor | None]]
    state: dict[str, torch.Tensor]
    random: torch.Tensor


def plan_for(step: Step, part: float = 0.0, options: SolveOptions | None = None) -> Plan:
    """A plan between the smallest budget that can be met (0) and the one that needs nothing (1)."""
    trace = memfit.trace(step, target="cpu")
    problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("cpu"), options)
    least = minimum_budget_bytes(problem)
    assert least is not None
    budget = least + int((problem.baseline_bytes - least) * part)
    plan = memfit.plan(trace, budget=budget, options=options, progress=False)
    assert plan.status == "optimal"
    return plan


def run_steps(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int = 3) -> Ran:
    """Run some steps, each from a seed of its own, and write down losses and gradients."""
    losses: list[torch.Tensor] = []
    gradients: list[dict[str, torch.Tensor | None]] = []
    loss_of = step.loss or (lambda output, _: getattr(output, "loss", output))
    applied = plan_of_model(model)
    if applied is not None:
        loss_of = applied.plan.loss(loss_of)

    def loss(output: Any, batch: Any) -> torch.Tensor:
        value = loss_of(output, batch)
        losses.append(value.detach().clone())
        return value

    def keep(*_: Any) -> None:
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})

    watched = replace(step, loss=loss)
    hook = None if optimizer is None else optimizer.register_step_pre_hook(keep)
    for number in range(steps):
        torch.manual_seed(100 + number)
        watched.execute(model, optimizer, "cpu")
    if hook is not None:
        hook.remove()
    return Ran(losses, gradients, copy.deepcopy(model.state_dict()), torch.get_rng_state())


def same(one: Ran, other: Ran) -> bool:
    """Whether two runs are equal to the last bit."""

    def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))

    return (
        len(one.losses) == len(other.losses) > 0
        and all(map(equal, one.losses, other.losses))
        and all(equal(a[n], b[n]) for a, b in zip(one.gradients, other.gradients, strict=True) for n in a)
        and all(equal(one.state[name], other.state[name]) for name in one.state)
        and torch.equal(one.random, other.random)
    )


def both(
    build: Callable[[], nn.Module], step: Step, plan: Plan, steps: int = 3
) -> tuple[Ran, Ran, nn.Module, torch.optim.Optimizer | None]:
    """A plain and a planned run from the same beginning; the planned model is still under its plan."""
    runs = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = build()
        optimizer = step.build_optimizer(model)
        if planned:
            plan.apply(model, optimizer)
        runs.append(run_steps(step, model, optimizer, steps))
    return runs[0], runs[1], model, optimizer
