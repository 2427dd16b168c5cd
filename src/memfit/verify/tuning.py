"""`tune`: run plans that may each be the fastest on this machine, by turns, and keep the one that is.

Note [Turns]: a machine is slower at one minute than at the next, and so is a process after a model was built in it. So
plans take turns: in every round each is put on the model anew and runs some steps, of which the first are left out, in
an order that changes from round to round. The first round is left out too, where there are more. Of the others the
median counts: a plan leaves once it is behind the fastest by more than a part that shrinks with the rounds, and at once
when its memory runs out. On one device the model is the user's, and everything is put back (Note [As found] in
state.py). On several ranks each turn has a copy of it (Note [Copies] in rank_verifying.py), and a step is as long as on
its slowest rank.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import torch
from rich.console import RenderableType
from torch import nn

from memfit.capture import Step, cheap_collections, neutral_modes
from memfit.engines import plan_of_model
from memfit.errors import InputError, MissingFeatureError, StateError
from memfit.plans import Alternative, Inputs, Model, Plan, StepInputs, find_alternatives
from memfit.progress import Progress
from memfit.solve import relative_gap
from memfit.text import PrintedDocument, counted
from memfit.units import display_ms
from memfit.verify.faults import is_out_of_memory
from memfit.verify.measure import step_ms
from memfit.verify.resolve import build_real, check_device
from memfit.verify.state import Found, same_generators

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
_WARMUP = 2
"""Steps of each turn that are left out: the engine learns in the first, and caches are another plan's."""
_REACH = 0.1
"""With n rounds that count a plan leaves when it is slower than the fastest by more than this over n."""
_WORTH = 0.005
"""A plan takes the place of one with a shorter prediction if it is faster by this part: less is within the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """A plan that was run, how it was asked for, and the median step of each round; infinite where memory ran out."""

    label: str
    plan: Plan
    rounds_ms: tuple[float, ...] = ()

    @property
    def measured_ms(self) -> float:
        """The median of the rounds that count, infinite where the plan was not run or its memory ran out."""
        return _measured_ms(self.rounds_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning(PrintedDocument):
    """The plan that is kept, and all that were tried: that one, those that stayed to the end, those that left.

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
                "measured_ms": each.measured_ms if math.isfinite(each.measured_ms) else None,
                "rounds_ms": [ms if math.isfinite(ms) else None for ms in each.rounds_ms],
            }
            for each in self.tried
        ]
        return {"tried": rows, "plan": msgspec.to_builtins(self.plan)}

    def __rich__(self) -> RenderableType:
        from memfit.report import tuning_report

        return tuning_report(self)


