"""The exact dynamic program: the least recompute time under the budget, place by place through the forward, with proof.

Note [Prefix sums]: backward runs the units in the reverse order of forward, so the interval in which the bytes that a
unit dropped are missing contains those of the units after it. What is missing at a moment is then a prefix sum: what
was dropped up to some unit. Number the candidates in post-order (by the end of their forward, a container after what is
inside it) and let the last candidate of a row be the greatest of those that are active there. A plan holds the row only
if what its units up to that one dropped together makes up for the level above the budget. That is the row itself where
all of them are active, which is the rule, and a relaxation elsewhere (a backward that does not mirror its forward). So
the least time found here is a bound for the program, and a plan that has it and holds every row is optimal.

All that the rest of a plan must know of its beginning is therefore one number: the budget and what was dropped so far,
which no level may exceed. With B the budget, `freed`, `time` and `peak` those of policy k of candidate v, it is:

1. Requirements, in bytes of the budget and dropped before v unless said otherwise (all in requirements.py):
       after(v)       = max during over the rows whose last active candidate is v; dropped up to v itself
       open(v)        = max during over ops of v's forward before anything inside it has ended
       required(v, k) = max(after(v) - freed[v,k],
                            highest level of v's first run under k,
                            before[recompute_at(v)] + peak[v,k] - freed[v,k])
   They are the same for every budget, and so is the bound of 5 and the plans of 6.
2. State: a label (F, T) after v, with F - B bytes dropped and T spent. L(start) = {(B, 0)}.
3. Transition (`_LabelSetting.expand`): v is checkpointed with a policy, or its children are passed instead:
       L(v) = {(F + freed[v,k], T + time[v,k]) : (F, T) in L(before v), F >= required(v, k)}
            + {(F, T) in L(last child of v) that entered v with F >= open(v) : F >= after(v)}
   Offload: what v offloads is missing only after its next unit w, so a label also has P, the bytes in flight, which no
   level of w's forward, its inside and its recompute finds missing, and which F takes up behind w. For v itself
   required(v, k) has `offloaded` only in the rows between the end of w and the begin of w's backward; where w is no
   candidate these are rows of v, and nothing is in flight for any other. Units that offload do not lie inside one
   another nor inside w (tradeoff, Note [Offload]), so P is one number. The backward of w begins where it is recomputed,
   so rows that find P missing are those in which w is active: exact wherever 1 to 3 are.
4. Dominance (`keep_undominated`): (F, P, T) goes when another label has F' >= F, F' + P' >= F + P and T' <= T.
5. Bound (`completion_bounds`): V(v, F) is at most the least time after v from F on. With each frontier
   replaced by its convex hull, V is convex and non-increasing in F: V(end, F) = 0; a requirement cuts the domain; a
   policy is the infimal convolution with v's hull (a merge of segments by slope); "v or its children" is the convex
   hull of both. A label with T + V(v, F + P) above the best plan known goes.
6. Equal subtrees (`_SubtreePlans`): labels with F >= safe(v), the greatest requirement inside v, pass v by the list of
   undominated plans of its subtree, which is computed once for all equal subtrees.
7. Beam (`_LabelSetting.prune`, `solve_pass`): with more than `width` labels those with the least T + V stay, and the
   least value cut off is a bound for every plan that was lost with them. If the best plan is no higher, it is proven;
   otherwise a wider run follows, which the best plan so far prunes.
8. Repair (`violated_requirements`): where a plan of the relaxation breaks a row, after(v) of the row's last active
   candidate is raised by what is missing, and the next run gives a plan that may hold, but no bound.

Micro-batches whose backward has ended before the next forward begins share no row: each pass is a program of its own.
Times are whole picoseconds, so that no result depends on the order of a sum.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.capture import NO_INDEX
from memfit.memory import Ints
from memfit.solve.program import Choice, Program
from memfit.solve.requirements import NO_REQUIREMENT, UnitNode, build_passes
from memfit.tradeoff import PICOSECONDS, Times, lower_hull

WIDTHS = (64, 1024, 16384, 131072)
"""Beam widths, tried in this order until a plan is proven."""
_MAX_LABELS = 1 << 24
"""Labels that one run may record for reading plans back, a few hundred MB."""
_MAX_SUBTREE_PLANS = 256
"""A subtree with more undominated plans than this is passed node by node."""
_ROUNDING_PS = 1000.0
"""Picoseconds by which rounding may change a bound of floats."""
_SAME_SLOPE = 1e-12

Indices = npt.NDArray[np.intp]
Picks = tuple[tuple[int, int], ...]
"""Candidates that are checkpointed, each with its policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DpSolution:
    """The best plan of all passes, None when some pass has none. No plan takes less than `bound_ms`."""

    choice: Choice | None
    time_ms: float
    bound_ms: float


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class DynamicProgram:
    """The passes of a program, for any budget. None below `floor_bytes` can be met."""

    candidate_count: int
    passes: tuple[Pass, ...]
    floor_bytes: int

    @classmethod
    def of(cls, program: Program, raised: Mapping[int, int] | None = None) -> DynamicProgram | None:
        """Build the dynamic program; None when candidates overlap without lying inside one another.

        `raised` are stricter `after` requirements of some candidates (recurrence 8).
        """
        found = build_passes(program, raised)
        if found is None:
            return None
        passes = tuple(Pass(nodes) for nodes in found[0])
        return cls(candidate_count=len(program.candidates), passes=passes, floor_bytes=found[1])

    def bound_ms(self, budget_bytes: int) -> float:
        """Return a time that no plan adds less than, without looking for one (recurrence 5); infinite if none fits."""
        if self.floor_bytes > budget_bytes:
            return math.inf
        return sum(each.bound(budget_bytes) for each in self.passes) / PICOSECONDS

    def solve(
        self,
        budget_bytes: int,
        *,
        gap: float = 0.0,
        slack_ms: float = 0.0,
        deadline: float = math.inf,
        widths: Sequence[int] = WIDTHS,
        start: Choice | None = None,
        cutoff_ms: float = math.inf,
        watch: Callable[[float], None] | None = None,
    ) -> DpSolution:
        """Return the best plan, from one that holds every requirement if that is known; `watch` hears each bound.

        Plans that add `cutoff_ms` or more are not looked for: where there are no others, that is the bound.
        """
        if self.floor_bytes > budget_bytes:
            return DpSolution(choice=None, time_ms=math.inf, bound_ms=math.inf)
        time = bound = 0.0
        whole = True
        others = self.bound_ms(budget_bytes)
        if math.isinf(others) or others >= cutoff_ms:
            return DpSolution(choice=None, time_ms=math.inf, bound_ms=others)
        choice = np.full(self.candidate_count, NO_INDEX, np.int64)
        for each in self.passes:
            before = bound
            found = solve_pass(
                each,
                budget_bytes,
                gap=gap,
                slack=slack_ms * PICOSECONDS / len(self.passes),
                deadline=deadline,
                widths=widths,
                start=None if start is None else _picks_within(each.nodes, start),
                cutoff=(cutoff_ms - others) * PICOSECONDS + each.bound(budget_bytes),
                watch=None if watch is None else lambda own, before=before: watch((before + own) / PICOSECONDS),
            )
            time, bound = time + found.time, bound + found.bound
            whole = whole and found.picks is not None
            for index, policy in found.picks or ():
                choice[index] = policy
        return DpSolution(choice=choice if whole else None, time_ms=time / PICOSECONDS, bound_ms=bound / PICOSECONDS)


