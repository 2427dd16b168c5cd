"""Lower bounds of the step time of settings that are not captured or not solved yet (Note [Settings]).

- *n chunks, from the whole loss.* Chunks run the kernels of the whole loss on the same bytes, and the softmax once
  more, and save at most the copies of the logits: the plan adds at least what it adds to the whole loss with so much
  more budget. A CPU's caches hold a chunk, so that chunks may be faster than the whole: there the step without the ops
  of the copies, and nothing is known from other numbers of chunks.
- *n chunks, from m.* With m < n the time of m, and what its plan adds with the difference of a chunk's copies more
  budget. With m > n what the plan of m adds, and its time less the overheads of the kernels that n has fewer.
- *Another optimizer step.* The step less its optimizer, with the same recompute: nothing that a unit dropped is missing
  while the optimizer runs.
- *Micro-batches.* The time of the step with fewer of them: the same rows go through the same kernels in more calls,
  which take no less time together. Nothing is known of what the plan adds.

And of the memory that a setting needs at least, from a minimum that is known:

- *Sharding that holds more at every instant*: as much.
- *More chunks*: less by what the copies of a chunk are smaller. *Fewer chunks*: as much.
- *Fewer micro-batches, at least two*: as much, each has more rows.
- *Another optimizer step*: as much, but for the counters of a fused one, where the optimizer's step does not need most.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cached_property

from memfit.capture import Category, Phase, find_chunkable, find_copies, find_logits, find_softmaxes
from memfit.hardware import Family as KernelFamily
from memfit.plans.setting_problems import SettingProblems
from memfit.plans.settings import CHUNKS, LEAST_GAIN_MS, Answer, Family, Setting, StepVariant, base_ms, gathers_more
from memfit.sharding import ShardOptions
from memfit.solve import Problem, Solved, Status, solve

_LOSS_FAMILIES = (
    KernelFamily.NORM,
    KernelFamily.ELEMENTWISE,
    KernelFamily.TRANSCENDENTAL,
    KernelFamily.INDEXING,
    KernelFamily.REDUCTION,
    KernelFamily.COPY,
    KernelFamily.OTHER,
)
"""Kernels of a cross entropy."""
_NUMBER_BYTES, _COUNTER_BYTES = 8, 512
"""A counter, and what the allocator takes for it."""


class SettingBounds:
    """Bounds from the problems that are there, and the answers that they come from.

    Answers may be slower than the best of their setting by a part of the step, `slack`; `exact` makes one the best.
    """

    def __init__(self, problems: SettingProblems, first: Answer, slack: float = 0.0) -> None:
        self.problems, self.first = problems, first
        self._limits = replace(first.problem.options.limits, slack_ms=slack * base_ms(first.problem))
        self.budget_bytes = first.solved.budget_bytes
        self.answers: dict[Setting, Answer] = {first.setting: first}
        self.minimums: dict[Setting, int] = {}
        """What settings are known to need at least."""
        self._cut_off_ms: dict[Setting, float] = {}
        """Answers that were not solved to the end: no plan adds less than this."""
        self._relaxed: dict[tuple[Setting, int], float] = {}
        self._optimizers: dict[Setting, tuple[int, int]] = {}
        """The most that the optimizer's step takes in a setting, and what its counters do."""

    def answer(self, setting: Setting, *, minimum: bool = False, cutoff_ms: float = math.inf) -> Answer | None:
        """Return the solved problem of a setting; None where the step does not run so.

        The smallest budget of one that does not fit is found where `minimum` asks for it. Where every plan adds
        `cutoff_ms` or more, the answer says so and is not solved to the end (`is_cut_off`).
        """
        known = self.answers.get(setting)
        wants_minimum = minimum and known is not None and known.solved.choice is None
        if (
            known is None
            or cutoff_ms > self._cut_off_ms.get(setting, math.inf)
            or (wants_minimum and known.solved.minimum_budget_bytes is None)
        ):
            problem = self.problems.of(setting)
            if problem is None:
                return None
            start = None if known is None else known.solved.choice
            solved = solve(
                problem,
                self.budget_bytes,
                start=start,
                minimum=minimum,
                cutoff_ms=cutoff_ms,
                limits=self._limits,
            )
            self.answers[setting] = Answer(problem=problem, solved=solved, setting=setting)
            self._cut_off_ms.pop(setting, None)
            if solved.status in (Status.FEASIBLE, Status.UNKNOWN) and solved.bound_ms >= cutoff_ms - LEAST_GAIN_MS:
                self._cut_off_ms[setting] = cutoff_ms
            if solved.status is Status.INFEASIBLE:
                self.minimums[setting] = max(self.budget_bytes + 1, self.minimums.get(setting, 0))
        return self.answers[setting]

    def exact(self, answer: Answer) -> Answer:
        """Return the best answer of a setting, from one that may be a little slower.

        One that the time limit ended stays as it is.
        """
        known, asked = answer.solved, answer.problem.options.limits
        short_ms = known.recompute_ms - known.bound_ms
        enough_ms = max(asked.gap * known.bound_ms, asked.slack_ms)
        if known is self.first.solved or known.choice is None or not enough_ms < short_ms <= self._most_short_ms(known):
            return answer
        solved = solve(answer.problem, self.budget_bytes, start=known.choice, minimum=False)
        if solved.recompute_ms > known.recompute_ms:
            bound_ms = min(known.recompute_ms, max(known.bound_ms, solved.bound_ms))
            solved = replace(known, bound_ms=bound_ms)
        found = self.answers[answer.setting] = replace(answer, solved=solved)
        return found

    def _most_short_ms(self, solved: Solved) -> float:
        """Return how far from its bound a plan may be that was good enough to be compared."""
        return self._limits.gap * solved.bound_ms + self._limits.slack_ms + LEAST_GAIN_MS

    def is_cut_off(self, setting: Setting) -> bool:
        """Return whether the answer of a setting says no more than that its plans add too much."""
        return setting in self._cut_off_ms

    def least_bytes(self, setting: Setting) -> int:
        """Return a lower bound of the memory that any plan of a setting needs, from others whose minimum is known."""
        given = self.first.problem.options.shard
        shard, least = setting.shard or given, 0
        for other, n_bytes in self.minimums.items():
            if gathers_more(shard, other.shard or given):
                saved_bytes = self._most_saved_bytes(setting.variant, other)
                least = max(least, 0 if saved_bytes is None else n_bytes - saved_bytes)
        return least

    def _most_saved_bytes(self, variant: StepVariant, other: Setting) -> int | None:
        """Return how much less than another setting's a variant's minimum may be; None where nothing is known of it."""
        parts, before = variant.parts, other.variant.parts
        if parts != before and not 2 <= parts < before:
            return None
        saved_bytes = 0
        if variant.implementation != other.variant.implementation:
            if other not in self._optimizers:
                problem = self.problems.known(other)
                assert problem is not None  # its minimum is known
                self._optimizers[other] = _optimizer_bytes(problem), _counter_bytes(problem)
            most_bytes, counter_bytes = self._optimizers[other]
            if most_bytes >= self.minimums[other]:
                return None
            saved_bytes += counter_bytes
        chunks, fewer = (1 if each.chunked is None else each.chunked.chunks for each in (variant, other.variant))
        if chunks > fewer:
            saved_bytes += math.ceil(self._copied_bytes / parts * (1 / fewer - (1 / chunks if fewer > 1 else 0)))
        elif chunks < fewer and chunks == 1:
            return None  # a whole loss may be recomputed by the plan
        return saved_bytes

    def rough_ms(self, variant: StepVariant, family: Family) -> float:
        """Return a bound from the given problem alone: its compute, less the optimizer's where that may change.

        Sharding that holds more at every instant needs a plan that adds as much.
        """
        first = self.first.problem
        bound = first.runtime.total_ms + (self._chunks_ms if variant.chunked is not None else 0.0)
        given = first.options.shard
        least = family.least or given
        if variant.implementation is not None or _optimizer_may_change(least, given):
            bound -= phase_ms(first, Phase.OPTIMIZER)
        if variant == self.first.setting.variant and gathers_more(least, given):
            bound += _least_added_ms(self.first)
        return bound

    def before_capture_ms(self, variant: StepVariant, family: Family, stage: int) -> float:
        """Return a bound of a variant from others that were captured; infinite where none can fit.

        At the first stage only times are asked for, then what plans of these add.
        """
        whole = replace(variant, chunked=None)
        source = whole if self.problems.is_captured(whole) else StepVariant(parts=self._fewer_parts(variant.parts))
        fastest = self.problems.of(Setting(variant=source, shard=family.most))
        if fastest is None:
            return math.inf if source == whole else 0.0
        bound = base_ms(fastest) + (self._chunks_ms if variant.chunked is not None else 0.0)
        if source.implementation != variant.implementation:
            bound -= phase_ms(fastest, Phase.OPTIMIZER)
        if stage == 0 or source.parts != variant.parts or (variant.chunked is not None and self._has_cpu_caches):
            return bound
        smallest = self.answer(Setting(variant=source, shard=family.least))
        if smallest is None:
            return math.inf
        more = self._copied_bytes // source.parts if variant.chunked is not None else 0
        if source.implementation != variant.implementation:
            more += _counter_bytes(smallest.problem)
        added = self.relaxed_ms(smallest, more)
        if math.isinf(added) and source.implementation != variant.implementation:
            added = 0.0  # another optimizer step may fit where this one does not
        bound += added
        return max(bound, self._from_other_chunks_ms(variant, family))

    def added_ms(self, setting: Setting) -> float:
        """Return the least that a plan adds to a setting, from those that need no more memory; infinite if none can."""
        given = self.first.problem.options.shard
        shard = setting.shard or given
        return max(
            (
                _least_added_ms(answer)
                for other, answer in self.answers.items()
                if other.variant == setting.variant and gathers_more(shard, other.shard or given)
            ),
            default=0.0,
        )

    def relaxed_ms(self, answer: Answer, more_bytes: int) -> float:
        """Return the least that a plan adds with so much more budget; infinite where none fits."""
        key = (answer.setting, more_bytes)
        if key not in self._relaxed:
            self._relaxed[key] = 0.0
            if more_bytes == 0:
                self._relaxed[key] = _least_added_ms(answer)
            elif answer.solved.recompute_ms > 0.0:
                more_budget = self.budget_bytes + more_bytes
                solved = solve(answer.problem, more_budget, minimum=False, limits=self._limits)
                self._relaxed[key] = math.inf if solved.status is Status.INFEASIBLE else solved.bound_ms
        return self._relaxed[key]

    def _fewer_parts(self, parts: int) -> int:
        """Return the most micro-batches, at most so many, with which the step was captured."""
        captured = (each.parts for each in self.problems.captured if each == StepVariant(parts=each.parts))
        return max(each for each in captured if each <= parts)

    def _from_other_chunks_ms(self, variant: StepVariant, family: Family) -> float:
        """Return a bound from the answers with other numbers of chunks."""
        bound = 0.0
        if variant.chunked is None:
            return bound
        for number in CHUNKS:
            other = replace(variant, chunked=variant.chunked.with_chunks(number))
            known = self.answers.get(Setting(variant=other, shard=family.least))
            fastest = self.problems.known(Setting(variant=other, shard=family.most))
            if known is None or fastest is None:
                continue
            if variant.chunked.chunks > number:
                copied = self._copied_bytes / variant.parts
                more = math.ceil(copied * (1 / number - 1 / variant.chunked.chunks))
                bound = max(bound, base_ms(fastest) + self.relaxed_ms(known, more))
            elif known.solved.status is Status.INFEASIBLE:
                return math.inf  # fewer chunks need no less
            else:
                fewer_ms = (number - variant.chunked.chunks) * self._kernels_ms(known.problem, number)
                bound = max(bound, base_ms(fastest) - fewer_ms + known.solved.bound_ms)
        return bound

    @cached_property
    def _copies(self) -> frozenset[int]:
        """The copies of the logits that the whole loss makes."""
        captured = self.first.problem.trace
        logits = find_logits(captured)
        return frozenset() if logits is None else frozenset(find_copies(captured, logits))

    @cached_property
    def _copied_bytes(self) -> int:
        captured = self.first.problem.trace
        return sum(captured.storages[each].bytes for each in self._copies)

    @property
    def _has_cpu_caches(self) -> bool:
        return self.first.problem.target.device.type == "cpu"

    @cached_property
    def _chunks_ms(self) -> float:
        """What chunks add to the time of the step at least, less than nothing on a CPU."""
        if not self._has_cpu_caches:
            return self._again_ms
        runtime = self.first.problem.runtime
        ops = zip(runtime.trace.ops, runtime.op_ms, strict=True)
        copying = (ms for op, ms in ops if any(ref.storage in self._copies for ref in (*op.inputs, *op.outputs)))
        return -float(sum(copying))

    @cached_property
    def _again_ms(self) -> float:
        """The time of the softmaxes, which chunks run once more in their backward."""
        runtime = self.first.problem.runtime
        chunkable = find_chunkable(self.first.problem.trace)
        classes = None if chunkable is None else chunkable.classes
        return float(sum(runtime.op_ms[index] for index, _ in find_softmaxes(runtime.trace, classes)))

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


