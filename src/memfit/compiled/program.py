"""Which values of a joint graph to save: the program that finds the fewest milliseconds of recomputing in a budget.

Note [Program]: value v of the forward that the backward needs has a binary x[v], 1 when it is saved. The backward is
cut into segments s at the ops that are kernels of their own. c[v,s] is 1 when v has been recomputed by segment s:

1. c[v,s] >= c[v,s-1]; c[v,first use of v] >= 1 - x[v]
2. an input u of v is there when v is recomputed: x[u] + c[u,s] >= c[v,s]
3. in segment s: what backward computes itself + sum over v that are still needed of bytes[v] (x[v] + c[v,s]) <= budget
4. in the forward, at each of its kernels: what runs + sum over v computed by then of bytes[v] x[v] <= budget
5. between the two: outputs + sum of bytes[v] x[v] + what the loss takes outside the graph <= budget

Given x the least c is integral, so only x is binary. Minimised are the times of recomputed values, with the traffic of
buffers that saving or recomputing adds. Rows 3 know which values have memory before fusion is decided, so the answer is
run as a fused step, and the program's budget is moved by what it was off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from memfit.compiled.fused_step import FusedStep, backward_order, forward_order, run_graph, run_step
from memfit.compiled.joint_graph import JointGraph
from memfit.solve import Limits, Milp, Status

_CORRECTIONS = 4
"""How often the program is solved again with a budget that is moved by what it was off."""
_LIMITS = Limits(gap=0.01, time_limit_s=4.0)
_STARTS, _PASSES = 2, 2
"""How many saved sets are improved one value at a time, and how often all values are gone through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Bytes of the step outside the compiled graphs.

    `resident_bytes` are there before the step; `between_bytes` is the most that loss and its gradient add between the
    two graphs, `held_bytes` what the loop and the loss hold while the backward graph runs, beside the model's outputs;
    `optimizer_bytes` is the peak of clipping and the optimizer's step, everything counted.
    """

    resident_bytes: int
    between_bytes: int
    held_bytes: int
    optimizer_bytes: int

    def peak_bytes(self, step: FusedStep, outputs_bytes: int) -> int:
        """Return the peak of the whole step."""
        return max(
            self.resident_bytes + step.forward.peak_bytes,
            self.resident_bytes + step.held_bytes + self.between_bytes,
            self.resident_bytes + outputs_bytes + self.held_bytes + step.backward.peak_bytes,
            self.optimizer_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A saved set, what it was found by, and what the step then takes as estimated."""

    saved: frozenset[int]
    found_by: str
    peak_bytes: int
    ms: float
    saved_bytes: int