class Turns(Protocol):
    """Runs plans of one step, here or on all ranks at once."""

    shows: bool
    """Whether this process shows what is being done."""

    def find(self, given: Inputs, budget: str | int | float | None) -> list[Alternative]:
        """Return the plans that come into question, the same on every rank."""

    def prepare(self) -> None:
        """Build the model where it was given as a callable, and refuse one that cannot be run as it is."""

    def take(self, plan: Plan, steps: int) -> float:
        """Return the median time of some steps under a plan in milliseconds; infinite where memory ran out."""


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

    Model, batch, budget and the keywords are those of `memfit.plan`, but that model and batch need values, and the
    target is this machine. Each plan runs `steps` steps in each of up to `rounds` rounds. For several ranks all of them
    call it, under `torchrun`. The model and all that belongs to it are left as they were found.
    """
    for name, count in (("rounds", rounds), ("steps", steps)):
        if count < 1:
            raise InputError(f"{name} is {count}; give 1 or more")
    given = Inputs.of(model, batch, **inputs)
    step = given.step
    if step is None:
        raise InputError("tune runs the step, and this is its trace; give the step")
    _check(given)
    with same_generators(), neutral_modes(), cheap_collections():
        turns = _make_turns(given, step)
        given = replace(given, progress=given.progress and turns.shows)
        is_built = isinstance(step.model, nn.Module)
        if is_built:
            turns.prepare()
        found = turns.find(given, budget)
        if len(found) == 1:
            label, plan = found[0].label, found[0].plan
            return Tuning(plan=plan, tried=(TimedPlan(label=label, plan=plan),))
        if not is_built:
            turns.prepare()  # only now: a model that does not fit would take all memory that there is
        with Progress("running plans by turns", show=given.progress, lines=True) as progress:

            def timed(each: Alternative) -> float:
                progress.add(each.label)
                return turns.take(each.plan, steps)

            times, stayed = race(found, timed, rounds)
    return keep_fastest(found, times, stayed)


def _check(given: Inputs) -> None:
    """Refuse steps and targets whose plans cannot be run here, before anything is planned."""
    if given.mesh is not None:
        raise MissingFeatureError(
            "this step is wrapped by its own code (mesh=), and tune runs plans that memfit applies; leave the mesh out "
            "and give the plain model, with ranks=... for several"
        )
    if given.target.ranks > 1 and given.options.shard.parallel == "ddp":
        raise MissingFeatureError(
            "tune runs plans that shard the model, and parallel='ddp' replicates it; plan with ranks=1 to tune the "
            "step of one rank"
        )
    if "micro_batch" in (given.options.decide or ()):
        raise MissingFeatureError(
            "a batch in micro-batches is run by your own loop, and tune runs the step as it is; leave 'micro_batch' "
            "out and plan with it (memfit.plan), or give the divided step (accumulation_steps=...)"
        )
    check_device(given.target.device.type, given.target.device.title)


def _make_turns(given: Inputs, step: Step) -> Turns:
    if given.target.ranks == 1:
        return _LocalTurns(step, given.target.device.type)
    # Imported here: it loads DTensor, which takes longer than all of memfit, and most plans are for one device.
    from memfit.verify.rank_tuning import RankTurns

    return RankTurns(step, given.target)


def race(runners: Sequence[T], time_one: Callable[[T], float], rounds: int) -> tuple[list[list[float]], list[int]]:
    """Time each in turns (Note [Turns]); return the times of each, and the numbers of those that stayed to the end."""
    times: list[list[float]] = [[] for _ in runners]
    left = list(range(len(runners)))
    for number in range(1, rounds + 1):
        for place in left[:: 1 if number % 2 else -1]:
            times[place].append(time_one(runners[place]))
        left = [place for place in left if math.isfinite(times[place][-1])]
        if left and number > 1:
            measured = {place: _measured_ms(times[place]) for place in left}
            reach_ms = min(measured.values()) * (1 + _REACH / (number - 1))
            left = [place for place in left if measured[place] <= reach_ms]
        if len(left) <= 1:
            break
    return times, left


def _measured_ms(rounds_ms: Sequence[float]) -> float:
    """Return the median of the rounds that count: all but the first where there are more."""
    if not rounds_ms or not all(map(math.isfinite, rounds_ms)):
        return math.inf
    return statistics.median(rounds_ms[1:] or rounds_ms)


def keep_fastest(found: Sequence[Alternative], times: Sequence[Sequence[float]], stayed: Sequence[int]) -> Tuning:
    """Keep the fastest of those that stayed, with a note on how it was found."""
    timed = [
        TimedPlan(label=each.label, plan=each.plan, rounds_ms=tuple(ms)) for each, ms in zip(found, times, strict=True)
    ]
    if not stayed:
        raise StateError(
            f"none of {counted(len(found), 'plan')} could be run: all ran out of memory, though predicted to fit; "
            "`memfit verify` measures one of them, and a smaller budget leaves more room"
        )
    fastest_ms = min(timed[place].measured_ms for place in stayed)
    kept = timed[next(place for place in stayed if timed[place].measured_ms <= fastest_ms * (1 + _WORTH))]
    others = [each for each in timed if each is not kept]
    others.sort(key=lambda each: (timed.index(each) not in stayed, -len(each.rounds_ms), each.measured_ms))
    return Tuning(plan=_with_note(kept, timed), tried=(kept, *others))


def _with_note(kept: TimedPlan, timed: Sequence[TimedPlan]) -> Plan:
    """Return the plan that is kept: it is proven among its own decisions, and not beside a shorter prediction."""
    plan, first = kept.plan, timed[0]
    assert plan.predicted is not None and plan.bound_ms is not None
    measured, predicted = display_ms(kept.measured_ms), display_ms(plan.predicted.step_ms)
    others = counted(len(timed) - 1, "other plan")
    note = f"run here by turns with {others}, and the fastest: {measured} a step, predicted {predicted}"
    if kept is first:
        return msgspec.structs.replace(plan, notes=(*plan.notes, note))
    took = f"took {display_ms(first.measured_ms)}" if math.isfinite(first.measured_ms) else "ran out of memory"
    note += f"; the one that is predicted to be faster ({first.label}) {took}"
    bound_ms = min(each.plan.bound_ms for each in timed if each.plan.bound_ms is not None)
    added_ms = plan.predicted.recompute_ms + (plan.predicted.exposed_offload_ms or 0.0)
    gap = relative_gap(added_ms, max(0.0, added_ms - (plan.predicted.step_ms - bound_ms)))
    return msgspec.structs.replace(
        plan, status="feasible" if gap else plan.status, gap=gap, bound_ms=bound_ms, notes=(*plan.notes, note)
    )


class _LocalTurns:
    """Turns on one device, on the user's own model."""

    def __init__(self, step: Step, device_type: str) -> None:
        self.step, self.device_type, self.shows = step, device_type, True

    def prepare(self) -> None:
        """Build the model where it was given as a callable, and refuse one that runs a plan."""
        self.step, self.model = build_real(self.step, self.device_type)
        if plan_of_model(self.model) is not None:
            raise StateError("the model runs a plan already; call remove on that one first, or tune before apply")
        optimizer = self.step.optimizer
        self.optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self.device = device_of(self.model, self.device_type)
        self.found = Found(self.step, self.model)

    def find(self, given: Inputs, budget: str | int | float | None) -> list[Alternative]:
        """Return the plans that come into question."""
        return find_alternatives(given, budget=budget)

    def take(self, plan: Plan, steps: int) -> float:
        """Return the median time of some steps under a plan; infinite where memory ran out."""
        gc.collect()
        with self.found.kept():
            plan.apply(self.model, self.optimizer)
            try:
                times = run_steps(plan, self.step, self.model, self.optimizer, self.device, steps)
                return statistics.median(times)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return math.inf
            finally:
                plan.remove(self.model)


def device_of(model: nn.Module, device_type: str) -> torch.device:
    """Return the device that a model is on, before a plan puts parts of it elsewhere."""
    first = next(model.parameters(), None)
    return torch.device(device_type) if first is None else first.device


def run_steps(
    plan: Plan, step: Step, model: nn.Module, optimizer: Any, device: torch.device, steps: int
) -> list[float]:
    """Run steps of a planned model and return the milliseconds of each after the first few."""
    step = step if step.loss is None else replace(step, loss=plan.loss(step.loss))

    def run() -> None:
        step.execute(model, optimizer, device.type)

    for _ in range(_WARMUP):
        run()
    return [step_ms(run, device) for _ in range(steps)]