# ---- 4. Dominance ----


def keep_undominated(freed: Ints, time: Ints, in_flight: Ints | None = None) -> Indices:
    """Return the indices of labels that no other dominates; the first of equal ones.

    By falling bytes, for each number of bytes in flight by itself.
    """
    if in_flight is None or not in_flight.any():
        return _keep_undominated(freed, time)
    kept: dict[int, Indices] = {}
    for amount in np.unique(in_flight).tolist():
        own = np.flatnonzero(in_flight == amount)
        kept[amount] = own[_keep_undominated(freed[own], time[own])]
    found = []
    for amount, own in kept.items():
        alive = np.ones(len(own), bool)
        for other, rivals in kept.items():
            if other != amount:
                # By rising bytes, the least time of those with at least as many: times fall with the bytes.
                at, least = freed[rivals][::-1], time[rivals][::-1]
                place = np.searchsorted(at, freed[own] + max(0, amount - other))
                beaten = place < len(at)
                alive[beaten] &= least[place[beaten]] > time[own][beaten]
        found.append(own[alive])
    return np.concatenate(found)


def _keep_undominated(freed: Ints, time: Ints) -> Indices:
    """Return the indices of labels that no other dominates, by falling bytes; the first of equal ones."""
    order = np.argsort(-freed, kind="stable")  # one key: half the time of sorting by both
    by_bytes = time[order]
    kept = np.ones(len(order), bool)
    kept[1:] = by_bytes[1:] < np.minimum.accumulate(by_bytes)[:-1]
    order = order[kept]
    last = np.ones(len(order), bool)  # of equal bytes, the last that is kept has the least time
    last[:-1] = np.diff(freed[order]) != 0
    return order[last]


