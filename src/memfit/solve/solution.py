"""From a trace, its times, a target and a budget to the fastest plan that fits, judged by replay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from memfit.capture import NO_INDEX, Trace, no_garbage_collection
from memfit.cost import Runtime
from memfit.errors import InputError
from memfit.hardware import EngineTimes, OffloadLink, Target
from memfit.memory import Bytes, Timeline
from memfit.sharding import ShardEngine, Sharding, ShardOptions, captured_ranks, shard
from memfit.solve.decisions import Decided
from memfit.solve.dp import DynamicProgram
from memfit.solve.micro_batches import find_micro_batches
from memfit.solve.milp import Incumbent, Limits, Status, relative_gap
from memfit.solve.min_budget import MinBudget, can_meet, min_budget
from memfit.solve.options import SolveOptions
from memfit.solve.program import Candidate, Choice, MicroBatches, Program, build_candidates, offload_what_is_hidden
from memfit.solve.search import SAME_MS, SearchResult, infeasible, search
from memfit.tradeoff import (
    Frontier,
    Frontiers,
    OffloadWindow,
    Policy,
    TraceColumns,
    Unit,
    UnitColumns,
    add_offload,
    build_frontiers,
    build_offloads,
    build_recompute,
    choose_level,
    find_windows,
    host_bytes,
    limit_offload,
)

_TIGHTENINGS = 8


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A step on a target, ready to be planned under any budget: its trace, times, target, sharding and frontiers.

    Built once for a step, and carried through solve, curve, search, explain and report. Frontiers are built when they
    are first asked for: to replay a step without a plan takes none.
    """

    timeline: Timeline
    runtime: Runtime
    target: Target
    sharding: Sharding | None
    options: SolveOptions

    @classmethod
    def of(cls, runtime: Runtime, target: Target, options: SolveOptions | None = None) -> Problem:
        """Return everything that does not depend on the budget; options that the step cannot follow are refused."""
        options = options or SolveOptions()
        if options.offload and target.device.offload_link is None:
            raise InputError(
                f"nothing is known of the disk that {target.device.name!r} would offload to; measure it with memfit "
                "calibrate and give the device that it writes as target, or leave offload out"
            )
        timeline = Timeline.of(runtime.trace, target.device.allocator.rounding_bytes)
        if runtime.trace.mesh:
            sharding = captured_ranks(timeline, runtime, target)
        else:
            sharding = shard(timeline, runtime, target, options.shard) if target.ranks > 1 else None
        runtime = runtime if sharding is None else sharding.runtime
        problem = cls(
            timeline=timeline,
            runtime=runtime,
            target=target,
            sharding=sharding,
            options=options,
        )
        if options.ac_units is not None or options.forbid:
            _ = problem.allowed
        if options.force:
            _check_forced(options, problem.candidates, problem.allowed)
        return problem

    def with_limits(self, limits: Limits) -> Problem:
        """Return the same problem, to be solved under other limits; what was built is shared."""
        other = replace(self, options=replace(self.options, limits=limits))
        _ = self.candidates
        built = ("frontiers", "windows", "candidates", "micro_batches", "dynamic_program", "_captured")
        other.__dict__.update({name: self.__dict__[name] for name in built if name in self.__dict__})
        return other

    def with_target(self, target: Target) -> Problem:
        """Return the same problem on a target whose allocator reserves in another way; what was built is shared."""
        other = replace(self, target=target)
        built = ("frontiers", "windows", "candidates", "micro_batches", "dynamic_program", "_captured", "min_budget")
        other.__dict__.update({name: self.__dict__[name] for name in built if name in self.__dict__})
        return other

    @property
    def trace(self) -> Trace:
        """The step; under sharding as it was captured, whole."""
        return self.timeline.trace

    @cached_property
    def frontiers(self) -> Frontiers:
        """The units and their policies."""
        return build_frontiers(self.runtime.trace, self.runtime.op_ms, points=self.options.points)

    @property
    def trace_columns(self) -> TraceColumns:
        """The columns of the trace that a rank runs."""
        return self.frontiers.trace_columns

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every unit of the step, also those that may not be checkpointed."""
        return self.frontiers.units

    @cached_property
    def allowed(self) -> tuple[Unit, ...]:
        """The units that may be checkpointed."""
        sharded = self.options.shard.units or ()
        if self.sharding is not None:
            sharded = tuple(unit.module for unit in self.sharding.units)
        return self.options.allowed(self.units, sharded)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The units that may be checkpointed and have something to give up, with their policies."""
        return self.candidates_among(self.allowed)

    @no_garbage_collection()
    def candidates_among(self, units: Sequence[Unit]) -> tuple[Candidate, ...]:
        """Return those of these units that have something to give up, with their policies."""
        frontiers = [self.frontiers.of(unit) for unit in units]
        windows: dict[str, OffloadWindow] = {}
        link = self.offload_link
        if link is not None:
            hidden = {
                unit.name: min(frontier.discardable_bytes, self.windows[unit.name].hidden_bytes(link))
                for unit, frontier in zip(units, frontiers, strict=True)
                if unit.name in self.windows
            }
            able = [unit for unit in units if hidden.get(unit.name)]
            # Bytes count for as long as they are gone: an outermost unit copies much, and late.
            gains = {unit.name: hidden[unit.name] * self.windows[unit.name].gone_ms for unit in able}
            windows = choose_level(able, self.windows, gains)
            frontiers = self._with_offload(units, frontiers, windows, link)
            if self.target.host_memory_bytes is not None and self.target.device.type != "cpu":
                frontiers = self._within_host(units, frontiers, windows, link, self.target.host_memory_bytes)
        found = build_candidates(
            units,
            frontiers,
            forced=self.options.forced(units),
            second_run_ms=self.second_run_ms,
            windows=windows,
        )
        if self.options.offload == "hidden" and link is not None:
            return offload_what_is_hidden(found, link)
        return found

    def recompute_ms(self, unit: Unit, policy: Policy) -> float:
        """Return what a policy of a unit adds to the step by this problem's times."""
        if policy.stop < 0:
            return policy.exposed_ms
        ops_ms = float(self.runtime.op_ms[[unit.begin + offset for offset in policy.recomputed]].sum())
        return ops_ms + self.second_run_ms * (unit.end - unit.begin) + policy.exposed_ms

    @property
    def second_run_ms(self) -> float:
        """What the host takes for each op of a unit that is recomputed, beyond the ops themselves."""
        measured = self._engine_times
        return self.target.device.efficiency.host.second_run_ms if measured is None else measured.second_run_ms

    @property
    def _engine_times(self) -> EngineTimes | None:
        """What was measured of the engine that shards on this device, if anything."""
        if self.sharding is None:
            return None
        half = self.sharding.param_dtype in ("bfloat16", "float16")
        return self.target.device.engine(self.options.shard.engine or "fsdp2", half=half)

    def _with_offload(
        self,
        units: Sequence[Unit],
        frontiers: Sequence[Frontier],
        windows: Mapping[str, OffloadWindow],
        link: OffloadLink,
    ) -> list[Frontier]:
        """Return the frontiers, with policies that offload where units have windows.

        Units that share a frontier still do where the units after them take the same time.
        """
        known: dict[tuple[int, float, float], Frontier] = {}
        found = []
        for unit, frontier in zip(units, frontiers, strict=True):
            window = windows.get(unit.name)
            if window is None:
                found.append(frontier)
                continue
            key = (id(frontier), window.forward_ms, window.backward_ms)
            if key not in known:
                columns = UnitColumns.of(self.trace_columns, unit)
                known[key] = add_offload(
                    frontier,
                    columns,
                    window,
                    link,
                    points=self.options.points,
                    # The caching allocator gives smaller ones out of segments of their own: nobody else would use them.
                    least_bytes=self.target.device.allocator.small_limit_bytes,
                )
            found.append(known[key])
        return found

    def _within_host(
        self,
        units: Sequence[Unit],
        frontiers: Sequence[Frontier],
        windows: Mapping[str, OffloadWindow],
        link: OffloadLink,
        limit_bytes: int,
    ) -> list[Frontier]:
        """Return the frontiers with as much offload as the host's memory allows (tradeoff, Note [Host memory])."""
        known: dict[int, list[int]] = {}
        able = [place for place, unit in enumerate(units) if unit.name in windows]
        for place in able:
            if id(frontiers[place]) not in known:
                columns = UnitColumns.of(self.trace_columns, units[place])
                known[id(frontiers[place])] = [host_bytes(columns, each) for each in frontiers[place].policies]
        taken = [known[id(frontiers[place])] for place in able]
        if not able or sum(map(max, taken)) <= limit_bytes:
            return list(frontiers)
        own = [windows[units[place].name] for place in able]
        limited = limit_offload([frontiers[place] for place in able], taken, own, link, limit_bytes)
        found = dict(enumerate(frontiers)) | dict(zip(able, limited, strict=True))
        return [found[place] for place in range(len(units))]

    def host_bytes(self, chosen: Iterable[tuple[Unit, Policy]]) -> int:
        """Return what a rank's host takes for what these policies offload: pinned memory, or a file of a CPU."""
        away = [(unit, policy) for unit, policy in chosen if policy.offload]
        if self.target.device.type == "cpu":
            return sum(policy.offloaded_bytes for _, policy in away)
        return sum(host_bytes(UnitColumns.of(self.trace_columns, unit), policy) for unit, policy in away)

    @property
    def offload_link(self) -> OffloadLink | None:
        """The link over which units may offload; None where they may not.

        A CPU's disk is used only when asked for by name, and a GPU's host unasked only where its memory was granted.
        """
        is_granted = self.options.decide is not None or self.target.host_memory_bytes is not None
        is_decided = "offload" in self.options.decided and self.target.device.type != "cpu" and is_granted
        link, measured = self.target.device.offload_link, self._engine_times
        if link is None or not (self.options.offload or is_decided):
            return None
        if measured is None:
            return link
        return replace(link, compute_s_per_byte=link.compute_s_per_byte + measured.offload_s_per_byte)

    @cached_property
    def windows(self) -> dict[str, OffloadWindow]:
        """When units may copy what they offload, by name."""
        return find_windows(self.runtime.trace, self.runtime.op_ms, self.units)

    def program(self, budget_bytes: int) -> Program:
        """Build the program of one budget."""
        levels = self.sharding or self.timeline
        if isinstance(levels, Sharding):
            return Program(levels.before, levels.during, budget_bytes, self.candidates, self.micro_batches)
        return Program(levels.before_bytes, levels.during_bytes, budget_bytes, self.candidates, self.micro_batches)

    @cached_property
    def dynamic_program(self) -> DynamicProgram | None:
        """The dynamic program for all budgets, every micro-batch by itself; None where candidates overlap."""
        return DynamicProgram.of(self.program(0))

    @cached_property
    def micro_batches(self) -> MicroBatches | None:
        """The micro-batches that take one policy; None when there is one, or each may have its own."""
        if self.options.micro_batches == "own":
            return None
        return find_micro_batches(self.runtime.trace, self.candidates)

    @property
    def during_by_row(self) -> Bytes:
        """Levels while each op runs, a row for each category, nothing checkpointed."""
        return (self.sharding or self.timeline).during_by_row

    @property
    def baseline_bytes(self) -> int:
        """The peak when nothing is checkpointed."""
        return int(self.program(0).during.max())

    @cached_property
    def min_budget(self) -> MinBudget | None:
        """The plan with the lowest peak; None when none was found in the time that options give.

        Its replay may be a little lower than the rows are, which count what several units hold for each of them.
        """
        dp = None if self.micro_batches else self.dynamic_program
        return min_budget(self.program(1), self.options.limits, dp=dp)

    def bound_ms(self, budget_bytes: int) -> float:
        """Return a time that no plan adds less than, for a fraction of what a solve takes; infinite where none fits."""
        dp = self.dynamic_program
        return 0.0 if dp is None else dp.bound_ms(budget_bytes)

    def can_meet(self, budget_bytes: int) -> bool:
        """Return False where it is proven that no plan meets a budget."""
        if self.is_known_to_need_more_than(budget_bytes):
            return False
        dp = None if self.micro_batches else self.dynamic_program
        return can_meet(self.program(1), budget_bytes, dp=dp)

    def is_known_to_need_more_than(self, budget_bytes: int) -> bool:
        """Return whether the lowest peak is known and proven to be above a budget, which saves a long search."""
        return (
            "min_budget" in self.__dict__ and self.min_budget is not None and self.min_budget.bound_bytes > budget_bytes
        )

    @property
    def min_budget_is_unproven(self) -> bool:
        """Whether the lowest peak was asked for and could not be proven in its time."""
        return "min_budget" in self.__dict__ and self.min_budget is not None and not self.min_budget.proven

    @cached_property
    def _captured(self) -> Timeline:
        """The trace that a rank runs, nothing sharded: under sharding it may be without casts of parameters."""
        trace = self.runtime.trace
        return self.timeline if trace is self.timeline.trace else Timeline.of(trace, self.timeline.rounding_bytes)

    def replay(self, chosen: Iterable[tuple[Unit, Policy]]) -> Timeline:
        """Replay the step under these policies, op by op; without any, no frontier is built."""
        chosen = [each for each in chosen if not each[1].changes_nothing]
        return self._replay(chosen) if chosen else self._unplanned

    @cached_property
    def _unplanned(self) -> Timeline:
        return self._replay(())

    def _replay(self, chosen: Sequence[tuple[Unit, Policy]]) -> Timeline:
        recomputes = [build_recompute(self.trace_columns, *each) for each in chosen if each[1].stop >= 0]
        offloads = build_offloads(self.trace_columns, chosen, self.windows) if chosen else []
        sharding = self.sharding
        if sharding is None:
            return self._captured.under_plan(recomputes, offloads=offloads) if chosen else self._captured
        return self._captured.under_plan(
            recomputes, offloads=offloads, intervals=sharding.allocations, removed=sharding.removed
        )

    def replay_on(self, engine: ShardEngine, chosen: Iterable[tuple[Unit, Policy]]) -> Timeline:
        """Replay the step under these policies with its parameters sharded by an engine, planned for it or not."""
        assert self.sharding is not None
        options = replace(self.options.shard, engine=engine)
        sharding = shard(self.timeline, self.runtime, self.target, options)
        return replace(self, sharding=sharding)._with_frontiers_of(self).replay(chosen)

    def with_sharding(self, runtime: Runtime, shard_options: ShardOptions) -> Problem:
        """Return the problem of the same step with its parameters sharded in another way; what was built is shared.

        `runtime` has the times of the step as it was captured, whole.
        """
        sharding = shard(self.timeline, runtime, self.target, shard_options)
        options = replace(self.options, shard=shard_options)
        other = replace(self, runtime=sharding.runtime, sharding=sharding, options=options)
        _ = self.frontiers, self._captured
        return other._with_frontiers_of(self)

    def without_offload(self) -> Problem:
        """Return the problem of the same step in which no unit may offload; what was built is shared."""
        fixed: tuple[Decided, ...] = tuple(dict.fromkeys((*self.options.fixed, "offload")))
        options = replace(self.options, offload=False, fixed=fixed)
        _ = self.frontiers
        return replace(self, options=options)._with_frontiers_of(self)

    def _with_frontiers_of(self, other: Problem) -> Problem:
        """Take over what another problem of the same trace has built."""
        built = ("frontiers", "windows", "_captured")
        self.__dict__.update({name: other.__dict__[name] for name in built if name in other.__dict__})
        return self

    @property
    def exposed_ms(self) -> float:
        """Communication that compute does not hide."""
        return self.sharding.exposed_ms if self.sharding is not None else 0.0


