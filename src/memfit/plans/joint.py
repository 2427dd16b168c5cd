"""Decisions that change the step, its sharding or its optimizer: branch and bound over settings.

Note [Settings]: checkpointing and offload are decided by the solver, unit by unit. What is left changes the program
itself: in how many chunks the loss is computed, how the optimizer does its step, which sharded units stay gathered, how
many are gathered ahead. Each combination is a setting. A setting has a lower bound of its step time, which gets better
as more is known of it:

1. Before it is captured, from the settings that are known. Chunks of the loss run the kernels of the whole loss on the
   same bytes, and the softmax once more, and they save at most the copies of the logits: no setting of n chunks is
   faster than the whole loss with that many bytes more budget. Of two numbers of chunks the larger has more kernels and
   needs no more memory. Another optimizer step saves at most its own time, and no recompute: nothing that is
   checkpointed is there while it runs. Other sharding saves at most what communication is exposed.
2. Captured and timed: the step without any recompute.
3. Solved: the step under its plan, proven by the solver.

The first incumbent is the plain solve. Settings are looked at in the order of their bounds until none is below the
incumbent; those that would have to be captured only if they may gain `WORTH` of the step. Sharding is looked at in a
second round, for the best setting of the first. The answer is the best over these, and its gap is the solver's.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from msgspec import UNSET

from memfit.capture import (
    ChunkedLoss,
    Implementation,
    Phase,
    Step,
    Trace,
    chunked_losses,
    find_chunkable,
    find_copies,
    find_logits,
    find_softmaxes,
    implementations_of_step,
    is_chunked,
    step_with,
    trace,
)
from memfit.cost import Cost, Runtime
from memfit.errors import InputError
from memfit.hardware import Family
from memfit.plans.record import Decision
from memfit.sharding import ShardOptions
from memfit.solve import Problem, Solved, solve
from memfit.text import counted
from memfit.tradeoff import find_units
from memfit.units import display_bytes, display_ms

CHUNKS = (16, 8, 4, 2)
"""The most first: if they are not better than the whole loss, none are, and fewer gain little on them."""
MOST_CHUNKS = max(CHUNKS)
PREFETCH = (0, 1, 2)
KEPT = (0, 1, 2, 4, 8, 16)
"""How many of the last units may stay gathered; all are tried too."""
WORTH = 1e-3
"""A setting is captured only if its bound is lower than the best by this part of the step."""
_LOSS_FAMILIES = (
    Family.NORM,
    Family.ELEMENTWISE,
    Family.TRANSCENDENTAL,
    Family.INDEXING,
    Family.REDUCTION,
    Family.COPY,
    Family.OTHER,
)
"""Kernels of a cross entropy."""
_GIB = 1 << 30
_LEAST_GAIN_MS = 1e-5
"""Times within ten nanoseconds count as equal."""
EarlyChunks = Callable[[ChunkedLoss], Trace | None]
"""Gives a trace with a chunked loss that was captured before, None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run the step; None is as it was given."""

    chunked: ChunkedLoss | None = None
    implementation: Implementation | None = None
    shard: ShardOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was solved, in which setting."""

    problem: Problem
    solved: Solved
    setting: Setting = Setting()

    @property
    def base_ms(self) -> float:
        """The time of the step without what the plan adds."""
        return base_ms(self.problem)

    @property
    def step_ms(self) -> float:
        """The time of the step under the plan, infinite when there is none."""
        return self.base_ms + self.solved.recompute_ms

    def better_than(self, other: Answer) -> bool:
        """Return whether it is faster, or nearer to the budget when neither fits."""
        if self.solved.choice is None and other.solved.choice is None:
            mine, theirs = self.solved.minimum_budget_bytes, other.solved.minimum_budget_bytes
            return mine is not None and (theirs is None or mine < theirs)
        return self.step_ms < other.step_ms - _LEAST_GAIN_MS


def base_ms(problem: Problem) -> float:
    """Return the time of a problem's step when nothing is recomputed."""
    return problem.runtime.total_ms + problem.exposed_ms


