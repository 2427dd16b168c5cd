"""Decisions that change the step, its sharding or its optimizer: branch and bound over settings.

Note [Settings]: checkpointing and offload are decided by the solver, unit by unit. What is left changes the program
itself. Each combination is a setting: a variant of the step (micro-batches, chunks of the loss, optimizer step) and a
way to shard it (units, replicas, prefetch, where shards are, which units stay gathered). Ways to shard that differ only
in the last are a family. The plain solve is the first incumbent. A queue has a node for every variant and family, with
a lower bound of its step time; the lowest is taken out and its bound made better by what costs least, until it is a
setting that is solved:

1. *Its family, of the step as given.* The member that keeps all units gathered communicates least, and no variant but
   another optimizer step has less to compute. Then the member that reshards all is solved, which needs least memory:
   with more budget for a variant that saves memory, by as much as it can save (`setting_bounds.py`).
2. *Captured.* The same two of the variant itself.
3. *A member*: its time when nothing is recomputed, and what the family's smallest adds, or the convex bound of its own
   dynamic program (dp.py, recurrence 5). Then it is solved, as far as it may be of use (`cutoff_ms`) and up to a little
   (`_SLACK`).

Where the plain solve does not fit, a setting that does is looked for first, or the one that needs least
(`least_budget.py`).

What would be the best is first given its room in the caching allocator (`settle`; Note [Room of settings] in
deciding.py). Bounds are those of the whole budget.

The search ends when no node may gain `WORTH` of the step; where nothing but the optimizer's step is decided, less is
enough. Up to `TOGETHER` nodes are in one queue, and the answer is the best of all settings, within `WORTH`.
More are looked at in rounds: the optimizer's step, then micro-batches and chunks of the loss together, sharded as the
best so far; then units, replicas, prefetch and where shards are, one after the other, each with all ways to reshard;
and again until nothing changes. The answer is solved to the end; its gap is the solver's. At the time limit of the
options the search ends as well; then `bound_ms` says what nodes that are left might take.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from memfit.capture import ChunkedLoss, Step, find_chunkable
from memfit.cost import Cost
from memfit.errors import InputError
from memfit.hardware import Device
from memfit.plans.least_budget import find_least_budget
from memfit.plans.setting_bounds import SettingBounds
from memfit.plans.setting_problems import EarlyChunks, SettingProblems
from memfit.plans.settings import (
    LEAST_GAIN_MS,
    Answer,
    Family,
    Setting,
    StepVariant,
    base_ms,
    can_shard_otherwise,
    find_families,
    find_variants,
    is_reached,
)
from memfit.sharding import ShardOptions
from memfit.solve import Decided, Problem, Status

WORTH = 1e-3
"""A setting is looked at only if its bound is lower than the best by this part of the step."""
WORTH_ON_CPU = 0.02
"""The same where the device is a CPU. Ranks, copies and compute share its cores, and times of steps that were measured
there are 3 to 5 % off what was predicted (docs/benchmarks.md, `ranks.py`): less is no gain that anybody would see."""


def worth_on(device: Device) -> float:
    """Return the part of a step that a decision must gain on a device to be taken."""
    return WORTH_ON_CPU if device.type == "cpu" else WORTH


_SLACK = 0.25
"""While settings are compared, they are solved up to this part of what is worth looking at; the best to the end."""
TOGETHER = 40
"""Up to so many variants times families are searched together."""
_EXPOSED = 0.1
"""Unless asked to, plans look for other ways to gather only where collectives that compute does not hide take this part
of the step (docs/design/joint.md: below it they gained 0.4 % at most)."""

Settle = Callable[[Answer, Answer | None], Answer | None]
"""Gives an answer room in the allocator, as a plan has; None where it is then no better than another."""


def searched_kinds(first: Answer) -> set[Decided]:
    """Return the kinds of decisions that the search is for: those asked for, and the default ones where they may gain.

    The solver itself decides offload, and segments grow in all settings or in none (deciding.py). Ranks of a CPU share
    its cores with what they gather, and plans that gather in another way were slower there than predicted: unless asked
    for, these are for `memfit.verify.tune`. What fits does not change unasked: plans, curves and searches agree.
    """
    problem = first.problem
    kinds: set[Decided] = {*problem.options.decided} - {"offload", "segments"}
    fits = first.solved.choice is not None or problem.options.loss_chunks not in (None, 1)  # in chunks it may
    if problem.options.decide is None and not (fits and waits_for_gathers(problem)):
        kinds -= {"reshard", "prefetch"}
    return kinds


def waits_for_gathers(problem: Problem) -> bool:
    """Return whether other ways to gather may gain enough to look for them unasked."""
    may_gain = problem.exposed_ms >= _EXPOSED * base_ms(problem)
    return may_gain and problem.target.device.type != "cpu" and can_shard_otherwise(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """Settings that are looked at together: all of a variant and a family, or the one with `member`.

    `stage` counts what was done for the bound.
    """

    variant: StepVariant
    family: Family
    stage: int = 0
    member: ShardOptions | None = None
    is_member: bool = False


@dataclass(order=True, slots=True)
class _Entry:
    bound_ms: float
    number: int
    node: _Node = field(compare=False)


class JointSearch:
    """Branch and bound over the settings of one step, from the plain solve (Note [Settings]).

    `first` is the plain solve under the whole budget, and `best` the same with its room, where that is another.
    `kinds` are the decisions that may be taken; `loss_chunks` fixes one of them. After `run`, `best` is the answer,
    `tried` counts settings that were solved, `left_out` says what could not be captured, `bound_ms` is a time that no
    setting is below which the time limit left out, and `passed_over` are answers that were the best before another, or
    without their room.
    """

    def __init__(
        self,
        first: Answer,
        step: Step | None,
        cost: Cost,
        kinds: Iterable[str],
        *,
        best: Answer | None = None,
        settle: Settle | None = None,
        loss_chunks: int | None = None,
        early: EarlyChunks | None = None,
        worth: float = WORTH,
        together: int = TOGETHER,
    ) -> None:
        self.first, self.best = first, best or first
        self.passed_over: list[Answer] = [] if best is None or best is first else [first]
        self._settle = settle
        self._settled = {first.setting}
        self.kinds = frozenset(kinds)
        self.budget_bytes = first.solved.budget_bytes
        self.problems = SettingProblems(first.problem, step, cost, early)
        # of the optimizer's step alone any gain counts
        slack = 0.0 if self.kinds == {"optimizer"} else _SLACK * worth
        self.bounds = SettingBounds(self.problems, first, slack=slack)
        self.bound_ms = math.inf
        self._worth, self._together = worth, together
        self._began = time.perf_counter()
        self._done: set[tuple[StepVariant, Family]] = set()
        self.step = step
        self.segments_saved_bytes: int | None = None
        """What growing segments save of what the allocator reserves, where that was decided."""
        self._seconds = first.problem.options.limits.time_limit_s
        self._fixed = None if loss_chunks in (None, 1) else self._fix_loss(loss_chunks)

    @property
    def tried(self) -> int:
        """How many settings were solved."""
        return len(self.bounds.answers)

    @property
    def left_out(self) -> list[str]:
        """What could not be captured, in words."""
        return self.problems.left_out

    def _fix_loss(self, chunks: int) -> ChunkedLoss:
        """Make the step with its loss in so many chunks the incumbent."""
        chunkable = find_chunkable(self.first.problem.trace)
        reached = chunkable is not None and self.step is not None and is_reached(chunkable, self.step)
        fixed = chunkable.with_chunks(chunks) if chunkable is not None and reached else None
        setting = Setting(variant=StepVariant(chunked=fixed))
        found = None if fixed is None else self.bounds.answer(setting, minimum=True)
        if fixed is None or found is None:
            raise InputError(
                f"loss_chunks={chunks}: the loss of this step cannot be computed in chunks; it is to be one "
                "F.cross_entropy over rows of logits, in float32, called in the model or in the loss function of the "
                f"step, with at least that many rows{''.join(f' ({each})' for each in self.left_out)}"
            )
        self.best = self._with_room(found, None) or found
        self.passed_over.clear()  # the whole loss was not asked for
        return fixed

    def nodes(self) -> list[tuple[StepVariant, Family]]:
        """Return every variant of the step with every family of shardings."""
        return list(itertools.product(self._variants, self._families))

    @cached_property
    def _variants(self) -> list[StepVariant]:
        return find_variants(self.first.problem, self.step, self.kinds, self._fixed)

    @cached_property
    def _families(self) -> list[Family]:
        return find_families(self.first.problem, self.kinds)

    def run(self) -> Answer:
        """Find the best answer over all settings: of all together, or in rounds where there are many.

        The time limit counts from here: what was asked of the bounds before does not shorten it.
        """
        self._began = time.perf_counter()
        self.bound_ms = math.inf
        self._search()
        if self.best.solved.budget_bytes == self.budget_bytes:  # else it was solved to the end when it was given room
            exact = self.bounds.exact(self.best)
            settled = exact if exact is self.best else self._with_room(exact, None)
            if settled is not None and settled.no_worse_than(self.best):
                self.best = settled
        return self.best

    def _search(self) -> None:
        if self.best.solved.choice is None:
            self.best = find_least_budget(self.bounds, self.best, self.nodes(), lambda: self.is_late)
            if self.best.solved.choice is None:
                return
            self.best = self._with_room(self.best, None) or self.best
        if len(self.nodes()) <= self._together:
            self._explore(self.nodes())
            return
        before = None
        while before is not self.best and not self.is_late:
            before = self.best
            own, here = self.best.setting.variant, Family(members=(self.best.setting.shard,))
            ways = (each for each in self._variants if replace(each, implementation=own.implementation) == own)
            self._explore([(variant, here) for variant in ways])
            own = self.best.setting.variant
            alike = (each for each in self._variants if each.implementation == own.implementation)
            self._explore([(variant, here) for variant in alike])
            for place in range(len(self._family.place)):
                around = self._family.place[:place], self._family.place[place + 1 :]
                alike = (each for each in self._families if (each.place[:place], each.place[place + 1 :]) == around)
                self._explore([(self.best.setting.variant, family) for family in alike])

    @property
    def _family(self) -> Family:
        """The family of the best setting; the first where none has it."""
        own = (family for family in self._families if self.best.setting.shard in family.members)
        return next(own, self._families[0])

    @property
    def is_late(self) -> bool:
        """Whether the time limit is over."""
        return time.perf_counter() - self._began > self._seconds

    def _explore(self, nodes: Iterable[tuple[StepVariant, Family]]) -> None:
        """Take the best answer among the settings of these nodes."""
        numbers = itertools.count()
        queue: list[_Entry] = []

        def add(node: _Node, bound_ms: float) -> None:
            shard = node.member if node.is_member else node.family.least
            needs_bytes = self.bounds.least_bytes(Setting(variant=node.variant, shard=shard))
            if not math.isinf(bound_ms) and needs_bytes <= self.budget_bytes:
                heapq.heappush(queue, _Entry(bound_ms, next(numbers), node))

        for variant, family in nodes:
            if (variant, family) not in self._done:
                self._done.add((variant, family))
                add(_Node(variant=variant, family=family), self.bounds.rough_ms(variant, family))
        while queue:
            entry = heapq.heappop(queue)
            if entry.bound_ms >= self._enough_ms(entry.node):
                continue
            if self.is_late:
                self.bound_ms = min(self.bound_ms, entry.bound_ms)
                return
            for node, bound_ms in self._improve(entry.node, entry.bound_ms):
                add(node, bound_ms)

    def _enough_ms(self, node: _Node) -> float:
        """Return the bound from which on a node is not looked at."""
        best_ms = self.best.step_ms
        if math.isinf(best_ms):
            return best_ms
        simple = node.variant.parts == 1 and node.variant.chunked == self.best.setting.variant.chunked
        asked_for = self.kinds == {"optimizer"} and self.best.setting.shard in node.family.members
        if simple and asked_for and not node.is_member:
            return best_ms - LEAST_GAIN_MS  # only the optimizer's step is another
        return best_ms - max(LEAST_GAIN_MS, self._worth * best_ms)

    def _improve(self, node: _Node, bound_ms: float) -> Iterable[tuple[_Node, float]]:
        """Yield the node with a better bound, or what it consists of; nothing once it is solved."""
        variant, family = node.variant, node.family
        if node.is_member:
            setting = Setting(variant=variant, shard=node.member)
            if node.stage == 0:
                problem = self.problems.of(setting)
                if problem is not None:
                    added_ms = max(self.bounds.added_ms(setting), problem.bound_ms(self.budget_bytes))
                    yield replace(node, stage=1), max(bound_ms, base_ms(problem) + added_ms)
                return
            self._take(self._answer(node, setting))
            return
        captured = self.problems.is_captured(variant)
        if not captured:
            better_ms = max(bound_ms, self.bounds.before_capture_ms(variant, family, node.stage))
            if node.stage < 2 or better_ms > bound_ms + LEAST_GAIN_MS:
                yield replace(node, stage=min(2, node.stage + 1)), better_ms
                return
        if node.stage < 3:
            fastest = self.problems.of(Setting(variant=variant, shard=family.most))
            if fastest is None:
                return
            node = replace(node, stage=3)
            added_ms = self.bounds.added_ms(Setting(variant=variant, shard=family.least))
            bound_ms = max(bound_ms, base_ms(fastest) + added_ms)
            if bound_ms < self._enough_ms(node):
                least = self.problems.of(Setting(variant=variant, shard=family.least))
                added_ms = 0.0 if least is None else least.bound_ms(self.budget_bytes)
                bound_ms = max(bound_ms, base_ms(fastest) + added_ms)
            if captured or bound_ms >= self._enough_ms(node):
                yield node, bound_ms
                return
            # What a capture was made for is solved at once: its answer may save other captures.
        fastest = self.problems.of(Setting(variant=variant, shard=family.most))
        if fastest is None:
            return
        smallest = self._answer(node, Setting(variant=variant, shard=family.least))
        self._take(smallest)
        if smallest is None or smallest.solved.status is Status.INFEASIBLE:
            return
        for member in family.members[1:]:
            added_ms = self.bounds.added_ms(Setting(variant=variant, shard=member))
            least_ms = max(bound_ms, base_ms(fastest) + added_ms)
            yield replace(node, stage=0, member=member, is_member=True), least_ms

    def _answer(self, node: _Node, setting: Setting) -> Answer | None:
        """Solve a setting as far as it may be of use."""
        problem = self.problems.of(setting)
        if problem is None:
            return None
        return self.bounds.answer(setting, cutoff_ms=self._enough_ms(node) - base_ms(problem))

    def _take(self, found: Answer | None) -> None:
        if found is None or self.bounds.is_cut_off(found.setting) or found.setting in self._settled:
            return
        if found.better_than(self.best):
            better = self._with_room(found, self.best)
            if better is not None:
                self.passed_over.append(self.best)
                self.best = better

    def _with_room(self, found: Answer, best: Answer | None) -> Answer | None:
        """Return an answer with its room; None where it is then no better than the best."""
        self._settled.add(found.setting)
        if self._settle is None:
            return found
        settled = self._settle(found, best)
        if settled is None:
            self.passed_over.append(found)
        return settled