def replay(trace_columns: TraceColumns, chosen: Iterable[tuple[Unit, Policy]]) -> Timeline:
    """Return the memory of the step with these units checkpointed, none of them inside another."""
    chosen = list(chosen)
    recomputes = [build_recompute(trace_columns, *each) for each in chosen if each[1].stop >= 0]
    offloads = build_offloads(trace_columns, chosen)
    return Timeline.of(trace_columns.trace, trace_columns.rounding_bytes, recomputes=recomputes, offloads=offloads)


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The answer for one budget. `chosen` is empty when nothing fits or nothing needs to be done.

    `minimum_budget_bytes` is the smallest budget that can be met, known when this one cannot. `tightened` counts how
    often the replay sent the solver back. `recompute_ms` is all that the plan adds, with `exposed_offload_ms`.
    """

    status: Status
    budget_bytes: int
    chosen: tuple[tuple[Candidate, Policy], ...]
    choice: Choice | None
    replay: Timeline | None
    recompute_ms: float
    bound_ms: float
    seconds: float
    rows: int
    columns: int
    tightened: int
    minimum_budget_bytes: int | None

    @property
    def exposed_offload_ms(self) -> float:
        """The part of the time that the plan adds in which copies to the host and back are awaited."""
        return float(sum(policy.exposed_ms for _, policy in self.chosen))

    @property
    def gap(self) -> float:
        """How far the plan's recompute time may be from the least possible, as a part of itself."""
        return relative_gap(self.recompute_ms, self.bound_ms)


