"""Why nothing fits: the instant that stands in the way, what fills it, and what each lever would save there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.solve.program import Choice
from memfit.solve.solution import Problem
from memfit.trace import NEVER, Category, Phase, Trace

_STATES = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)
_TIMES = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """Something beyond checkpointing, and the bytes that it would save at the instant in the way."""

    name: str
    saves_bytes: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    """The highest point of the plan with the lowest peak: no plan gets below it."""

    op: int
    name: str
    phase: Phase
    module: str | None
    source: str
    second_run_of: str | None
    peak_bytes: int
    by_category: dict[Category, int]
    levers: tuple[Lever, ...]

    def __str__(self) -> str:
        where = "outside any module" if self.module is None else f"in {self.module or 'the model itself'}"
        return f"op {self.op} ({self.name}) of the {self.phase.value}, {where}"


def blocker_of(problem: Problem, choice: Choice, budget_bytes: int | None = None) -> Blocker:
    """What stands in the way of a lower peak than this choice has, and of a budget that is lower."""
    judged = problem.replay((each.unit, policy) for each, policy in problem.program(1).chosen(choice))
    trace, instant = judged.trace, judged.peak_instant
    op = min(int(judged.op[instant]), len(trace.ops) - 1)
    call = trace.ops[op].call
    by_category = judged.peak_by_category
    return Blocker(
        op=op,
        name=trace.ops[op].name,
        phase=trace.ops[op].phase,
        module=trace.calls[call].module if call != NEVER else None,
        source=trace.source_of(op),
        second_run_of=judged.second_run_of(instant),
        peak_bytes=judged.peak_bytes,
        by_category=by_category,
        levers=_levers(problem, op, by_category, 0 if budget_bytes is None else judged.peak_bytes - budget_bytes),
    )


def _levers(problem: Problem, op: int, by_category: dict[Category, int], missing_bytes: int) -> tuple[Lever, ...]:
    """Estimates at this instant alone, the largest first; those that save less than is missing say so."""
    trace = problem.timeline.trace
    phase = trace.ops[op].phase
    batch = by_category.get(Category.ACTIVATION, 0) + by_category.get(Category.INPUT, 0)
    found = []
    if problem.target.device.type != "cpu":
        found.append(_sharding(problem.target.ranks, by_category, missing_bytes))
        state = by_category.get(Category.OPTIMIZER_STATE, 0)
        found.append(Lever(name="offload", saves_bytes=state, how="keep the optimizer's state on the host"))
    if phase is Phase.OPTIMIZER:
        found.append(
            Lever(
                name="optimizer",
                saves_bytes=by_category.get(Category.TEMPORARY, 0),
                how="use a fused optimizer (fused=True), which makes no temporaries",
            )
        )
    else:
        batch += by_category.get(Category.TEMPORARY, 0)
    rows = _rows(trace)
    if rows is None or rows % 2 == 0:
        how = "halve the micro-batch and accumulate two of them"
        found.append(Lever(name="micro-batch", saves_bytes=batch // 2, how=how))
    for unit in problem.units:
        if unit.kind == "loss" and (unit.begin <= op < unit.end or unit.backward_begin <= op < unit.backward_end):
            made = sum(storage.bytes for storage in trace.storages if unit.begin <= storage.birth < unit.end)
            how = "compute the loss in four chunks of the sequence instead of on all logits at once"
            found.append(Lever(name="chunked loss", saves_bytes=made * 3 // 4, how=how))
    able = sorted((each for each in found if each.saves_bytes > 0), key=lambda each: -each.saves_bytes)
    return tuple(
        each if each.saves_bytes >= missing_bytes else replace(each, how=f"{each.how}; not enough by itself")
        for each in able
    )


def _sharding(ranks: int, by_category: dict[Category, int], missing_bytes: int) -> Lever:
    """Over as many more ranks as save what is missing; over twice as many where none do."""
    states = sum(by_category.get(category, 0) for category in _STATES)
    enough = (times for times in _TIMES if states - states // times >= missing_bytes)
    times = next(enough, _TIMES[0])
    return Lever(
        name="sharding",
        saves_bytes=states - states // times,
        how=f"shard parameters, gradients and optimizer state over {times * ranks} ranks instead of {ranks}",
    )


def _rows(trace: Trace) -> int | None:
    """The first size of every tensor of the batch, as the first op that reads it sees it; None where they differ."""
    sizes: dict[int, int] = {}
    for op in trace.ops:
        for ref in op.inputs:
            if ref.storage != NEVER and ref.shape and trace.storages[ref.storage].category is Category.INPUT:
                sizes.setdefault(ref.storage, ref.shape[0])
    found = set(sizes.values())
    return found.pop() if len(found) == 1 else None