class SavedSetProblem:
    """The choice of a saved set for one joint graph."""

    def __init__(self, graph: JointGraph, outside: Outside) -> None:
        self.graph, self.outside = graph, outside
        self._outputs_bytes = self._bytes_of(graph.forward_outputs)
        self._judged: dict[frozenset[int], Choice] = {}
        self.values = self._needed_values()
        in_forward = set(forward_order(graph, ()))
        self.savable = frozenset(v for v in self.values if v in in_forward or graph.is_fixed[v])
        """Values that torch's partitioner saves when told to: what only the backward needs, it computes there."""

    def _needed_values(self) -> tuple[int, ...]:
        """Return the values of the forward that the backward is computed of, in order."""
        graph = self.graph
        return tuple(value for value in backward_order(graph, ()) if not graph.is_backward[value])

    def _as_savable(self, saved: frozenset[int]) -> frozenset[int]:
        """Save, in place of what only the backward needs, the values that it is computed of."""
        found, stack = set(saved & self.savable), [*(saved - self.savable)]
        while stack:
            for used in self.graph.inputs[stack.pop()]:
                if used in self.savable:
                    found.add(used)
                else:
                    stack.append(used)
        return frozenset(found)

    def _bytes_of(self, values: Collection[int]) -> int:
        return sum(self.graph.value_bytes[value] for value in values)

    def judge(self, saved: Collection[int], found_by: str) -> Choice:
        """Estimate peak and time of a saved set."""
        key = frozenset(saved)
        if key not in self._judged:
            step = run_step(self.graph, key)
            peak = self.outside.peak_bytes(step, self._bytes_of(self.graph.forward_outputs - key))
            self._judged[key] = Choice(
                saved=key, found_by=found_by, peak_bytes=peak, ms=step.ms, saved_bytes=step.saved_bytes
            )
        return self._judged[key]

    def choose(self, budget_bytes: int, others: Sequence[Choice]) -> Choice:
        """Return the first of `others`, which is torch's own, if it fits, and otherwise the fastest that does."""
        return others[0] if others[0].peak_bytes <= budget_bytes else self.solve(budget_bytes, others)

    def solve(self, budget_bytes: int, others: Sequence[Choice]) -> Choice:
        """Return the fastest saved set that fits, among the program's and `others`; the smallest if none does."""
        found = [self.judge(self.savable, "memfit")]
        found += [self.judge(self._as_savable(each.saved), each.found_by) for each in others]
        allowed, step = budget_bytes, max(1, (budget_bytes - self.outside.resident_bytes) // 16)
        for _ in range(_CORRECTIONS):
            saved = self._program(allowed)
            if saved is None:
                allowed += step  # its rows are higher than the fused step
                continue
            choice = self.judge(saved, "memfit")
            if choice in found:
                break
            found.append(choice)
            allowed += budget_bytes - choice.peak_bytes

        def rank(choice: Choice) -> tuple[float, ...]:
            return max(0, choice.peak_bytes - budget_bytes), choice.ms, choice.peak_bytes

        starts = sorted(found, key=rank)[:_STARTS]
        return min((self._improve(each, rank) for each in starts), key=rank)

    def _improve(self, choice: Choice, rank: Callable[[Choice], tuple[float, ...]]) -> Choice:
        """Save one value more or less for as long as that fits better or is faster."""
        best = choice
        for _ in range(_PASSES):
            before = best
            for value in self.values:
                if value in self.savable and not self.graph.is_fixed[value]:
                    best = min(best, self.judge(best.saved ^ {value}, "memfit"), key=rank)
            if best is before:
                break
        return best

    def _program(self, budget_bytes: int) -> frozenset[int] | None:
        """Solve the program of Note [Program]; None where nothing fits."""
        program = _Program(self.graph, self.values, self.savable)
        program.add_backward(budget_bytes - self.outside.resident_bytes - self._outputs_bytes - self.outside.held_bytes)
        program.add_forward(budget_bytes - self.outside.resident_bytes)
        program.add_between(
            budget_bytes - self.outside.resident_bytes - self._outputs_bytes - self.outside.between_bytes
        )
        solution = program.milp.solve(_LIMITS)
        if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
            return None
        return frozenset(value for value in self.values if solution.values[program.saved[value]] > 0.5)


class _Program:
    """Builds the rows of Note [Program]."""

    def __init__(self, graph: JointGraph, values: tuple[int, ...], savable: frozenset[int]) -> None:
        self.graph, self.values, self.milp = graph, values, Milp()
        self._savable = savable
        within = set(values)
        self._readers: dict[int, list[int]] = defaultdict(list)
        for value in values:
            for used in graph.inputs[value]:
                self._readers[used].append(value)
        self._own = run_graph(graph, backward_order(graph, values), given=graph.tangents, kept=graph.backward_outputs)
        self._fixed_bytes, first, last = self._segments(within)
        self._has_memory = self._find_memory()
        self._first, self._earliest, self._last = self._spans(first, last)
        self.saved: dict[int, int] = {}
        self._recomputed: dict[int, dict[int, int]] = {}
        for value in values:
            self._add_value(value)

    def _segments(self, within: set[int]) -> tuple[list[int], dict[int, int], dict[int, int]]:
        """Cut the backward at its kernels; find in which segments each value of the forward is read by it."""
        graph, fixed = self.graph, [0]
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        segment = 0
        for value, level in zip(self._own.order, self._own.levels, strict=True):
            if graph.is_extern[value]:
                segment += 1
                fixed.append(0)
            fixed[segment] = max(fixed[segment], level)
            for used in graph.inputs[value]:
                if used in within:
                    first.setdefault(used, segment)
                    last[used] = segment
        return fixed, first, last

    def _find_memory(self) -> dict[int, bool]:
        """Return which values have memory when the backward computes them: those that a kernel of its own reads."""
        graph = self.graph
        read_by_kernel = {used for value in self._own.order if graph.is_extern[value] for used in graph.inputs[value]}
        return {
            value: graph.is_extern[value]
            or value in read_by_kernel
            or any(graph.is_extern[each] for each in self._readers[value])
            for value in self.values
        }

    def _spans(
        self, first: dict[int, int], last: dict[int, int]
    ) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        """Return the segments in which each value is used first, may be recomputed earliest, and is used last."""
        end = len(self._fixed_bytes) - 1
        earliest: dict[int, int] = {}
        latest: dict[int, int] = {}
        for value in reversed(self.values):
            readers = self._readers[value]
            own = first.get(value, end + 1)
            earliest[value] = min([own, *(earliest[each] for each in readers)])
            if own > end:
                first[value] = max((first[each] for each in readers), default=end)
            reach = [last.get(value, 0)]
            reach += [latest[each] if not self._has_memory[each] else first[each] for each in readers]
            latest[value] = max(reach)
        return first, earliest, latest

    def _add_value(self, value: int) -> None:
        """Add x and c of a value, and rows 1 (family numbers are those of Note [Program])."""
        graph, milp = self.graph, self.milp
        moved_ms = 2 * graph.value_bytes[value] * graph.ms_per_byte
        is_buffer = self._has_memory[value]
        fixed = graph.is_fixed[value]
        self.saved[value] = milp.variable(
            cost=0.0 if is_buffer else moved_ms, lower=float(fixed), upper=float(value in self._savable)
        )
        cost = graph.op_ms[value] + (moved_ms if is_buffer and not graph.is_extern[value] else 0.0)
        steps: dict[int, int] = {}
        before = None
        for segment in range(self._earliest[value], self._first[value] + 1):
            is_last = segment == self._first[value]
            steps[segment] = milp.variable(cost=cost if is_last else 0.0, integer=False, upper=float(not fixed))
            if before is not None:
                milp.row([(steps[segment], 1.0), (before, -1.0)], lower=0.0)
            before = steps[segment]
        self._recomputed[value] = steps

    def _recomputed_by(self, value: int, segment: int) -> int | None:
        """Return the variable that says whether a value has been recomputed by a segment; None before it can be."""
        if segment < self._earliest[value]:
            return None
        return self._recomputed[value][min(segment, self._first[value])]

    def add_backward(self, budget_bytes: int) -> None:
        """Add rows 1 to 3."""
        milp, graph = self.milp, self.graph
        read_directly = {used for value in self._own.order for used in graph.inputs[value]}
        for value in self.values:
            if value in read_directly or value in graph.backward_outputs:
                at_use = self._recomputed[value][self._first[value]]
                milp.row([(at_use, 1.0), (self.saved[value], 1.0)], lower=1.0)
            for segment, variable in self._recomputed[value].items():
                for used in graph.inputs[value]:
                    if used in self.saved:
                        there = self._recomputed_by(used, segment)
                        terms = [(self.saved[used], 1.0), (variable, -1.0)]
                        milp.row(terms if there is None else [*terms, (there, 1.0)], lower=0.0)
        scale = 2.0**-20
        for segment, own_bytes in enumerate(self._fixed_bytes):
            terms = []
            for value in self.values:
                if self._last[value] < segment or not graph.value_bytes[value]:
                    continue
                size = graph.value_bytes[value] * scale
                terms.append((self.saved[value], size))
                there = self._recomputed_by(value, segment)
                if there is not None and self._has_memory[value]:
                    terms.append((there, size))
            milp.row(terms, upper=(budget_bytes - own_bytes) * scale)

    def add_forward(self, budget_bytes: int) -> None:
        """Add rows 4."""
        graph, scale = self.graph, 2.0**-20
        run = run_graph(graph, forward_order(graph, ()), given=(), kept=graph.forward_outputs)
        place = {value: index for index, value in enumerate(run.order)}
        for index, (value, level) in enumerate(zip(run.order, run.levels, strict=True)):
            if graph.is_extern[value] or index == len(run.order) - 1:
                terms = [
                    (self.saved[each], graph.value_bytes[each] * scale)
                    for each in self.values
                    if place.get(each, len(run.order)) <= index and run.last_use.get(each, -1) < index
                ]
                self.milp.row(terms, upper=(budget_bytes - level) * scale)

    def add_between(self, budget_bytes: int) -> None:
        """Add row 5."""
        scale = 2.0**-20
        outputs = self.graph.forward_outputs
        terms = [(self.saved[v], self.graph.value_bytes[v] * scale) for v in self.values if v not in outputs]
        self.milp.row(terms, upper=budget_bytes * scale)