# ---- 5. Bound ----


@dataclass(frozen=True, eq=False, slots=True)
class ConvexBound:
    """A convex non-increasing function by its corners: infinite before the first, constant after the last."""

    at: Times
    time: Times

    @classmethod
    def hull(cls, at: Times, time: Times) -> ConvexBound:
        """Return the lower convex hull of points, as far as it falls."""
        order = np.lexsort((time, at))
        at, time = at[order], time[order]
        falls = np.ones(len(time), bool)
        falls[1:] = time[1:] < np.minimum.accumulate(time)[:-1]
        at, time = at[falls], time[falls]
        corners = lower_hull(at, time)
        return cls(at[corners], time[corners])

    def __call__(self, reached: Ints) -> Times:
        """Return the values from these bytes of budget and dropped on."""
        found = np.interp(reached, self.at, self.time)
        found[reached < self.at[0]] = np.inf
        return found

    def cut(self, least_bytes: float) -> ConvexBound:
        """Restrict the domain to at least so many bytes."""
        if least_bytes <= self.at[0]:
            return self
        if least_bytes >= self.at[-1]:
            return ConvexBound(np.array([float(least_bytes)]), self.time[-1:])
        first = int(np.searchsorted(self.at, least_bytes, "right"))
        value = np.interp(least_bytes, self.at, self.time)
        return ConvexBound(
            np.concatenate(([float(least_bytes)], self.at[first:])), np.concatenate(([value], self.time[first:]))
        )

    def convolve(self, hull: ConvexBound) -> ConvexBound:
        """Return the infimal convolution with a unit's hull, whose domain is the bytes it frees, negated."""
        run = np.concatenate((np.diff(self.at), np.diff(hull.at)))
        fall = np.concatenate((np.diff(self.time), np.diff(hull.time)))
        slope = fall / run
        order = np.argsort(slope, kind="stable")
        run, fall, slope = run[order], fall[order], slope[order]
        if len(slope) > 1:  # neighbours of equal slope become one segment
            starts = np.concatenate(([True], np.diff(slope) > -_SAME_SLOPE * slope[1:]))
            places = np.flatnonzero(starts)
            run, fall = np.add.reduceat(run, places), np.add.reduceat(fall, places)
        return ConvexBound(
            np.cumsum(np.concatenate((self.at[:1] + hull.at[0], run))),
            np.cumsum(np.concatenate((self.time[:1] + hull.time[0], fall))),
        )


def completion_bounds(nodes: tuple[UnitNode, ...]) -> tuple[ConvexBound, dict[int, ConvexBound]]:
    """Return V before the first node of a pass, and V after each node by its candidate, from the last to the first."""
    after: dict[int, ConvexBound] = {}
    hulls: dict[int, ConvexBound] = {}

    def before(node: UnitNode, rest: ConvexBound) -> ConvexBound:
        after[node.index] = rest
        rest = rest.cut(node.after_bytes)
        own = hulls.get(node.kind)
        if own is None:  # a leaf that is not forced may also drop nothing, which takes no time
            nothing = [] if node.children or node.forced else [0]
            freed = np.concatenate((-node.freed, nothing)).astype(np.float64)
            own = hulls[node.kind] = ConvexBound.hull(freed, np.concatenate((node.time, nothing)).astype(np.float64))
        if not node.children:
            return rest.convolve(own)
        through = rest
        for child in reversed(node.children):
            through = before(child, through)
        through = through.cut(node.open_bytes)
        if node.must_open:
            return through
        whole = rest.convolve(own).cut(node.first_run_bytes)
        if node.forced:
            return whole
        return ConvexBound.hull(np.concatenate((through.at, whole.at)), np.concatenate((through.time, whole.time)))

    rest = ConvexBound(np.array([float(NO_REQUIREMENT)]), np.array([0.0]))
    for node in reversed(nodes):
        rest = before(node, rest)
    return rest, after