def solve(
    problem: Problem,
    budget_bytes: int,
    *,
    start: Choice | None = None,
    watch: Callable[[Incumbent], None] | None = None,
    minimum: bool = True,
    cutoff_ms: float = math.inf,
    limits: Limits | None = None,
) -> Solved:
    """Find the fastest plan whose replay stays within the budget, or the smallest budget that would do.

    Without `minimum` that is left out where nothing fits, which saves most of the time. Where every plan adds
    `cutoff_ms` or more, that is its `bound_ms`, and it has a plan that is not proven, or none. `limits` stand in for
    those of the problem's options.
    """
    if budget_bytes <= 0:
        raise InputError(f"a budget of {budget_bytes} bytes holds nothing; give more than 0")
    began = time.perf_counter()
    limits = limits or problem.options.limits
    if problem.is_known_to_need_more_than(budget_bytes):
        return _without_plan(problem, budget_bytes, infeasible(), 0, began, minimum=minimum)
    program = problem.program(budget_bytes)
    tightened = 0
    bound_ms = 0.0
    while True:
        left = max(0.1, limits.time_limit_s - (time.perf_counter() - began))
        # raised levels are another dynamic program, and so are folded micro-batches
        dp = None if tightened or problem.micro_batches else lambda: problem.dynamic_program
        cutoff = math.inf if tightened else cutoff_ms  # raised levels prove nothing of the program
        outcome = search(program, replace(limits, time_limit_s=left), start=start, watch=watch, dp=dp, cutoff_ms=cutoff)
        if not tightened:
            bound_ms = outcome.bound_ms  # raised levels cut off more than the plan that was too high
        if outcome.choice is None and outcome.status is Status.UNKNOWN and outcome.bound_ms >= cutoff - SAME_MS:
            return _cut_off(budget_bytes, outcome, began)
        if outcome.choice is None or tightened > _TIGHTENINGS:
            return _without_plan(problem, budget_bytes, outcome, tightened, began, minimum=minimum)
        chosen = tuple(program.chosen(outcome.choice))
        judged = problem.replay((candidate.unit, policy) for candidate, policy in chosen)
        if judged.peak_bytes <= budget_bytes:
            return Solved(
                status=Status.FEASIBLE if outcome.recompute_ms > bound_ms + SAME_MS else outcome.status,
                budget_bytes=budget_bytes,
                chosen=chosen,
                choice=outcome.choice,
                replay=judged,
                recompute_ms=outcome.recompute_ms,
                bound_ms=min(bound_ms, outcome.recompute_ms),
                seconds=time.perf_counter() - began,
                rows=outcome.rows,
                columns=outcome.columns,
                tightened=tightened,
                minimum_budget_bytes=None,
            )
        program = _tighter(program, judged, outcome.choice)
        tightened += 1
        start = None