def _optimizer_may_change(shard: ShardOptions, given: ShardOptions) -> bool:
    """Return whether the optimizer may step on other parts, or in another place."""
    return (shard.units, shard.replicas, shard.cpu_offload) != (given.units, given.replicas, given.cpu_offload)


def _least_added_ms(answer: Answer) -> float:
    """Return the least that any plan of a solved setting adds; infinite where none fits."""
    return math.inf if answer.solved.status is Status.INFEASIBLE else answer.solved.bound_ms


def _optimizer_bytes(problem: Problem) -> int:
    """Return the most that a step takes while its optimizer runs, whatever units dropped."""
    during = problem.program(1).during
    ops = [index for index, op in enumerate(problem.runtime.trace.ops) if op.phase is Phase.OPTIMIZER]
    return int(during[ops].max(initial=0))


def _counter_bytes(problem: Problem) -> int:
    """Return the bytes of the optimizer's counters on the device, which only a fused step has there."""
    storages = (each for each in problem.trace.storages if each.category is Category.OPTIMIZER_STATE)
    return _COUNTER_BYTES * sum(each.bytes <= _NUMBER_BYTES for each in storages)


def phase_ms(problem: Problem, phase: Phase) -> float:
    """Return the time of one phase of a step."""
    runtime = problem.runtime
    return float(sum(ms for op, ms in zip(runtime.trace.ops, runtime.op_ms, strict=True) if op.phase is phase))