# ---- 6. Equal subtrees ----


@dataclass(frozen=True, eq=False, slots=True)
class SubtreePlans:
    """Undominated plans of a subtree, each as (post-order number in the subtree, policy) pairs.

    `freed` is what is gone at its end, `in_flight` what is gone after the next node.
    """

    freed: Ints
    in_flight: Ints
    time: Ints
    chosen: tuple[Picks, ...]

    def picks(self, plan: int, node: UnitNode) -> list[tuple[int, int]]:
        """Return the candidates that a plan checkpoints below this node, each with its policy."""
        indices = [each.index for each in _subtree(node)]
        return [(indices[number], policy) for number, policy in self.chosen[plan]]


@dataclass(eq=False, slots=True)
class _SubtreePlans:
    """The plans of each kind of subtree, None where there are too many to list."""

    known: dict[int, SubtreePlans | None] = field(default_factory=dict)

    def of(self, node: UnitNode) -> SubtreePlans | None:
        if node.kind not in self.known:
            self.known[node.kind] = self._list(node)
        return self.known[node.kind]

    def _list(self, node: UnitNode) -> SubtreePlans | None:
        inner = None if node.forced else self._combine(node.children)
        if inner is None and not node.forced:
            return None
        freed, in_flight, time = (np.zeros(0, np.int64) for _ in range(3))
        chosen: list[Picks] = []
        if inner is not None:
            freed, in_flight, time, chosen = inner.freed, inner.in_flight, inner.time, list(inner.chosen)
        if not node.must_open:
            own = sum(1 for _ in _subtree(node)) - 1
            freed = np.concatenate((freed, node.freed - node.in_flight))
            in_flight, time = np.concatenate((in_flight, node.in_flight)), np.concatenate((time, node.time))
            chosen += [((own, policy),) for policy in range(len(node.time))]
        kept = keep_undominated(freed, time, in_flight)
        picks = tuple(chosen[plan] for plan in kept.tolist())
        return SubtreePlans(freed[kept], in_flight[kept], time[kept], picks)

    def _combine(self, children: Sequence[UnitNode]) -> SubtreePlans | None:
        """Return the undominated sums of the children's plans; behind the last of them nothing is in flight."""
        zero = np.zeros(1, np.int64)
        plans, units = SubtreePlans(zero, zero, zero, ((),)), 0
        for child in children:
            more = self.of(child)
            if more is None:
                return None
            freed = (plans.freed[:, None] + more.freed + more.in_flight).ravel()
            time = (plans.time[:, None] + more.time).ravel()
            kept = keep_undominated(freed, time)
            if len(kept) > _MAX_SUBTREE_PLANS:
                return None
            one, other = np.divmod(kept, len(more.time))
            chosen = tuple(
                (*plans.chosen[i], *((units + number, policy) for number, policy in more.chosen[j]))
                for i, j in zip(one.tolist(), other.tolist(), strict=True)
            )
            plans = SubtreePlans(freed[kept], np.zeros_like(freed[kept]), time[kept], chosen)
            units += sum(1 for _ in _subtree(child))
        return plans


def _subtree(node: UnitNode) -> Iterator[UnitNode]:
    """Iterate over a node's subtree in post-order."""
    for child in node.children:
        yield from _subtree(child)
    yield node


# ---- 2, 3, 7. Labels, transition, beam ----


class _LimitReachedError(Exception):
    """The deadline passed, or there are more labels than a run may record."""


