"""Lever and Case: what lowers the peak, and the step that it is worked out for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from memfit.analysis.report import Report
from memfit.capture import Category, Phase, Step, Trace, chunked_losses, trace
from memfit.cost import Cost, Runtime
from memfit.errors import MemfitError
from memfit.hardware import Target
from memfit.memory import CATEGORIES, Bytes, Timeline
from memfit.sharding import ShardOptions, copies_ms
from memfit.solve import Limits, MinBudget, Problem, solve
from memfit.tradeoff import Policy, Unit
from memfit.units import display_bytes

if TYPE_CHECKING:
    from memfit.analysis.levers.early import EarlyCaptures

LEAST_PART = 0.005
"""A lever that saves less of the peak than this is left out."""
_LIMITS = Limits(gap=0.01, time_limit_s=2.0)
"""Levers are quick; `plan` proves."""
_DIGITS = 6
_LEAST_MS = 1e-3
"""A plan's times are rounded unit by unit: what is less than this is no difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The peak and the time of a changed step; `copies_ms` is the part that FSDP2's copies take."""

    peak_bytes: int
    step_ms: float
    copies_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The trace of a changed step, or None where the step does not take the change; `why` it could not be captured."""

    trace: Trace | None = None
    why: str = ""


def attempt(capture: Callable[[], Trace | None]) -> Attempt:
    """Capture a changed step, and say why where it fails."""
    try:
        return Attempt(trace=capture())
    except MemfitError as error:
        return Attempt(why=_first_line(error))
    except Exception as error:  # the user's own code meets what it was not written for
        return Attempt(why=f"the step cannot run so ({type(error).__name__}: {_first_line(error)})")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step on its target. `step` is None where only its trace is known; then nothing can be captured again.

    What is to be lowered is the step under its plan, or as it is where there is none. Where no plan fits, it is the
    fastest of the plans that need least. `left_out` collects, in words, what could not be worked out. `early` are
    captures that began before.
    """

    report: Report
    step: Step | None
    cost: Cost
    budget_bytes: int
    left_out: list[str] = field(default_factory=list)
    early: EarlyCaptures | None = None

    @property
    def trace(self) -> Trace:
        """The step as it was captured."""
        return self.report.trace

    @property
    def mesh(self) -> dict[str, int] | None:
        """The ranks that the step was captured on as it is; None where it is not parallel itself."""
        return self.trace.mesh or None

    @property
    def target(self) -> Target:
        """The hardware."""
        return self.report.target

    @cached_property
    def runtime(self) -> Runtime:
        """Times of the step as it was captured, whole."""
        return Runtime.of(self.trace, self.cost)

    @property
    def decided(self) -> frozenset[str]:
        """The kinds of decisions that the plan was free to take: what it left has no place among the levers."""
        if self.report.plan is None:
            return frozenset()
        problem = self.report.problem
        granted = problem.offload_link is not None
        return frozenset(kind for kind in problem.options.decided if kind != "offload" or granted)

    @property
    def hopeless(self) -> bool:
        """Whether there is a plan, and it says that nothing fits."""
        return self.report.plan is not None and self.report.plan.predicted is None

    @cached_property
    def chosen(self) -> tuple[tuple[Unit, Policy], ...]:
        """What is checkpointed, and how."""
        if not self.hopeless:
            return self.report.chosen
        least = self.min_budget
        if least is None:
            return ()
        fastest = solve(self.quick, least.peak_bytes, start=least.choice).chosen
        return tuple((candidate.unit, policy) for candidate, policy in fastest)

    @cached_property
    def timeline(self) -> Timeline:
        """Memory at every instant."""
        if self.hopeless:
            return self.report.problem.replay(self.chosen)
        return self.report.planned or self.report.baseline

    @property
    def peak_bytes(self) -> int:
        """The peak that levers are to lower."""
        return self.timeline.peak_bytes

    @cached_property
    def step_ms(self) -> float:
        """The time of the step, with communication that nothing hides and with recomputes."""
        return _step_ms(self.report.problem, sum(policy.recompute_ms for _, policy in self.chosen))

    @cached_property
    def quick(self) -> Problem:
        """The problem of the step, to be solved in little time."""
        return self.report.problem.with_limits(_LIMITS)

    @property
    def min_budget(self) -> MinBudget | None:
        """The plan that needs least; as it is proven where nothing fits."""
        return self.report.problem.min_budget if self.hopeless else self.quick.min_budget

    def matters(self, saves_bytes: int) -> bool:
        """Return whether so many bytes are worth a lever."""
        return saves_bytes >= max(1, LEAST_PART * self.peak_bytes)

    def captured(self, step: Step, *, what: str, advice: str = "") -> Trace | None:
        """Capture a changed step; None, and a note with advice, when the step cannot be changed so."""
        return self.noted(
            attempt(lambda: self.capture(lambda: trace(step, target=self.target, **self.trace.captured_on))),
            what=what,
            advice=advice,
        )

    def capture(self, function: Callable[[], Trace]) -> Trace:
        """Capture a changed step with the chunks of the loss that the plan has."""
        plan = self.report.plan
        if plan is None or not plan.chunked_loss:
            return function()
        with chunked_losses(plan.chunked_loss.setting):
            return function()

    @property
    def has_early(self) -> bool:
        """Whether captures that began early, of the step as it was given, are of the step under the plan."""
        return self.early is not None and (self.report.plan is None or not self.report.plan.chunked_loss)

    def noted(self, found: Attempt, *, what: str, advice: str = "") -> Trace | None:
        """Return the trace of an attempt; None, and a note with advice, where there is none."""
        if found.why:
            self.left_out.append(f"{what}: {advice} ({found.why})" if advice else f"{what}: {found.why}")
        return found.trace

    def effect(
        self, changed: Trace | None = None, *, target: Target | None = None, shard: ShardOptions | None = None
    ) -> Effect:
        """Return peak and time of a changed trace, on another target or sharded in another way.

        The plan's units are checkpointed as nearly as they can be.
        """
        options = self.report.problem.options
        options = options if shard is None else replace(options, shard=shard)
        found = self.runtime if changed is None else Runtime.of(changed, self.cost)
        problem = Problem.of(found, target or self.target, options)
        chosen = list(self._carried(problem))
        recompute_ms = sum(policy.recompute_ms for _, policy in chosen)
        sharding = problem.sharding
        return Effect(
            peak_bytes=problem.replay(chosen).peak_bytes,
            step_ms=_step_ms(problem, recompute_ms),
            copies_ms=0.0 if sharding is None else copies_ms(sharding.schedule, self.target.device),
        )

    def lever(
        self,
        name: str,
        how: str,
        effect: Effect,
        basis: Basis,
        *,
        assumes: str = "",
        units: Iterable[str] = (),
        same_numbers: bool = True,
        timed: bool = True,
        option: str = "",
    ) -> Lever:
        """Build the lever with this effect; not `timed` where only its memory is known."""
        return Lever(
            name=name,
            how=how,
            peak_bytes=effect.peak_bytes,
            saves_bytes=self.peak_bytes - effect.peak_bytes,
            costs_ms=_difference(effect.step_ms, self.step_ms) if timed else None,
            basis=basis,
            assumes=assumes,
            units=tuple(units),
            same_numbers=same_numbers,
            option=option,
        )

    @cached_property
    def in_optimizer(self) -> np.ndarray:
        """Which instants belong to the optimizer's step."""
        ops = self.timeline.trace.ops
        phases = np.array([op.phase is Phase.OPTIMIZER for op in ops] + [False])
        return phases[np.minimum(self.timeline.op, len(ops))]

    def row(self, category: Category) -> Bytes:
        """Return bytes of a category at every instant."""
        return self.timeline.during_by_row[CATEGORIES.index(category)]

    @property
    def peak_elsewhere_bytes(self) -> int:
        """The highest point outside of the optimizer's step."""
        return int(self.timeline.during_bytes[~self.in_optimizer].max(initial=0))

    def _carried(self, problem: Problem) -> Iterable[tuple[Unit, Policy]]:
        """Yield the plan's policies carried over to a changed step: of each unit the most similar one."""
        ratios = {unit.name: _ratio(policy) for unit, policy in self.chosen}
        if not ratios:
            return
        known = {unit.name for unit in self.report.problem.units}
        wanted = {}
        for unit in problem.allowed:
            name = unit.name if unit.name in known else unit.name.partition("#")[0]
            if name in ratios:
                wanted[unit.name] = ratios[name]
        for candidate in problem.candidates_among([unit for unit in problem.allowed if unit.name in wanted]):
            ratio = wanted[candidate.unit.name]
            yield candidate.unit, min(candidate.policies, key=lambda policy, ratio=ratio: abs(_ratio(policy) - ratio))


