"""Why nothing fits: the instant that stands in the way, and what fills it. What would help is for levers to say."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture import NO_INDEX, Category, Phase
from memfit.solve.program import Choice
from memfit.solve.solution import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingPeak:
    """The highest point of the plan with the lowest peak: no plan gets below it."""

    op: int
    name: str
    phase: Phase
    module: str | None
    source: str
    second_run_of: str | None
    peak_bytes: int
    by_category: dict[Category, int]

    def __str__(self) -> str:
        where = "outside any module" if self.module is None else f"in {self.module or 'the model itself'}"
        return f"op {self.op} ({self.name}) of the {self.phase.value}, {where}"


def find_blocker(problem: Problem, choice: Choice) -> BlockingPeak:
    """Return what stands in the way of a lower peak than this choice has."""
    judged = problem.replay((each.unit, policy) for each, policy in problem.program(1).chosen(choice))
    trace, instant = judged.trace, judged.peak_instant
    op = min(int(judged.op[instant]), len(trace.ops) - 1)
    call = trace.ops[op].call
    return BlockingPeak(
        op=op,
        name=trace.ops[op].name,
        phase=trace.ops[op].phase,
        module=trace.calls[call].module if call != NO_INDEX else None,
        source=trace.source_of(op),
        second_run_of=judged.recomputed_unit(instant),
        peak_bytes=judged.peak_bytes,
        by_category=judged.peak_by_category,
    )
