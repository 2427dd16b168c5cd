"""`plan` and `curve`: from what a user has to the plan document, and to the whole trade-off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from rich.console import Console
from rich.status import Status as Spinner

from memfit.capture import Step, Trace, trace
from memfit.cost import Cost, Runtime
from memfit.errors import InputError
from memfit.memory import Timeline, reserved
from memfit.plans.allocator import note_on_room, with_room
from memfit.plans.document import Plan
from memfit.plans.facts import peak_at
from memfit.plans.given import (
    Model,
    TargetLike,
    check_asked,
    check_nothing_beside,
    resolve_cost,
    resolve_options,
    resolve_step,
    resolve_target,
)
from memfit.plans.implementations import Answer, best_implementation
from memfit.plans.making import build_plan
from memfit.plans.record import Blocker, DdpPlan, Dtype, Estimate, Prediction, ShardedUnit, ShardPlan
from memfit.solve import (
    Choice,
    Curve,
    Incumbent,
    Problem,
    Solved,
    SolveOptions,
    Status,
    build_curve,
    find_blocker,
    nothing,
    solve,
)
from memfit.units import display_bytes, display_ms


def plan(
    model: Model,
    batch: Any = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    autocast: torch.dtype | None = None,
    target: TargetLike | None = None,
    ranks: int | None = None,
    budget: str | int | float | None = None,
    cost: Cost | str | None = None,
    options: SolveOptions | None = None,
    start: Plan | None = None,
    progress: bool = True,
) -> Plan:
    """The fastest plan for a training step that fits the budget, proven; also when nothing fits (`infeasible`).

    The budget is what tensors of one rank may take (`"72GiB"`, bytes, or a part of the device); unless given, all that
    is usable, less what the caching allocator loses in pieces. A `Step`, a `Trace` or a function that runs the step may
    stand for model, batch and the rest; a trace knows its target. `cost` times the ops: `"roofline"`, by the device's
    figures, unless given. `start` is a plan of the same step for another budget; the search begins with it.
    """
    check_asked(model, target, ranks, budget=budget, start=start)
    work = _Work(progress)
    problem, step = _problem(work, model, batch, loss, optimizer, autocast, target, ranks, cost, options)
    asked = problem.target.budget_bytes(budget)
    allowed = min(asked, problem.target.usable_bytes)
    notes = list(problem.timeline.trace.notes)
    if allowed < asked:
        overhead = display_bytes(problem.target.device.overhead_bytes)
        notes.append(
            f"the budget of {display_bytes(asked)} was lowered to {display_bytes(allowed)}: "
            f"{overhead} of the device are its context and library workspaces"
        )
    with work.step("solving"):
        first = None if start is None else _choice(problem, start)
        solved = solve(problem, allowed, start=first, watch=work.heard)
        if budget is None:
            solved = with_room(problem, solved, work.heard)
    best = Answer(problem=problem, solved=solved, implementation=None)
    if problem.options.optimizer:
        if step is None:
            raise InputError(
                "SolveOptions(optimizer=True) captures the step in other ways; give the step, not its trace"
            )
        with work.step("trying other optimizer steps"):
            best = best_implementation(best, step, resolve_cost(cost, problem.target))
    return _document(best, problem, notes, None if budget is None else allowed)


def curve(
    model: Model,
    batch: Any = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    autocast: torch.dtype | None = None,
    target: TargetLike | None = None,
    ranks: int | None = None,
    points: int = 16,
    cost: Cost | str | None = None,
    options: SolveOptions | None = None,
    progress: bool = True,
) -> Curve:
    """Budget against step time, from the smallest budget that can be met to the one that needs nothing."""
    check_asked(model, target, ranks, points=points)
    work = _Work(progress)
    problem, _ = _problem(work, model, batch, loss, optimizer, autocast, target, ranks, cost, options)
    with work.step("solving"):
        return build_curve(problem, points=points, watch=work.point)


def _problem(
    work: _Work,
    model: Model,
    batch: Any,
    loss: Callable[..., torch.Tensor] | None,
    optimizer: Any,
    autocast: torch.dtype | None,
    target: TargetLike | None,
    ranks: int | None,
    cost: Cost | str | None,
    options: SolveOptions | None,
) -> tuple[Problem, Step | None]:
    aim, solver = resolve_target(model, target, ranks), resolve_options(options)
    chosen = resolve_cost(cost, aim)
    if isinstance(model, Step | Trace):
        kind = type(model).__name__
        check_nothing_beside(f"the {kind}", batch, loss, optimizer, autocast)
    step = None
    if isinstance(model, Trace):
        captured = model
    else:
        step = resolve_step(model, batch, loss=loss, optimizer=optimizer, autocast=autocast)
        with work.step("capturing one training step"):
            captured = trace(step, target=aim)
    with work.step("timing its ops, working out frontiers"):
        return Problem.of(Runtime.of(captured, chosen), aim, solver), step


def _choice(problem: Problem, start: Plan) -> Choice:
    """The choice that a plan made, with the nearest policies where its own are not among the candidates'."""
    dropped = {entry.unit: entry.discarded_bytes for entry in start.checkpoint}
    choice = nothing(problem)
    for index, candidate in enumerate(problem.candidates):
        if candidate.unit.name in dropped:
            distances = [abs(policy.discarded_bytes - dropped[candidate.unit.name]) for policy in candidate.policies]
            choice[index] = distances.index(min(distances))
    return choice


