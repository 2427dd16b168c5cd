"""`tune`: run plans that may each be the fastest on this machine, by turns, and keep the one that is.

Note [Turns]: a machine is slower at one minute than at the next, and so is a process after a model was built in it. So
plans take turns: in every round each is put on the model anew and runs some steps, of which the first are left out, in
an order that changes from round to round. A plan that falls behind by more than rounds differ leaves. On
one device the model is the user's, and everything is put back (Note [As found] in state.py). On several ranks each turn
has a copy of it (Note [Copies] in rank_verifying.py), and a step is as long as on its slowest rank.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from rich.console import RenderableType

from memfit.capture import Step, cheap_collections, neutral_modes
from memfit.engines import plan_of_model
from memfit.errors import InputError, StateError
from memfit.plans import Alternative, Inputs, Model, Plan, StepInputs, find_alternatives
from memfit.progress import Progress
from memfit.text import PrintedDocument, counted
from memfit.units import display_ms
from memfit.verify.faults import is_out_of_memory
from memfit.verify.measure import step_ms
from memfit.verify.resolve import check_device, check_plan, real_step
from memfit.verify.state import Found, same_generators

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
WARMUP = 2
"""Steps of each turn that are left out: the engine learns in the first, and caches are another plan's."""
_REACH = 0.1
"""After round n, from the second on, a plan leaves whose best round is slower than the best of all by more than this
over n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """A plan that was run, how it was asked for, and the median step of each round; infinite where memory ran out."""

    label: str
    plan: Plan
    rounds_ms: tuple[float, ...] = ()

    @property
    def measured_ms(self) -> float:
        """The median over the rounds, infinite where it was not run."""
        return statistics.median(self.rounds_ms) if self.rounds_ms else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning(PrintedDocument):
    """The fastest plan here, and all that were tried, the fastest first; those that left early after the others.

    Where nothing fits the budget, `plan` is infeasible, and where one plan alone came into question, it was not run.
    """

    plan: Plan
    tried: tuple[TimedPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON; of the plans that were not kept, what was predicted."""
        rows = [
            {
                "label": each.label,
                "predicted_ms": None if each.plan.predicted is None else each.plan.predicted.step_ms,
                "predicted_peak_bytes": None if each.plan.predicted is None else each.plan.predicted.peak_bytes,
                "rounds_ms": [ms if math.isfinite(ms) else None for ms in each.rounds_ms],
            }
            for each in self.tried
        ]
        return {"tried": rows, "plan": msgspec.to_builtins(self.plan)}

    def __rich__(self) -> RenderableType:
        from memfit.report import tuning_report

        return tuning_report(self)


def tune(
    model: Model,
    batch: Any = None,
    *,
    budget: str | int | float | None = None,
    rounds: int = 4,
    steps: int = 3,
    **inputs: Unpack[StepInputs],
) -> Tuning:
    """Plan a step, run the plan and those that may be as fast (Note [Alternatives]) here, and keep the fastest.

    The arguments are those of `memfit.plan`; model and batch need values, and the target is this machine. Each plan
    runs `steps` steps in each of up to `rounds` rounds. For several ranks all of them call it, under `torchrun`. The
    model and all that belongs to it are left as they were found.
    """
    for name, count in (("rounds", rounds), ("steps", steps)):
        if count < 1:
            raise InputError(f"{name} is {count}; give 1 or more")
    given = Inputs.of(model, batch, **inputs)
    step = given.step
    if step is None:
        raise InputError("tune runs the step, and this is its trace; give the step")
    check_device(given.target.device.type, given.target.device.title)
    with same_generators(), neutral_modes(), cheap_collections():
        found = _find(given, budget)
        first = found[0].plan
        if len(found) == 1:
            return Tuning(plan=first, tried=(TimedPlan(label=found[0].label, plan=first),))
        check_plan(first)
        with Progress("running plans by turns", show=given.progress) as progress:
            take_turn = _turns(first, step)

            def timed(each: Alternative) -> float:
                progress.add(each.label)
                return take_turn(each.plan, steps)

            times = race(found, timed, rounds)
    return _decide(found, times)