@dataclass(frozen=True, eq=False, slots=True)
class _Labels:
    """Labels after one node, F, P and T. `step` and `row` are where each was recorded, step -1 for the start."""

    reached: Ints
    in_flight: Ints
    time: Ints
    step: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]

    def part(self, kept: Indices | npt.NDArray[np.bool_]) -> _Labels:
        return _Labels(self.reached[kept], self.in_flight[kept], self.time[kept], self.step[kept], self.row[kept])

    def behind(self, node: UnitNode) -> _Labels:
        """Return the labels with what the node releases."""
        if not node.releases:
            return self
        return replace(self, reached=self.reached + self.in_flight, in_flight=np.zeros_like(self.in_flight))


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """Recorded labels of one node: the label each came from, and its policy, or its plan of the subtree."""

    node: UnitNode
    plans: SubtreePlans | None
    step: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    taken: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Pass:
    """The nodes of a pass that lie in no other, and what holds for them under any budget."""

    nodes: tuple[UnitNode, ...]
    subtree_plans: _SubtreePlans = field(default_factory=_SubtreePlans)

    @cached_property
    def bounds(self) -> tuple[ConvexBound, dict[int, ConvexBound]]:
        """V before the first node, and after each (recurrence 5)."""
        return completion_bounds(self.nodes)

    def bound(self, budget_bytes: int) -> float:
        """Return a time in picoseconds that no plan takes less than."""
        return max(0.0, float(self.bounds[0](np.array([budget_bytes]))[0]) - _ROUNDING_PS)


@dataclass(eq=False, slots=True)
class _LabelSetting:
    """Passes labels from node to node. `best` is the time of the best plan known, `lost` the least cut by the beam."""

    nodes: tuple[UnitNode, ...]
    after: dict[int, ConvexBound]
    subtree_plans: _SubtreePlans
    budget_bytes: int
    deadline: float
    steps: list[_Step] = field(default_factory=list)
    recorded: int = 0
    best: float = math.inf
    lost: float = math.inf
    width: int = 0

    def run(self, width: int) -> tuple[Picks, int] | None:
        """Pass all nodes with at most this many labels after each; return the best plan and its time."""
        self.width, self.lost, self.recorded, self.steps = width, math.inf, 0, []
        start = np.zeros(1, np.int32)
        zero = np.zeros(1, np.int64)
        labels = _Labels(np.array([self.budget_bytes]), zero, zero, start - 1, start)
        for node in self.nodes:
            labels = self.advance(node, labels)
            if not len(labels.time):
                return None
        last = int(labels.time.argmin())
        return self.read_back(int(labels.step[last]), int(labels.row[last])), int(labels.time[last])

    def advance(self, node: UnitNode, labels: _Labels) -> _Labels:
        """Return the labels after a node: by its subtree's plans where no requirement binds, else by recurrence 3."""
        if clock.perf_counter() > self.deadline or self.recorded > _MAX_LABELS:
            raise _LimitReachedError
        plans = self.subtree_plans.of(node)
        safe = labels.reached >= node.safe_bytes
        if plans is None or not safe.any():
            return self.expand(node, labels)
        from_label = np.repeat(np.arange(np.count_nonzero(safe)), len(plans.time))
        plan = np.tile(np.arange(len(plans.time)), np.count_nonzero(safe))
        behind = labels.part(safe).behind(node)
        free = self.extend(node, plans, behind, from_label, plan, plans.freed, plans.in_flight, plans.time)
        return self.prune(node, [free] if safe.all() else [free, self.expand(node, labels.part(~safe))])

    def expand(self, node: UnitNode, labels: _Labels) -> _Labels:
        """Recurrence 3."""
        found: list[_Labels] = [labels.part(np.zeros(0, np.intp))] if node.forced and node.must_open else []
        if not node.forced:
            inner = labels.part(labels.reached >= node.open_bytes)
            for child in node.children:
                inner = self.advance(child, inner)
            inner = inner.behind(node)
            found.append(inner.part(inner.reached >= node.after_bytes))
        if not node.must_open:
            behind = labels.behind(node)
            holds = (labels.reached[:, None] >= node.required_bytes) & (behind.reached[:, None] >= node.required_after)
            from_label, policy = np.nonzero(holds)
            gone = node.freed - node.in_flight
            found.append(self.extend(node, None, behind, from_label, policy, gone, node.in_flight, node.time))
        return self.prune(node, found)

    def extend(
        self,
        node: UnitNode,
        plans: SubtreePlans | None,
        labels: _Labels,
        from_label: Indices,
        taken: Indices,
        freed: Ints,
        in_flight: Ints,
        time: Ints,
    ) -> _Labels:
        """Add what was taken to labels, drop those that are hopeless, and record the rest."""
        reached, time = labels.reached[from_label] + freed[taken], labels.time[from_label] + time[taken]
        in_flight = labels.in_flight[from_label] + in_flight[taken]
        kept = np.flatnonzero(time + self.after[node.index](reached + in_flight) <= self.best + _ROUNDING_PS)
        kept = kept[keep_undominated(reached[kept], time[kept], in_flight[kept])]
        from_label = from_label[kept]
        self.steps.append(
            _Step(node, plans, labels.step[from_label], labels.row[from_label], taken[kept].astype(np.int32))
        )
        self.recorded += len(kept)
        step = np.full(len(kept), len(self.steps) - 1, np.int32)
        return _Labels(reached[kept], in_flight[kept], time[kept], step, np.arange(len(kept), dtype=np.int32))

    def prune(self, node: UnitNode, found: list[_Labels]) -> _Labels:
        """Recurrences 4, 5 and 7: keep undominated labels that may still become the best plan, at most `width`."""
        labels = found[0]
        if len(found) > 1:
            labels = _Labels(
                np.concatenate([each.reached for each in found]),
                np.concatenate([each.in_flight for each in found]),
                np.concatenate([each.time for each in found]),
                np.concatenate([each.step for each in found]),
                np.concatenate([each.row for each in found]),
            )
            labels = labels.part(keep_undominated(labels.reached, labels.time, labels.in_flight))
        least = labels.time + self.after[node.index](labels.reached + labels.in_flight)
        hopeful = least <= self.best + _ROUNDING_PS
        if np.count_nonzero(hopeful) > self.width:
            order = np.argsort(least, kind="stable")
            self.lost = min(self.lost, float(least[order[self.width]]) - _ROUNDING_PS)
            return labels.part(np.sort(order[: self.width]))
        return labels.part(hopeful)

    def read_back(self, step: int, row: int) -> Picks:
        """Return the plan of a label by following where it came from."""
        found: list[tuple[int, int]] = []
        while step >= 0:
            origin = self.steps[step]
            taken = int(origin.taken[row])
            if origin.plans is None:
                found.append((origin.node.index, taken))
            else:
                found += origin.plans.picks(taken, origin.node)
            step, row = int(origin.step[row]), int(origin.row[row])
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSolution:
    """The best plan of one pass and its time, None and infinite when there is none; no plan takes less than `bound`."""

    picks: Picks | None
    time: float
    bound: float