def minimum_budget_bytes(problem: Problem) -> int | None:
    """Return the smallest budget that the rows of a plan hold; `problem.min_budget` says whether it is proven."""
    return None if problem.min_budget is None else problem.min_budget.peak_bytes


def _cut_off(budget_bytes: int, outcome: SearchResult, began: float) -> Solved:
    """Return what is known where no plan adds less than was asked for, and none was found that adds more."""
    return Solved(
        status=Status.UNKNOWN,
        budget_bytes=budget_bytes,
        chosen=(),
        choice=None,
        replay=None,
        recompute_ms=math.inf,
        bound_ms=outcome.bound_ms,
        seconds=time.perf_counter() - began,
        rows=outcome.rows,
        columns=outcome.columns,
        tightened=0,
        minimum_budget_bytes=None,
    )


def _without_plan(
    problem: Problem, budget_bytes: int, outcome: SearchResult, tightened: int, began: float, *, minimum: bool
) -> Solved:
    """Return the plan of the lowest peak if it fits and the search found none in its time; else why none does."""
    is_proven = outcome.status is Status.INFEASIBLE and not tightened
    least = problem.min_budget if minimum or not is_proven else None
    program = problem.program(budget_bytes)
    chosen = () if least is None else tuple(program.chosen(least.choice))
    judged = None if least is None else problem.replay((candidate.unit, policy) for candidate, policy in chosen)
    fits = judged is not None and judged.peak_bytes <= budget_bytes
    choice = least.choice if least is not None and fits else None
    hopeless = outcome.status is Status.INFEASIBLE or (least is not None and least.bound_bytes > budget_bytes)
    status = Status.FEASIBLE if choice is not None else Status.INFEASIBLE if hopeless else Status.UNKNOWN
    return Solved(
        status=status,
        budget_bytes=budget_bytes,
        chosen=chosen if fits else (),
        choice=choice,
        replay=judged if fits else None,
        recompute_ms=math.inf if choice is None else program.recompute_ms(choice),
        bound_ms=outcome.bound_ms if math.isfinite(outcome.bound_ms) else 0.0,
        seconds=time.perf_counter() - began,
        rows=outcome.rows,
        columns=outcome.columns,
        tightened=tightened,
        minimum_budget_bytes=None if least is None else least.peak_bytes,
    )