def _step_ms(problem: Problem, recompute_ms: float) -> float:
    return problem.runtime.total_ms + problem.exposed_ms + recompute_ms


def _difference(changed_ms: float, step_ms: float) -> float:
    found = round(changed_ms - step_ms, _DIGITS)
    return found if abs(found) >= _LEAST_MS else 0.0


def _ratio(policy: Policy) -> float:
    held = policy.discarded_bytes + policy.cached_bytes
    return policy.discarded_bytes / held if held else 0.0


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "it says no more"


# Lever


SMALL_PART = 0.01
"""A lever that saves less of the peak than this comes after all others."""
Basis = Literal["captured", "estimated"]
"""`captured`: the changed step was captured or solved, and replayed op by op. `estimated`: arithmetic on the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What to change, in a line of code, and what that would do to the peak and the time of a step.

    `costs_ms` is how much longer a step takes, negative when it is faster and None when that is not known. `units` are
    the modules it is about. With `same_numbers` the step computes what it did, but for rounding. `option` is what to
    add to `memfit plan` to plan with it, empty where the command has no option for it. One that is `of_reserved` leaves
    the peak of tensors as it is, and `saves_bytes` of what the caching allocator reserves for them.
    """

    name: str
    how: str
    peak_bytes: int
    saves_bytes: int
    costs_ms: float | None
    basis: Basis
    assumes: str = ""
    units: tuple[str, ...] = ()
    same_numbers: bool = True
    option: str = ""
    of_reserved: bool = False

    @property
    def free(self) -> bool:
        """Whether a step takes no longer."""
        return self.costs_ms is not None and self.costs_ms <= 0

    @property
    def bytes_per_ms(self) -> float | None:
        """Bytes saved for each millisecond lost; None when nothing is lost, or it is not known how much."""
        return None if self.costs_ms is None or self.costs_ms <= 0 else self.saves_bytes / self.costs_ms


def describe_shortfall(lever: Lever, budget_bytes: int) -> str:
    """Say whether a step that does not fit a budget does with this lever alone, or what is still missing."""
    missing = lever.peak_bytes - budget_bytes
    return "enough by itself" if missing <= 0 else f"{display_bytes(missing)} missing"


def sort_levers(levers: list[Lever]) -> tuple[Lever, ...]:
    """Sort levers: free ones first, then by bytes saved per millisecond, then those of unknown time.

    What saves next to nothing comes last.
    """
    return tuple(sorted(levers, key=_place))


def _place(lever: Lever) -> tuple[bool, int, float]:
    small = lever.saves_bytes < SMALL_PART * (lever.peak_bytes + lever.saves_bytes)
    if lever.free:
        return small, 0, -float(lever.saves_bytes)
    if lever.bytes_per_ms is not None:
        return small, 1, -lever.bytes_per_ms
    return small, 2, -float(lever.saves_bytes)
