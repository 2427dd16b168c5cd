"""Out of memory in words: where, how much was asked for, what fills the memory, what the plan expected, what helps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from memfit.capture import BEFORE_STEP, NO_INDEX, Category, Phase, Trace
from memfit.errors import MemfitError
from memfit.memory import Timeline
from memfit.paths import MODEL_LABEL, module_label
from memfit.plans import Plan
from memfit.recovery.meter import Limit
from memfit.torch_private.distributed_tensors import local_tensor
from memfit.torch_private.storages import storage_key
from memfit.units import display_bytes
from memfit.verify import FailedAt

REST = "activations and temporaries"
_SHOWN = 5
_MADE = (Category.ACTIVATION, Category.TEMPORARY, Category.INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a plan expects at the op where the step failed, or at the plan's peak where that op is not known."""

    at_failure: bool
    op: str
    total_bytes: int
    by_category: Mapping[Category, int]
    by_module: Mapping[str, int]
    largest: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a step did not fit. `by_category` and `by_module` are counted at the failure, where they can be.

    What is none of what can be found by name is counted as one: activations and temporaries. `uncounted` is what no
    figure has.
    """

    at: FailedAt
    asked_bytes: int | None
    limit: Limit | None
    total_bytes: int | None
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    uncounted: tuple[str, ...]
    expected: Expected
    budget_bytes: int
    planned_peak_bytes: int
    inputs: tuple[str, ...]
    levers: tuple[str, ...]
    history: tuple[str, ...]
    rank: int | None = None
    """The rank that it is about, of several."""
    copies_bytes: int = 0
    """What the guard itself held to take the step back."""

    def __str__(self) -> str:
        lines = [self._headline()]
        if self.at.source:
            lines.append(f"  at {self.at.source}")
        lines += self._filled()
        lines += self._planned()
        if self.inputs:
            lines.append("the inputs are not those of the plan:")
            lines += [f"  {each}" for each in self.inputs]
        if self.history:
            lines.append("what was done:")
            lines += [f"  {each}" for each in self.history]
        lines.append("what would help:")
        lines += [f"  {each}" for each in self.levers]
        return "\n".join(lines)

    def _headline(self) -> str:
        asked = "an allocation" if self.asked_bytes is None else f"an allocation of {display_bytes(self.asked_bytes)}"
        who = "" if self.rank is None else f" on rank {self.rank}"
        return f"out of memory{who}: {asked} failed {describe_place(self.at)}{self._op()}"

    def _op(self) -> str:
        return f", by all appearances in {self.expected.op}" if self.expected.at_failure and self.expected.op else ""

    def _filled(self) -> list[str]:
        whole = "" if self.total_bytes is None else f", about {display_bytes(self.total_bytes)}"
        lines = [f"what filled the memory{whole}:", f"  {_list(self.by_category)}"]
        if self.uncounted:
            lines.append(f"  not counted here: {'; '.join(self.uncounted)}")
        if self.copies_bytes:
            lines.append(
                f"  beside these the guard's copies, to take the step back: {display_bytes(self.copies_bytes)}"
            )
        if self.by_module:
            lines.append(f"  of these by module, without activations: {_list(self.by_module)}")
        if self.limit is not None:
            lines.append(f"  {self.limit}")
        return lines

    def _planned(self) -> list[str]:
        found = self.expected
        where = "there, this allocation included" if found.at_failure else "at the highest point of the step"
        lines = [
            f"what the plan expected {where}: {display_bytes(found.total_bytes)} "
            f"(its peak is {display_bytes(self.planned_peak_bytes)}, its budget {display_bytes(self.budget_bytes)})"
        ]
        if found.by_category:
            lines.append(f"  {_list({category.value: size for category, size in found.by_category.items()})}")
        if found.by_module:
            lines.append(f"  by module: {_list(found.by_module)}")
        if found.largest:
            lines.append("  largest: " + ", ".join(f"{name} {display_bytes(size)}" for name, size in found.largest))
        return lines


def describe_place(at: FailedAt) -> str:
    """Return where a step failed, in words."""
    if at.phase is None:
        return "outside the training step"
    if at.second_run_of is not None:
        inside = f", in {at.module}" if at.module else ""
        return f"in backward, in the second run of {module_label(at.second_run_of)}{inside}"
    inside = "" if at.module is None else f", in {module_label(at.module)}"
    return (
        f"in the {at.phase.value}{inside}"
        if at.phase in (Phase.LOSS, Phase.OPTIMIZER)
        else f"in {at.phase.value}{inside}"
    )


def find_expected(
    plan: Plan, timeline: Timeline | None, at: FailedAt, asked_bytes: int | None, graded: frozenset[str]
) -> Expected:
    """Return what the plan expected where a step failed; `graded` are the parameters that have gradients.

    Without a timeline it is the plan's peak.
    """
    assert plan.predicted is not None
    if timeline is None:
        return Expected(
            at_failure=False,
            op=plan.predicted.peak_at.name,
            total_bytes=plan.predicted.peak_bytes,
            by_category=plan.predicted.peak_by_category,
            by_module={},
            largest=(),
        )
    found = _instant(timeline, at, asked_bytes, graded)
    instant = timeline.peak_instant if found is None else found
    op = int(timeline.op[instant])
    module = timeline.module_of(instant)
    name = timeline.trace.ops[op].name if op < len(timeline.trace.ops) else ""
    return Expected(
        at_failure=found is not None,
        op=f"{name} of {module}" if module and name else name,
        total_bytes=int(timeline.during_bytes[instant]),
        by_category=timeline.by_category_during(instant),
        by_module=_planned_modules(timeline, instant),
        largest=tuple(
            (
                f"{each.name or each.category.value} ({each.category.value}, {module_label(each.module)})",
                each.size_bytes,
            )
            for each in timeline.largest_at(instant, 3)
        ),
    )


def count_tensors(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    input_bytes: int = 0,
    total_bytes: int | None = None,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return what is there now by category, and what outlives a step by module."""
    by_category: dict[str, int] = defaultdict(int)
    by_module: dict[str, int] = defaultdict(int)
    seen: set[int] = set()

    def add(category: Category, path: str, tensor: torch.Tensor | None) -> None:
        tensor = None if tensor is None else local_tensor(tensor)
        if tensor is None or tensor.layout is not torch.strided or storage_key(tensor) in seen:
            return
        seen.add(storage_key(tensor))
        by_category[category.value] += tensor.untyped_storage().nbytes()
        by_module[part_of(path)] += tensor.untyped_storage().nbytes()

    states = [optimizer.state for optimizer in optimizers]
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            add(Category.PARAMETER, path, parameter)
            add(Category.GRADIENT, path, parameter.grad)
            for values in (state.get(parameter) for state in states):
                for value in values.values() if isinstance(values, dict) else ():
                    if isinstance(value, torch.Tensor):
                        add(Category.OPTIMIZER_STATE, path, value)
        for buffer in module.buffers(recurse=False):
            add(Category.BUFFER, path, buffer)
    if input_bytes:
        by_category[Category.INPUT.value] = input_bytes
    rest = None if total_bytes is None else total_bytes - sum(by_category.values())
    if rest is not None and rest > 0:
        by_category[REST] = rest
    return dict(by_category), dict(by_module)