def _find(given: Inputs, budget: str | int | float | None) -> list[Alternative]:
    """Return the plans that come into question, the same on every rank."""
    if given.target.ranks == 1:
        return find_alternatives(given, budget=budget)
    # Imported here: it loads DTensor, which takes longer than all of memfit, and most plans are for one device.
    from memfit.verify.rank_tuning import find_on_first_rank

    return find_on_first_rank(given, budget)


def _turns(plan: Plan, step: Step) -> Callable[[Plan, int], float]:
    """Return what runs some steps under a plan like this one, and returns their median in milliseconds."""
    if plan.shard is None:
        return _LocalTurns(plan, step)
    from memfit.verify.rank_tuning import RankTurns

    return RankTurns(plan, step)


def race(runners: Sequence[T], time_one: Callable[[T], float], rounds: int) -> list[list[float]]:
    """Time each in turns, and return the times of each; who falls too far behind has fewer of them (Note [Turns])."""
    times: list[list[float]] = [[] for _ in runners]
    left = list(range(len(runners)))
    for number in range(1, rounds + 1):
        for place in left[:: 1 if number % 2 else -1]:
            times[place].append(time_one(runners[place]))
        left = [place for place in left if math.isfinite(times[place][-1])]
        if (
            left and number > 1
        ):  # the first is short of caches, and of one round alone nobody can say how far rounds differ
            reach_ms = min(min(times[place]) for place in left) * (1 + _REACH / number)
            left = [place for place in left if min(times[place]) <= reach_ms]
        if len(left) <= 1:
            break
    return times


class _LocalTurns:
    """Turns on one device, on the user's own model."""

    def __init__(self, plan: Plan, step: Step) -> None:
        self.step, self.model = real_step(plan, step)
        optimizer = self.step.optimizer
        self.optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        if plan_of_model(self.model) is not None:
            raise StateError("the model runs a plan already; call remove on that one first, or tune before apply")
        self.found = Found(self.step, self.model)

    def __call__(self, plan: Plan, steps: int) -> float:
        """Return the median time of some steps under a plan; infinite where memory ran out."""
        gc.collect()
        with self.found.kept():
            plan.apply(self.model, self.optimizer)
            try:
                return statistics.median(run_steps(plan, self.step, self.model, self.optimizer, steps))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return math.inf
            finally:
                plan.remove(self.model)


def run_steps(plan: Plan, step: Step, model: Any, optimizer: Any, steps: int) -> list[float]:
    """Run steps of a planned model and return the milliseconds of each after the first few."""
    device = next(model.parameters()).device
    step = step if step.loss is None else replace(step, loss=plan.loss(step.loss))

    def run() -> None:
        step.execute(model, optimizer, device.type)

    for _ in range(WARMUP):
        run()
    return [step_ms(run, device) for _ in range(steps)]


def _decide(found: Sequence[Alternative], times: Sequence[Sequence[float]]) -> Tuning:
    """Keep the fastest of those that stayed to the end, with a note on how it was found."""
    timed = [
        TimedPlan(label=each.label, plan=each.plan, rounds_ms=tuple(ms)) for each, ms in zip(found, times, strict=True)
    ]
    timed.sort(key=lambda each: (-len(each.rounds_ms), each.measured_ms))
    best, first = timed[0], found[0]
    if math.isinf(best.measured_ms):
        raise InputError(
            f"none of {counted(len(found), 'plan')} could be run: all ran out of memory, though predicted to fit; "
            "`memfit verify` measures one of them, and a smaller budget leaves more room"
        )
    assert best.plan.predicted is not None
    others, measured = counted(len(found) - 1, "other plan"), display_ms(best.measured_ms)
    predicted_ms = display_ms(best.plan.predicted.step_ms)
    note = f"run here by turns with {others}, and the fastest: {measured} a step, predicted {predicted_ms}"
    if best.plan is not first.plan:
        first_ms = next(each.measured_ms for each in timed if each.plan is first.plan)
        note += f"; the one that is predicted to be faster ({first.label}) took {display_ms(first_ms)}"
    plan = msgspec.structs.replace(best.plan, notes=(*best.plan.notes, note))
    return Tuning(plan=plan, tried=tuple(timed))