def _tighter(program: Program, judged: Timeline, choice: Choice) -> Program:
    """Return the program with its levels raised where the replay was higher than it assumed."""
    during, before = program.during.copy(), program.before.copy()
    thought, recomputes = program.peaks(choice)
    worse = judged.during_step_bytes - thought
    high = (judged.during_step_bytes > program.budget_bytes) & (worse > 0)
    during[high] += worse[high]
    expected = {candidate.unit.name: peak for candidate, peak in recomputes}
    for number, unit in enumerate(judged.units):
        peak = int(judged.during_bytes[judged.recompute_instants(number)].max(initial=0))
        more, op = peak - expected[unit.name], unit.backward_begin
        if peak > program.budget_bytes and more > 0:
            before[op] += more
            during[op - 1] = max(during[op - 1], before[op])
    return replace(program, before=before, during=during)


def _check_forced(options: SolveOptions, candidates: Sequence[Candidate], units: Sequence[Unit]) -> None:
    """Refuse a unit that must be checkpointed and cannot be, or that lies inside another one."""
    able = {candidate.unit.name for candidate in candidates} | {candidate.unit.module for candidate in candidates}
    for name in options.force:
        if name not in able:
            held = any(unit.name == name or unit.module == name for unit in units)
            why = "it has nothing to give up" if held else "it contains a unit whose parameters are sharded"
            raise InputError(f"{name!r} cannot be checkpointed: {why}; leave it out of force")
    for candidate in candidates:
        if candidate.forced and candidate.outer != NO_INDEX and candidates[candidate.outer].forced:
            outer = candidates[candidate.outer].unit.name
            raise InputError(f"{candidate.unit.name!r} lies inside {outer!r}, and both are forced; leave one out")


def choose_nothing(problem: Problem) -> Choice:
    """Return the choice that checkpoints nothing."""
    return np.full(len(problem.candidates), NO_INDEX, np.int64)