def find_levers(
    plan: Plan, found: Expected, at: FailedAt, inputs: Sequence[str], *, replans: bool, least: bool
) -> tuple[str, ...]:
    """Return what would help, what costs nothing first, then most bytes first; nothing is below the `least` plan."""
    sizes = found.by_category
    first = []
    if inputs:
        first.append("plan the step for these inputs, or bring them back to the planned shapes")
    if not replans:
        first.append("give guard step= and optimizer=, and run steps with guard.step: it then plans tighter by itself")
    elif at.phase is not Phase.OPTIMIZER and not least:
        first.append("a lower budget: memfit.plan(..., budget=...)")
    if plan.trace.device_type == "cuda":
        first.append("PYTORCH_ALLOC_CONF=expandable_segments:True, if much is reserved and not allocated")
    states = sum(sizes.get(each, 0) for each in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE))
    ranked = [
        (sizes.get(Category.OPTIMIZER_STATE, 0), "keep the optimizer's state on the host"),
        (states // 2, f"shard parameters, gradients and optimizer state over {_more_ranks(plan)} ranks"),
    ]
    if at.phase is Phase.OPTIMIZER:
        ranked.append((sizes.get(Category.TEMPORARY, 0), "a fused optimizer (fused=True), or foreach=False"))
    else:
        batch = sum(sizes.get(each, 0) for each in _MADE)
        ranked.append((batch // 2, "halve the micro-batch and accumulate two of them"))
    ranked = sorted((each for each in ranked if each[0] > 0), key=lambda each: -each[0])
    return (*first, *(f"{how}: about {display_bytes(size)} there" for size, how in ranked))


def _more_ranks(plan: Plan) -> str:
    return "two" if plan.shard is None else f"{2 * plan.shard.ranks}, not {plan.shard.ranks},"


def part_of(path: str) -> str:
    """Return the part of a model that a module belongs to: `layers.3.mlp.up` belongs to `layers.3`."""
    parts = path.split(".")
    for index, each in enumerate(parts):
        if each.isdecimal():
            return ".".join(parts[: index + 1])
    return module_label(parts[0])


def _planned_modules(timeline: Timeline, instant: int) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for number in timeline.alive_at(instant).tolist():
        each = timeline.allocation(number)
        outside = "outside the model" if each.category is Category.INPUT else MODEL_LABEL
        found[part_of(each.module) if each.module else outside] += each.size_bytes
    return dict(found)


def _instant(timeline: Timeline, at: FailedAt, asked_bytes: int | None, graded: frozenset[str]) -> int | None:
    """Return the instant that allocates this size where the step failed; the highest there when none does."""
    instants = _candidates(timeline, at, graded)
    if not len(instants):
        return None
    table = timeline.allocations
    making = np.unique(table.alloc_at[table.size_bytes == (asked_bytes or -1)])
    fitting = instants[np.isin(instants, making)]
    if len(fitting):
        return int(fitting[0])
    return int(instants[timeline.during_bytes[instants].argmax()])


def _candidates(timeline: Timeline, at: FailedAt, graded: frozenset[str]) -> np.ndarray:
    trace = timeline.trace
    if at.second_run_of is not None:
        for number, unit in enumerate(timeline.units):
            if unit.name == at.second_run_of:
                again = timeline.recompute_instants(number)
                inside = _of_module(trace, timeline.op[again], at.module)
                return again[inside] if inside.any() else again
    if at.phase is None:
        return np.empty(0, np.int64)
    step = timeline.step_instants[:-1]
    ops = timeline.op[step]
    right = np.fromiter((trace.ops[op].phase is at.phase for op in ops), bool, len(ops))
    if at.phase is Phase.BACKWARD and at.module is None:
        first, last = _between_gradients(trace, graded)
        right &= (ops > first) & (ops <= last)
    elif at.module is not None:
        inside = right & _of_module(trace, ops, at.module)
        right = inside if inside.any() else right
    return step[right]


def _of_module(trace: Trace, ops: Iterable[int], module: str | None) -> np.ndarray:
    """Return a mask of the ops that run in a module or inside it."""

    def within(op: int) -> bool:
        call = trace.ops[op].call if op < len(trace.ops) else NO_INDEX
        path = trace.calls[call].module if call != NO_INDEX else None
        return path is not None and (not module or path == module or path.startswith(f"{module}."))

    return np.array([within(int(op)) for op in ops], bool)


def _between_gradients(trace: Trace, graded: frozenset[str]) -> tuple[int, int]:
    """Return the range of ops after the gradients that are there and before those that are not."""
    first, last = BEFORE_STEP, len(trace.ops)
    for each in trace.parameters:
        if each.gradient == NO_INDEX:
            continue
        alloc_at = trace.storages[each.gradient].alloc_at
        if not graded.isdisjoint(each.names):
            first = max(first, alloc_at)
        elif alloc_at != BEFORE_STEP:
            last = min(last, alloc_at)
    return (first, last) if first < last else (BEFORE_STEP, len(trace.ops))


def _list(sizes: Mapping[str, int]) -> str:
    ordered = sorted(sizes.items(), key=lambda each: -each[1])
    shown = [f"{name} {display_bytes(size)}" for name, size in ordered[:_SHOWN]]
    more = sum(size for _, size in ordered[_SHOWN:])
    return ", ".join(shown) + (f", others {display_bytes(more)}" if more else "")


class OutOfMemory(MemfitError, RuntimeError):
    """A training step did not fit; `explanation` says why, and `__cause__` is the allocator's error.

    `restored` says whether parameters, optimizer state, gradients, buffers and generators are as before the step.
    """

    def __init__(self, explanation: Explanation, *, restored: bool) -> None:
        super().__init__(explanation)
        self.explanation = explanation
        self.restored = restored

    def __str__(self) -> str:
        return str(self.explanation)