def _document(answer: Answer, given: Problem, notes: list[str], asked_bytes: int | None) -> Plan:
    """The plan; its baseline is the step as it was given, also where the plan changes the optimizer's step."""
    problem, solved = answer.problem, answer.solved
    captured, target = problem.timeline.trace, problem.target
    base_ms = problem.runtime.total_ms + problem.exposed_ms
    given_ms = given.runtime.total_ms + given.exposed_ms
    baseline = Estimate(step_ms=given_ms, **_peak(given, given.replay(())))
    predicted = _prediction(problem, solved, base_ms)
    room = note_on_room(problem, solved, asked_bytes)
    notes += [] if room is None else [room]
    if problem.least_is_unproven:
        notes.append("the smallest budget is the lowest found in the time limit, not proven to be the lowest there is")
    if solved.tightened:
        notes.append(f"the replay sent the solver back {solved.tightened} times")
    if solved.status in (Status.INFEASIBLE, Status.UNKNOWN):
        if solved.minimum_budget_bytes is None:
            raise InputError(
                "no plan was found within the time limit; give more: SolveOptions(limits=...), or --time-limit"
            )
        return build_plan(
            captured,
            target=target,
            budget_bytes=solved.budget_bytes,
            status="infeasible",
            gap=None,
            bound_ms=None,
            minimum_budget_bytes=solved.minimum_budget_bytes,
            checkpoint=(),
            baseline=baseline,
            predicted=None,
            blocker=_why(problem),
            ddp=_ddp_plan(problem),
            optimizer=answer.implementation,
            notes=notes,
        )
    return build_plan(
        captured,
        target=target,
        budget_bytes=solved.budget_bytes,
        status="optimal" if solved.status is Status.OPTIMAL else "feasible",
        gap=solved.gap,
        bound_ms=base_ms + solved.bound_ms,
        minimum_budget_bytes=solved.minimum_budget_bytes,
        checkpoint=[(candidate.unit, policy) for candidate, policy in solved.chosen],
        baseline=baseline,
        predicted=predicted,
        shard=_shard_plan(problem),
        ddp=_ddp_plan(problem),
        optimizer=answer.implementation,
        notes=notes,
    )


def _prediction(problem: Problem, solved: Solved, base_ms: float) -> Prediction | None:
    if solved.replay is None:
        return None
    return Prediction(
        step_ms=base_ms + solved.recompute_ms,
        recompute_ms=solved.recompute_ms,
        exposed_communication_ms=problem.exposed_ms,
        **_peak(problem, solved.replay),
    )


def _peak(problem: Problem, judged: Timeline) -> dict[str, Any]:
    """The fields of an estimate that are about memory."""
    device, instant = problem.target.device, judged.peak_instant
    held = judged.peak_bytes
    if device.allocator.caches:
        held = max(held, reserved(judged.allocations, device).peak_reserved_bytes)
    return {
        "peak_bytes": judged.peak_bytes,
        "peak_reserved_bytes": held,
        "peak_by_category": judged.peak_by_category,
        "peak_at": peak_at(judged.trace, int(judged.op[instant]), second_run_of=judged.recomputed_unit(instant)),
    }


def _shard_plan(problem: Problem) -> ShardPlan | None:
    if problem.sharding is None or problem.options.shard.parallel == "ddp":
        return None
    sharding = problem.sharding
    units = tuple(ShardedUnit(module=unit.module, reshard_after_forward=bool(unit.module)) for unit in sharding.units)
    return ShardPlan(
        ranks=problem.target.ranks,
        units=units,
        prefetch=1,
        shard_dtype=cast(Dtype | None, sharding.shard_dtype),
        param_dtype=cast(Dtype | None, sharding.param_dtype),
        reduce_dtype=cast(Dtype | None, sharding.reduce_dtype),
    )


def _ddp_plan(problem: Problem) -> DdpPlan | None:
    options = problem.options.shard
    if problem.sharding is None or options.parallel != "ddp":
        return None
    return DdpPlan(
        ranks=problem.target.ranks,
        buckets=problem.sharding.buckets,
        bucket_cap_bytes=options.bucket_cap_bytes,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
    )


def _why(problem: Problem) -> Blocker | None:
    """What stands in the way; what would help is for `memfit.explain`, which takes the step itself."""
    least = problem.least
    if least is None:
        return None
    found = find_blocker(problem, least.choice)
    return Blocker(
        peak_bytes=found.peak_bytes,
        peak_by_category=found.by_category,
        peak_at=peak_at(problem.timeline.trace, found.op, second_run_of=found.second_run_of),
    )


@dataclass(slots=True)
class _Work:
    """Shows on the terminal what is being done."""

    show: bool
    spinner: Spinner | None = None
    _doing: str = ""

    def step(self, doing: str) -> AbstractContextManager[Any]:
        console = Console(stderr=True)
        if not (self.show and console.is_terminal):
            return nullcontext()
        self._doing = doing
        self.spinner = console.status(f"{doing} …")
        return self.spinner

    def heard(self, incumbent: Incumbent) -> None:
        if self.spinner is not None:
            best, bound = display_ms(incumbent.objective), display_ms(incumbent.bound)
            self.spinner.update(f"{self._doing}: adds {best}, at least {bound}, gap {incumbent.gap:.1%} …")

    def point(self, done: int, all_points: int) -> None:
        if self.spinner is not None:
            self.spinner.update(f"{self._doing}: {done} of {all_points} budgets …")