def solve_pass(
    each: Pass,
    budget_bytes: int,
    *,
    gap: float = 0.0,
    slack: float = 0.0,
    deadline: float = math.inf,
    widths: Sequence[int] = WIDTHS,
    start: Picks | None = None,
    cutoff: float = math.inf,
    watch: Callable[[float], None] | None = None,
) -> PassSolution:
    """Return the best plan of a pass, proven unless that takes a wider beam than the last, or more time.

    Proven up to a part of its time, `gap`, or up to `slack`. Times are in picoseconds. `start` is a plan that holds
    every requirement. Plans of `cutoff` or more are not looked for. `watch` hears the bound after each run.
    """
    first, after = each.bounds
    labels = _LabelSetting(each.nodes, after, each.subtree_plans, budget_bytes, deadline)
    bound = float(first(np.array([budget_bytes]))[0])
    picks, time = start, math.inf if start is None else float(_time_of(each.nodes, dict(start)))
    labels.best = min(time, cutoff)
    for width in widths:
        try:
            found = labels.run(width)
        except _LimitReachedError:
            break
        if found is not None and found[1] < labels.best:
            picks, time = found[0], float(found[1])
            labels.best = time
        bound = max(bound, min(labels.lost, labels.best))
        if watch is not None:
            watch(bound)
        enough = max(gap * bound, slack) if time <= cutoff else 0.0  # of a plan that was found, not of the cutoff
        if labels.lost >= labels.best - enough:
            break
    return PassSolution(picks=picks, time=time, bound=min(bound, time))


def _time_of(nodes: Sequence[UnitNode], picks: dict[int, int]) -> int:
    return sum(
        int(node.time[picks[node.index]]) if node.index in picks else _time_of(node.children, picks) for node in nodes
    )


def _picks_within(nodes: Sequence[UnitNode], choice: Choice) -> Picks:
    """Return the candidates of a pass that a choice checkpoints, each with its policy."""
    found: list[tuple[int, int]] = []
    for node in nodes:
        if choice[node.index] != NO_INDEX:
            found.append((node.index, int(choice[node.index])))
        else:
            found += _picks_within(node.children, choice)
    return tuple(found)