class JointSearch:
    """Branch and bound over the settings of one step, from the plain solve (Note [Settings]).

    `kinds` are the decisions that may be taken; `loss_chunks` fixes one of them. After `run`, `best` is the answer,
    `tried` counts settings that were solved, `left_out` says what could not be captured.
    """

    def __init__(
        self,
        first: Answer,
        step: Step,
        cost: Cost,
        kinds: Iterable[str],
        *,
        loss_chunks: int | None = None,
        early: EarlyChunks | None = None,
    ) -> None:
        self.first = self.best = first
        self.tried = 1
        self.left_out: list[str] = []
        self._step, self._cost, self._early = step, cost, early
        self._kinds = frozenset(kinds)
        self._budget_bytes = first.solved.budget_bytes
        self._traces: dict[tuple[ChunkedLoss | None, Implementation | None], Trace | None] = {
            (None, None): first.problem.trace
        }
        self._runtimes: dict[tuple[ChunkedLoss | None, Implementation | None], Runtime] = {}
        self._problems: dict[Setting, Problem | None] = {first.setting: first.problem}
        self._answers: dict[Setting, Answer] = {first.setting: first}
        self._relaxed: dict[tuple[Setting, int], float] = {}
        self._chunkable = find_chunkable(first.problem.trace)
        self._fixed = None if loss_chunks in (None, 1) else self._fix_loss(loss_chunks)

    def _fix_loss(self, chunks: int) -> ChunkedLoss:
        """Make the step with its loss in so many chunks the incumbent."""
        reached = self._chunkable is not None and self._step_is_reached
        fixed = self._chunkable.with_chunks(chunks) if self._chunkable is not None and reached else None
        problem = None if fixed is None else self._problem(Setting(chunked=fixed))
        if fixed is None or problem is None:
            raise InputError(
                f"loss_chunks={chunks}: the loss of this step cannot be computed in chunks; it is to be one "
                "F.cross_entropy over rows of logits, in float32, called in the model or in the loss function of the "
                f"step, with at least that many rows{''.join(f' ({each})' for each in self.left_out)}"
            )
        found = Answer(problem=problem, solved=solve(problem, self._budget_bytes), setting=Setting(chunked=fixed))
        self._answers[found.setting] = self.best = found
        return fixed

    # -- the settings -------------------------------------------------------------------------------------------------

    def settings(self) -> list[Setting]:
        """Return every setting of loss and optimizer but the given one, sharded as it was given."""
        chunks: list[ChunkedLoss | None] = [None]
        if self._fixed is not None:
            chunks = [self._fixed]
        elif "loss" in self._kinds and self._chunkable is not None and self._step_is_reached:
            chunks += [self._chunkable.with_chunks(number) for number in CHUNKS]
        ways: list[Implementation | None] = [None]
        if "optimizer" in self._kinds:
            ways += implementations_of_step(self._step)
        every = itertools.product(chunks, ways)
        found = [Setting(chunked=one, implementation=two) for one, two in every]
        return [setting for setting in found if setting != self.best.setting]

    def shardings(self) -> list[Setting]:
        """Return the best setting so far with every other way to keep and prefetch sharded units."""
        problem = self.first.problem
        given = problem.options.shard
        if problem.sharding is None or given.parallel != "fsdp" or problem.trace.mesh:
            return []
        kept: list[tuple[int, bool | int]] = [(given.keep_last, given.reshard_after_forward)]
        if "reshard" in self._kinds:
            units = sum(bool(unit.module) for unit in problem.sharding.units)
            kept = [*((number, True) for number in KEPT if number < units), (False, False)]
        ahead = PREFETCH if "prefetch" in self._kinds else (given.prefetch,)
        found = []
        for number, (last, reshards) in itertools.product(ahead, kept):
            changed = replace(given, keep_last=last, reshard_after_forward=reshards, prefetch=number)
            if changed != given:
                found.append(replace(self.best.setting, shard=changed))
        return found

    @property
    def _step_is_reached(self) -> bool:
        """Whether an engine reaches the loss: in the model's call, or a function that `plan.loss` is given."""
        assert self._chunkable is not None
        return self._chunkable.inside or self._step.loss is not None

    def run(self) -> Answer:
        """Find the best answer over all settings: of loss and optimizer first, then of the sharding of the best."""
        self._explore(self.settings())
        self._explore(self.shardings())
        return self.best

    def _explore(self, left: list[Setting]) -> None:
        """Try settings in the order of their bounds until none is below the best."""
        while left:
            bounds = [self.bound_ms(setting) for setting in left]
            bound = min(bounds)
            setting = left.pop(bounds.index(bound))
            known = (setting.chunked, setting.implementation) in self._traces or setting.chunked is None
            worth = _LEAST_GAIN_MS if known else WORTH * self.best.step_ms
            if math.isinf(bound):
                break
            if math.isinf(self.best.step_ms) or bound < self.best.step_ms - worth:
                self.try_setting(setting)
            elif known:
                break  # nor is any other bound below

    def try_setting(self, setting: Setting) -> Answer | None:
        """Solve a setting unless its own bound is no better than the best; None where it cannot be run so."""
        problem = self._problem(setting)
        if problem is None or base_ms(problem) + self._least_ms(setting) >= self.best.step_ms - _LEAST_GAIN_MS:
            return None
        found = Answer(problem=problem, solved=solve(problem, self._budget_bytes), setting=setting)
        self.tried += 1
        self._answers[setting] = found
        if found.better_than(self.best):
            self.best = found
        return found

    # -- bounds -------------------------------------------------------------------------------------------------------

    def bound_ms(self, setting: Setting) -> float:
        """Return a time that no plan of the setting is below; infinite for one that is known not to run."""
        chunked, implementation, shard = setting.chunked, setting.implementation, setting.shard
        parts = (Setting(chunked=chunked), Setting(implementation=implementation), setting)
        if any(part in self._problems and self._problems[part] is None for part in parts):
            return math.inf
        problem = self._problems.get(setting)
        if problem is not None:
            return base_ms(problem) + self._least_ms(setting)
        if shard is not None:
            whole = self._problems[replace(setting, shard=None)]
            assert whole is not None
            return base_ms(whole) - whole.exposed_ms + self._least_ms(setting)
        first = self.first.problem
        bound = self._loss_bound_ms(chunked, self.first)
        if implementation is not None:
            known = self._problems.get(Setting(implementation=implementation))
            if known is None:
                bound -= _phase_ms(first, Phase.OPTIMIZER)
            else:
                bound += known.runtime.total_ms - first.runtime.total_ms
        return bound

    def _least_ms(self, setting: Setting) -> float:
        """Return what the plans of the same step add under a sharding that gathers no more; it needs no more memory."""
        given = self.first.problem.options.shard
        shard = setting.shard or given
        return max(
            (
                answer.solved.bound_ms
                for other, answer in self._answers.items()
                if replace(other, shard=None) == replace(setting, shard=None)
                and answer.solved.choice is not None
                and _gathers_more(shard, other.shard or given)
            ),
            default=0.0,
        )

    def _loss_bound_ms(self, chunked: ChunkedLoss | None, whole: Answer) -> float:
        """Return a time that no plan with the loss in so many chunks is below, from the answer with the whole loss."""
        if chunked is None:
            # Another optimizer step may fit where the given one does not; else it changes no recompute.
            return whole.base_ms + (whole.solved.bound_ms if whole.solved.choice is not None else 0.0)
        bound = whole.base_ms + self._again_ms
        if bound < self.best.step_ms:
            bound += self._relaxed_ms(whole, self._copied_bytes)
        for number in CHUNKS:
            known = self._answers.get(Setting(chunked=chunked.with_chunks(number)))
            if known is None or bound >= self.best.step_ms:
                continue
            if chunked.chunks > number:
                more = math.ceil(self._copied_bytes * (1 / number - 1 / chunked.chunks))
                bound = max(bound, known.base_ms + self._relaxed_ms(known, more))
            elif known.solved.choice is None:
                bound = math.inf  # fewer chunks need no less
            else:
                fewer_ms = (number - chunked.chunks) * self._kernels_ms(known.problem, number)
                bound = max(bound, known.base_ms - fewer_ms + known.solved.bound_ms)
        return bound

    @cached_property
    def _copied_bytes(self) -> int:
        """Bytes of the copies of the logits that the whole loss makes."""
        captured = self.first.problem.trace
        logits = find_logits(captured)
        return 0 if logits is None else sum(captured.storages[each].bytes for each in find_copies(captured, logits))

    @cached_property
    def _again_ms(self) -> float:
        """The time of the softmaxes, which chunks run once more in their backward."""
        runtime = self.first.problem.runtime
        classes = None if self._chunkable is None else self._chunkable.classes
        return float(sum(runtime.op_ms[index] for index, _ in find_softmaxes(runtime.trace, classes)))

    def _relaxed_ms(self, answer: Answer, more_bytes: int) -> float:
        """Return the least that a plan adds with so much more budget; infinite where none fits."""
        key = (answer.setting, more_bytes)
        if key not in self._relaxed:
            self._relaxed[key] = 0.0
            if answer.solved.recompute_ms > 0.0:
                solved = solve(answer.problem, self._budget_bytes + more_bytes)
                self._relaxed[key] = math.inf if solved.choice is None else solved.bound_ms
        return self._relaxed[key]

    def _kernels_ms(self, problem: Problem, chunks: int) -> float:
        """Return at most what the kernels of one chunk cost beside the bytes that they move."""
        device = problem.target.device
        kernel_ms = max(device.efficiency[family].overhead_ms for family in _LOSS_FAMILIES)
        host_ms = max(device.efficiency.host.forward_ms, device.efficiency.host.backward_ms)
        most_ms = kernel_ms + host_ms if device.type == "cpu" else max(kernel_ms, host_ms)
        before = Counter(op.name for op in self.first.problem.runtime.trace.ops)
        times: dict[str, list[float]] = defaultdict(list)
        for op, op_ms in zip(problem.runtime.trace.ops, problem.runtime.op_ms, strict=True):
            times[op.name].append(min(float(op_ms), most_ms))
        added = (sorted(each, reverse=True)[: max(0, len(each) - before[name])] for name, each in times.items())
        return sum(sum(each) for each in added) / chunks

    # -- captured settings --------------------------------------------------------------------------------------------

    def _problem(self, setting: Setting) -> Problem | None:
        """Return the problem of a setting; None, and why, where the step does not run so."""
        if setting not in self._problems:
            self._problems[setting] = self._build(setting)
        return self._problems[setting]

    def _build(self, setting: Setting) -> Problem | None:
        key = (setting.chunked, setting.implementation)
        if key not in self._traces:
            self._traces[key] = self._capture(*key)
        captured = self._traces[key]
        if captured is None:
            return None
        if key not in self._runtimes:
            self._runtimes[key] = Runtime.of(captured, self._cost)
        options = self.first.problem.options
        if setting.shard is not None:
            options = replace(options, shard=setting.shard)
        if setting.chunked is not None:
            options = replace(options, forbid=(*options.forbid, *units_with_loss(captured, setting.chunked)))
        try:
            return Problem.of(self._runtimes[key], self.first.problem.target, options)
        except InputError as error:  # names of units that this step does not have, or that must be checkpointed
            self.left_out.append(f"{describe(setting)}: {error}")
            return None

    def _capture(self, chunked: ChunkedLoss | None, implementation: Implementation | None) -> Trace | None:
        plain = self.first.problem.trace
        try:
            early = None if self._early is None or chunked is None or implementation else self._early(chunked)
            captured = early or self._capture_now(chunked, implementation)
        except Exception as error:  # the user's own code meets what it was not written for
            what = describe(Setting(chunked=chunked, implementation=implementation))
            self.left_out.append(f"{what}: the step cannot run so ({type(error).__name__}: {error})")
            return None
        if chunked is not None and not is_chunked(captured, plain, chunked):
            return None  # the loss does not call torch's function, or has fewer rows
        return None if captured.fingerprint == plain.fingerprint else captured

    def _capture_now(self, chunked: ChunkedLoss | None, implementation: Implementation | None) -> Trace:
        plain, step = self.first.problem.trace, self._step
        with contextlib.ExitStack() as stack:
            if chunked is not None:
                stack.enter_context(chunked_losses(chunked))
            if implementation is not None:
                step = stack.enter_context(step_with(step, implementation))
            return trace(step, target=self.first.problem.target, **plain.captured_on)

    # -- what was decided ---------------------------------------------------------------------------------------------

    def decisions(self) -> list[Decision]:
        """Return what the best answer decides, what that saves and costs."""
        solved = self.best.solved
        found = []
        dropped = sum(policy.discarded_bytes for _, policy in solved.chosen)
        dropping = [policy for _, policy in solved.chosen if policy.stop >= 0]
        if dropping:
            recompute_ms = max(0.0, solved.recompute_ms - solved.exposed_offload_ms)
            found.append(_decision("checkpoint", counted(len(dropping), "unit"), dropped, recompute_ms))
        away = [policy for _, policy in solved.chosen if policy.offload]
        if away:
            moved = sum(policy.offloaded_bytes for policy in away)
            found.append(_decision("offload", counted(len(away), "unit"), moved, solved.exposed_offload_ms))
        setting = self.best.setting
        if setting.chunked is not None:
            found += self._against("loss", f"{setting.chunked.chunks} chunks", replace(setting, chunked=None))
        if setting.implementation is not None:
            found += self._against("optimizer", setting.implementation, replace(setting, implementation=None))
        if setting.shard is not None:
            found += self._sharding_decisions(setting, setting.shard)
        return found

    def _sharding_decisions(self, setting: Setting, shard: ShardOptions) -> Iterable[Decision]:
        given = self.first.problem.options.shard
        if (shard.keep_last, shard.reshard_after_forward) != (given.keep_last, given.reshard_after_forward):
            other = replace(shard, keep_last=given.keep_last, reshard_after_forward=given.reshard_after_forward)
            yield from self._against("reshard", describe_reshard(shard), self._with_shard(setting, other))
        if shard.prefetch != given.prefetch:
            other = replace(shard, prefetch=given.prefetch)
            what = f"{counted(shard.prefetch, 'unit')} ahead"
            yield from self._against("prefetch", what, self._with_shard(setting, other))

    def _with_shard(self, setting: Setting, shard: ShardOptions) -> Setting:
        return replace(setting, shard=None if shard == self.first.problem.options.shard else shard)

    def _against(self, kind: str, what: str, other: Setting) -> list[Decision]:
        """Return a decision with its difference to another setting, which is captured where it was not."""
        problem = self._problem(other)
        if problem is None:
            return []
        here = self.best.problem
        saves = problem.replay(()).peak_bytes - here.replay(()).peak_bytes
        return [_decision(kind, what, saves, base_ms(here) - base_ms(problem))]

    def price_ms_per_gib(self) -> float | None:
        """Return what a little less budget would add to the step, for each GiB; None where nothing fits it."""
        best = self.best
        if best.solved.choice is None or not best.solved.recompute_ms:
            return None if best.solved.choice is None else 0.0
        less = min(_GIB, self._budget_bytes // 64)
        solved = solve(best.problem, self._budget_bytes - less)
        if solved.choice is None:
            return None
        return max(0.0, solved.recompute_ms - best.solved.recompute_ms) * _GIB / less


def _decision(kind: str, setting: str, saves_bytes: int, costs_ms: float) -> Decision:
    priced = saves_bytes > 0 and costs_ms >= 0
    price = {"ms_per_gib": costs_ms * _GIB / saves_bytes} if priced else {}
    return Decision(kind=kind, setting=setting, saves_bytes=int(saves_bytes), costs_ms=costs_ms, **price)  # type: ignore[arg-type]


def describe(setting: Setting) -> str:
    """Return what a setting changes, in words."""
    parts = []
    if setting.chunked is not None:
        parts.append(f"the loss in {setting.chunked.chunks} chunks")
    if setting.implementation is not None:
        parts.append(f"a {setting.implementation!r} optimizer step")
    if setting.shard is not None:
        parts.append(f"{describe_reshard(setting.shard)}, prefetch {setting.shard.prefetch}")
    return ", ".join(parts) or "the step as it is"


def describe_reshard(shard: ShardOptions) -> str:
    """Return which units stay gathered between forward and backward."""
    if shard.reshard_after_forward is False:
        return "all units kept"
    if shard.keep_last:
        return "the last unit kept" if shard.keep_last == 1 else f"the last {shard.keep_last} units kept"
    return "all units resharded"


def _gathers_more(shard: ShardOptions, given: ShardOptions) -> bool:
    """Return whether as many units are gathered at every instant as with the given sharding, or more."""
    keeps = shard.reshard_after_forward is False or (
        given.reshard_after_forward is True and shard.keep_last >= given.keep_last
    )
    return keeps and shard.prefetch >= given.prefetch


def describe_decision(decision: Decision) -> str:
    """Return a note on a decision."""
    saves = decision.saves_bytes
    bytes_ = f"saves {display_bytes(saves)}" if saves >= 0 else f"takes {display_bytes(-saves)} more"
    costs = decision.costs_ms
    time = f"costs {display_ms(costs)}" if costs >= 0 else f"saves {display_ms(-costs)}"
    price = "" if decision.ms_per_gib is UNSET else f", {display_ms(decision.ms_per_gib)} a GiB"
    return f"decided {decision.kind}: {decision.setting}; {bytes_}, {time}{price}"


def units_with_loss(captured: Trace, chunked: ChunkedLoss) -> list[str]:
    """Name the units that compute chunks of the loss, which recompute themselves: no plan recomputes them again."""
    ops = [index for index, _ in find_softmaxes(captured, chunked.classes)]
    return [
        unit.name
        for unit in find_units(captured)
        if unit.kind == "loss" or any(unit.begin <= op < unit.end for op in ops)
    ]


def _phase_ms(problem: Problem, phase: Phase) -> float:
    runtime = problem.runtime
    return float(sum(ms for op, ms in zip(runtime.trace.ops, runtime.op_ms, strict=True) if op.phase is phase))
