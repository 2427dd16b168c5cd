"""The run time of a step, from the time of each of its ops: in all, by phase, by module call and by module.

A module's backward is the backward of its own forward ops, whether or not its inputs need a gradient. What an
existing checkpoint runs again in backward counts as backward time of the call that it repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memfit.capture import NO_INDEX, ModuleCall, Phase, Trace
from memfit.errors import InputError

Times = NDArray[np.float64]


class Cost(Protocol):
    """Anything that knows how long the ops of a trace take."""

    def op_ms(self, trace: Trace) -> Times:
        """Milliseconds of each op, in the order of the trace."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTime:
    """One module's time in a step, its children's included; `calls` has forward and backward of each call."""

    module: str
    forward_ms: float
    backward_ms: float
    calls: tuple[tuple[float, float], ...]


class Runtime:
    """The times of a step's ops and their sums."""

    def __init__(self, trace: Trace, op_ms: Sequence[float] | Times) -> None:
        self.trace = trace
        self.op_ms: Times = np.asarray(op_ms, dtype=np.float64)
        if self.op_ms.shape != (len(trace.ops),):
            raise InputError(f"{len(trace.ops)} ops need as many times, and {self.op_ms.shape} were given")

    @classmethod
    def of(cls, trace: Trace, cost: Cost) -> Runtime:
        """The run time of a step under a cost model."""
        return cls(trace, cost.op_ms(trace))

    @property
    def total_ms(self) -> float:
        """The whole step."""
        return float(self.op_ms.sum())

    @cached_property
    def by_phase_ms(self) -> dict[Phase, float]:
        """The step's time in each phase."""
        times = dict.fromkeys(Phase, 0.0)
        for op, op_ms in zip(self.trace.ops, self.op_ms.tolist(), strict=True):
            times[op.phase] += op_ms
        return times

    @cached_property
    def cumulative_ms(self) -> Times:
        """Time before each op, and after the last one: one longer than the ops."""
        return np.concatenate(([0.0], np.cumsum(self.op_ms)))

    @cached_property
    def calls(self) -> tuple[Times, Times]:
        """Forward and backward milliseconds of every module call, its children's included.

        A call in backward has its own part, which is also in that of the call it repeats.
        """
        calls, ops = self.trace.calls, self.trace.ops
        forward, backward = np.zeros(len(calls)), np.zeros(len(calls))
        of_call = np.array([op.call for op in ops], dtype=np.int64)
        in_backward = np.array([op.phase is Phase.BACKWARD for op in ops], dtype=bool)
        placed = of_call != NO_INDEX
        for times, chosen in ((forward, placed & ~in_backward), (backward, placed & in_backward)):
            np.add.at(times, of_call[chosen], self.op_ms[chosen])
        for again, first in repeats(self.trace).items():
            backward[first] += backward[again]
        for index in range(len(calls) - 1, -1, -1):
            parent = calls[index].parent
            if parent != NO_INDEX:
                forward[parent] += forward[index]
                backward[parent] += backward[index]
        return forward, backward

    @cached_property
    def modules(self) -> dict[str, ModuleTime]:
        """Every module that was called, in the order of its first call."""
        forward, backward = self.calls
        found: dict[str, list[int]] = {}
        for index, call in enumerate(self.trace.calls):
            if call.phase is not Phase.BACKWARD:
                found.setdefault(call.module, []).append(index)
        times = {}
        for path, indices in found.items():
            outer = [index for index in indices if not self._inside(index, path)]
            times[path] = ModuleTime(
                module=path,
                forward_ms=float(forward[outer].sum()),
                backward_ms=float(backward[outer].sum()),
                calls=tuple((float(forward[index]), float(backward[index])) for index in indices),
            )
        return times

    def _inside(self, call: int, path: str) -> bool:
        """Whether a call runs inside another call of the same module."""
        return any(self.trace.calls[outer].module == path for outer in self.trace.ancestors(call)[1:])


# -- Which call of the forward each recomputation of an existing activation checkpoint repeats ------------------------


def repeats(trace: Trace) -> dict[int, int]:
    """Of each module call in backward the call of the forward that it runs again.

    The outermost ones repeat the call of the same module whose backward ends soonest after they begin, or, when the
    forward had no gradients, the last one not repeated so far. What they call repeats what was called there.
    """
    forward: dict[str, list[int]] = defaultdict(list)
    children: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, call in enumerate(trace.calls):
        if call.phase is not Phase.BACKWARD:
            forward[call.module].append(index)
        children[call.parent][call.module].append(index)
    found: dict[int, int] = {}
    for index, call in enumerate(trace.calls):
        if call.phase is not Phase.BACKWARD:
            continue
        if call.parent in found:
            again = children[found[call.parent]][call.module]
            number = children[call.parent][call.module].index(index)
            found[index] = again[number] if number < len(again) else found[call.parent]
        else:
            chosen = _outermost(trace, call, forward[call.module], found)
            if chosen != NO_INDEX:
                found[index] = chosen
    return found


def _outermost(trace: Trace, call: ModuleCall, candidates: list[int], found: dict[int, int]) -> int:
    under_way = [each for each in candidates if trace.calls[each].backward_end > call.begin]
    if under_way:
        return min(under_way, key=lambda each: trace.calls[each].backward_end)
    repeated = set(found.values())
    return next((each for each in reversed(candidates) if each not in repeated), NO_INDEX)
