"""`sac_milp`: the prototype's choice of what to checkpoint, solved to gap 0.

The prototype (`torch.distributed._tools.sac_ilp`) decides for every module i that is no leaf whether it is
checkpointed, y_i, and which share r_i of its activations is then discarded. With ACM_i the bytes of all its results,
IA_i <= ACM_i the bytes that autograd keeps of them and ACT_i the time to recompute everything, its rules are

1. Discard: the bytes freed are d_i = ACM_i r_i - (ACM_i - IA_i) y_i, and 0 <= d_i, r_i <= y_i.
2. Time: rct_i = ACT_i max(0, slope r_i + intercept over the lines of the fit) if y_i = 1, else 0.
3. Nesting: of a module and what lies around it at most one is checkpointed.
4. Memory: with TA_i the activations at the end of i's forward and AG_i what i's backward adds,
   a_i = TA_i + AG_i - (sum of d_j over the modules j before i in forward post-order) is not negative, and
   a_i + (parameters + TG_i) / world_size is at most the budget, TG_i being the gradients at i's backward.

The least sum of rct_i is sought. One method of `_Model` writes each family (Note [Equal, and small]).

Note [Equal, and small]: d_i takes the place of r_i, so 1 is d_i <= IA_i y_i. In 2 the intercept is multiplied with
y_i: for y_i = 1 it is the line and for y_i = 0 it is 0, without the prototype's large constant. 3 is a row for each
path from the outermost unit to one that has no unit inside. In 4 every module asks for a sum along one and the same
order, so the sums are variables and the modules are their bounds. Rows grow with the number of modules, not with its
square. A unit without kept bytes frees nothing and is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from memfit.compat.graph import Graph, is_submodule
from memfit.errors import InputError
from memfit.solve import Limits, Milp, Solution, SolverError, Status
from memfit.text import close_names, did_you_mean
from memfit.units import GiB

LIMITS = Limits(gap=0.0, time_limit_s=180.0)
"""The prototype's time limit, without its gap of 5 %."""


class ModuleGraph(Protocol):
    """A graph of memfit or of PyTorch's `ilp_utils`; only its nodes are read, and not changed."""

    nodes: list[Any]


class _Answer(NamedTuple):
    ac_decisions: dict[str, float]
    recomputation_time: float
    peak_mem: int


class SACSolution(_Answer):
    """The prototype's three values: share to discard by module, recompute milliseconds, peak bytes.

    Without an answer they are `({}, 0, -1)`, and `status` says why. `gap` is 0 for a proven answer and infinite
    without one; `seconds`, `rows` and `columns` are those of the solve.
    """

    status: Status
    gap: float
    seconds: float
    rows: int
    columns: int

    def __new__(
        cls,
        ac_decisions: dict[str, float],
        recomputation_time: float,
        peak_mem: int,
        *,
        status: Status = Status.UNKNOWN,
        gap: float = math.inf,
        seconds: float = 0.0,
        rows: int = 0,
        columns: int = 0,
    ) -> SACSolution:
        self = super().__new__(cls, ac_decisions, recomputation_time, peak_mem)
        self.status, self.gap, self.seconds, self.rows, self.columns = status, gap, seconds, rows, columns
        return self


def sac_milp(
    graph: ModuleGraph,
    memory_budget: float,
    world_size: int = 1,
    ac_units: list[str] | None = None,
    fsdp_units: list[str] | None = None,
) -> SACSolution:
    """Choose modules to checkpoint and how much of each to discard: the least recompute time under a budget in GiB.

    Parameters and gradients are divided by `world_size`. Only modules in `ac_units` are checkpointed if any are given,
    and none that contains one of `fsdp_units`. The budget counts in whole bytes; time and shares are not rounded.
    """
    _check(memory_budget, world_size)
    tree = _tree(graph)
    units = _units(tree, _known(tree, ac_units, "ac_units"), _known(tree, fsdp_units, "fsdp_units"))
    steps = _steps(tree, units, float(np.floor(memory_budget * GiB)), world_size)
    if any(step.needed_bytes > step.there_bytes for step in steps) or steps[0].needed_bytes > 0:
        return SACSolution({}, 0, -1, status=Status.INFEASIBLE)
    if all(step.needed_bytes <= 0 for step in steps):
        return SACSolution({}, 0.0, _peak_bytes(steps, ()), status=Status.OPTIMAL, gap=0.0)
    model = _Model(units=units, steps=steps)
    model.discard()
    model.time()
    model.nesting(_paths(tree, units))
    model.memory()
    return model.answer(model.milp.solve(LIMITS))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A module that may be checkpointed: IA, ACM and ACT of the module docstring, and the lines of its fit."""

    name: str
    index: int
    place: int
    kept_bytes: int
    all_bytes: int
    all_ms: float
    lines: tuple[tuple[float, float], ...]

    def share(self, freed_bytes: float) -> float:
        return min(1.0, (freed_bytes + (self.all_bytes - self.kept_bytes)) / self.all_bytes)

    def recompute_ms(self, share: float) -> float:
        return self.all_ms * max([0.0, *(slope * share + intercept for slope, intercept in self.lines)])


@dataclass(slots=True, kw_only=True)
class _Step:
    """The modules between one unit and the next in forward post-order: what the units before them free together.

    They must free at least `needed_bytes`, they cannot free more than `there_bytes`, and `level_bytes` is the most
    memory of these modules when nothing is freed.
    """

    level_bytes: float = 0.0
    needed_bytes: float = 0.0
    there_bytes: float = math.inf


def _check(memory_budget: float, world_size: int) -> None:
    if not memory_budget >= 0:
        raise InputError(f"memory_budget is {memory_budget!r}; give GiB that are 0 or more")
    if world_size < 1:
        raise InputError(f"world_size is {world_size!r}; give the number of ranks, 1 or more")


def _tree(graph: ModuleGraph) -> Graph:
    """Rebuild the graph with nesting by the parts of names; PyTorch's matrix compares names as text."""
    if not graph.nodes:
        raise InputError("the graph has no modules; make it with parse_module_info")
    if isinstance(graph, Graph):
        return graph
    tree = Graph()
    for node in graph.nodes:
        tree.add_node(node)
    return tree


def _known(tree: Graph, names: Collection[str] | None, what: str) -> Collection[str]:
    if not names:
        return ()
    if isinstance(names, str):
        raise InputError(f"{what} is the text {names!r}; give a list of module names")
    for name in names:
        if name not in tree.name2node:
            near = map(repr, close_names(name, tree.name2node, most=3, cutoff=0.5))
            choice = did_you_mean(near, f"it has {_some(tree.name2node)}")
            raise InputError(f"{what} has {name!r}, which is no module of the graph; {choice}")
    return set(names)


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(map(repr, shown[:3])) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _units(tree: Graph, ac_units: Collection[str], fsdp_units: Collection[str]) -> list[_Unit]:
    """Return the units in forward post-order."""
    units = []
    for index, node in enumerate(tree.nodes):
        name, kept_bytes = node["fqn"], node["act_fw_per_module"]
        if node["is_leaf"] or kept_bytes <= 0 or (ac_units and name not in ac_units):
            continue
        if any(is_submodule(unit, name) for unit in fsdp_units):
            continue
        count = node["n_segments"]
        units.append(
            _Unit(
                name=name,
                index=index,
                place=node["pos_fw_post_order"],
                kept_bytes=kept_bytes,
                all_bytes=max(kept_bytes, node["sac_memory"]),
                all_ms=float(node["sac_runtime"]),
                lines=tuple(
                    (float(slope), float(intercept))
                    for slope, intercept in zip(node["slopes"][:count], node["intercepts"][:count], strict=True)
                ),
            )
        )
    return sorted(units, key=lambda unit: unit.place)


def _steps(tree: Graph, units: Sequence[_Unit], budget_bytes: float, world_size: int) -> list[_Step]:
    """Return the moments before the first unit and after each; modules without backward ops are none."""
    parameter_bytes = sum(node["param_per_module"] for node in tree.roots)
    steps = [_Step() for _ in range(len(units) + 1)]
    passed = 0
    for node in sorted(tree.nodes, key=lambda node: node["pos_fw_post_order"]):
        while passed < len(units) and units[passed].place < node["pos_fw_post_order"]:
            passed += 1
        step, there_bytes = steps[passed], node["act_total"] + node["act_grad_per_module"]
        if there_bytes or node["grad_total"]:
            step.there_bytes = min(step.there_bytes, there_bytes)
        level_bytes = there_bytes + (parameter_bytes + node["grad_total"]) / world_size
        step.level_bytes = max(step.level_bytes, level_bytes)
        step.needed_bytes = max(step.needed_bytes, level_bytes - budget_bytes)
    return steps


def _paths(tree: Graph, units: Sequence[_Unit]) -> list[list[int]]:
    """Return, for each innermost unit, its place and those of the units around it."""
    number = {unit.index: i for i, unit in enumerate(units)}
    around: list[list[int]] = [[i] for i in range(len(units))]
    innermost = [True] * len(units)
    for i, unit in enumerate(units):
        for inner in tree.ad_matrix.descendants(unit.index):
            if inner in number:
                around[number[inner]].append(i)
                innermost[i] = False
    return [path for path, last in zip(around, innermost, strict=True) if last]


@dataclass(slots=True, kw_only=True)
class _Model:
    """The rules of the module docstring as rows, scaled so that the solver's tolerances are parts of a byte."""

    units: Sequence[_Unit]
    steps: Sequence[_Step]
    milp: Milp = field(default_factory=Milp)
    chosen: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    bytes_scale: float = 1.0
    ms_scale: float = 1.0

    def __post_init__(self) -> None:
        self.bytes_scale = max(step.level_bytes for step in self.steps) / 1000 or 1.0
        self.ms_scale = max(unit.all_ms for unit in self.units) / 1000 or 1.0

    def discard(self) -> None:
        """Family 1: a unit frees at most what autograd keeps, and only if it is checkpointed."""
        for unit in self.units:
            kept = unit.kept_bytes / self.bytes_scale
            chosen = self.milp.variable()
            freed = self.milp.variable(upper=kept, integer=False)
            self.milp.row([(freed, 1.0), (chosen, -kept)], upper=0.0)
            self.chosen.append(chosen)
            self.freed.append(freed)

    def time(self) -> None:
        """Family 2: the time of a unit lies above each of its lines."""
        for unit, chosen, freed in zip(self.units, self.chosen, self.freed, strict=True):
            spent = self.milp.variable(cost=1.0, upper=math.inf, integer=False)
            ms = unit.all_ms / self.ms_scale
            base = unit.share(0.0)
            for slope, intercept in unit.lines:
                by_byte = ms * slope * self.bytes_scale / unit.all_bytes
                terms = [(spent, 1.0), (freed, -by_byte), (chosen, -ms * (slope * base + intercept))]
                self.milp.row(terms, lower=0.0)

    def nesting(self, paths: Iterable[Sequence[int]]) -> None:
        """Family 3: at most one unit of a path from a module outwards."""
        for path in paths:
            if len(path) > 1:
                self.milp.row([(self.chosen[unit], 1.0) for unit in path], upper=1.0)

    def memory(self) -> None:
        """Family 4: what the units up to each of them free together, between what is needed and what is there."""
        before: int | None = None
        for freed, step in zip(self.freed, self.steps[1:], strict=True):
            lower, upper = step.needed_bytes / self.bytes_scale, step.there_bytes / self.bytes_scale
            total = self.milp.variable(lower=lower, upper=upper, integer=False)
            terms = [(total, 1.0), (freed, -1.0)]
            self.milp.row(terms if before is None else [*terms, (before, -1.0)], lower=0.0, upper=0.0)
            before = total

    def answer(self, solution: Solution) -> SACSolution:
        """Return the values that were found, in bytes and milliseconds."""
        size = {"seconds": solution.seconds, "rows": solution.rows, "columns": solution.columns}
        if not solution.values:
            return SACSolution({}, 0, -1, status=solution.status, **size)
        freed = [
            min(unit.kept_bytes, max(0.0, solution.values[freed] * self.bytes_scale))
            if solution.values[chosen] > 0.5
            else None
            for unit, chosen, freed in zip(self.units, self.chosen, self.freed, strict=True)
        ]
        _fill(self.units, self.steps, freed)
        taken = [(unit, unit.share(each)) for unit, each in zip(self.units, freed, strict=True) if each is not None]
        return SACSolution(
            {unit.name: share for unit, share in sorted(taken, key=lambda each: each[0].index)},
            math.fsum(unit.recompute_ms(share) for unit, share in taken),
            _peak_bytes(self.steps, [each or 0.0 for each in freed]),
            status=solution.status,
            gap=0.0 if solution.status is Status.OPTIMAL else solution.gap,
            **size,
        )


def _fill(units: Sequence[_Unit], steps: Sequence[_Step], freed: list[float | None]) -> None:
    """Free the parts of a byte that the solver's tolerance left out, from the latest chosen units that have some."""
    total = 0.0
    for i, step in enumerate(steps[1:]):
        total += freed[i] or 0.0
        for j in range(i, -1, -1):
            missing, now = step.needed_bytes - total, freed[j]
            if missing <= 0:
                break
            if now is not None:
                more = min(missing, units[j].kept_bytes - now)
                freed[j] = now + more
                total += more


def _peak_bytes(steps: Sequence[_Step], freed: Sequence[float]) -> int:
    """Return the highest level in whole bytes; what floats lose in 100 GiB is far below the part taken off."""
    freed_before = [0.0, *itertools.accumulate(freed)] if freed else [0.0] * len(steps)
    return math.ceil(max(step.level_bytes - before for step, before in zip(steps, freed_before, strict=True)) - 1e-3)


# -- `get_optimal_checkpointing_policy_per_module`: which ops of one module to save, exactly --------------------------
#
# Ops that share a fate form a group: an in-place op and its parent, and all random ops unless each of them must be
# saved. A group is saved, recomputed, or free to choose; among the free ones the most run time is to be saved within
# the bytes allowed, a knapsack. Groups of equal bytes and equal time, as equal layers have them, are one variable
# that counts them.


POLICY_LIMITS = Limits(gap=0.0, time_limit_s=60.0)


class SACDecision(IntEnum):
    """What selective checkpointing does with an op's result."""

    RECOMPUTE = 0
    SAVE = 1


class ModuleStats(Protocol):
    """What is read of memfit's or PyTorch's `SACStats`."""

    runtimes: list[float]
    memory: list[int]
    view_like_ops: list[int]
    rand_ops: list[int]
    inplace_ops: list[tuple[int, int]]
    force_store_random: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    ops: tuple[int, ...]
    total_bytes: int
    total_ms: float


def get_optimal_checkpointing_policy_per_module(sac_stats: ModuleStats, memory_budget: float) -> list[int]:
    """Choose for each op of a module 1 (save) or 0 (recompute), so that the saved ones have the most run time.

    The budget is a share, 0 to 1, of the bytes of all ops. The list is empty, as the prototype's, when the ops that
    must be saved are above it or one of them is a view. Of equal groups the earliest are saved; an op without run
    time is saved only if it must be.
    """
    if not 0 <= memory_budget <= 1:
        raise InputError(f"memory_budget is {memory_budget!r}; give a share of the module's bytes from 0 to 1")
    saved = _forced(sac_stats)
    recomputed = set(sac_stats.view_like_ops)
    groups = _groups(sac_stats)
    must = [group for group in groups if saved.intersection(group.ops)]
    if any(recomputed.intersection(group.ops) for group in must):
        return []
    left_bytes = math.ceil(memory_budget * sum(sac_stats.memory)) - sum(group.total_bytes for group in must)
    if left_bytes < 0:
        return []
    free = [group for group in groups if not (saved | recomputed).intersection(group.ops) and group.total_ms > 0]
    decisions = [SACDecision.RECOMPUTE.value] * len(sac_stats.memory)
    for group in [*must, *_knapsack(free, left_bytes)]:
        for op in group.ops:
            decisions[op] = SACDecision.SAVE.value
    return decisions


def _forced(stats: ModuleStats) -> set[int]:
    """Return random ops that cannot be replayed, and ops that write to what is not the module's own."""
    saved = {op for op, parent in stats.inplace_ops if op == parent}
    return saved.union(stats.rand_ops) if stats.force_store_random else saved


def _groups(stats: ModuleStats) -> list[_Group]:
    """Return the groups of ops in the order of each group's first op."""
    head = list(range(len(stats.memory)))

    def find(op: int) -> int:
        while head[op] != op:
            op = head[op]
        return op

    together = [] if stats.force_store_random else [(op, stats.rand_ops[0]) for op in stats.rand_ops]
    for op, other in (*stats.inplace_ops, *together):
        first, second = sorted((find(op), find(other)))
        head[second] = first
    members: dict[int, list[int]] = {}
    for op in range(len(stats.memory)):
        members.setdefault(find(op), []).append(op)
    return [
        _Group(
            ops=tuple(ops),
            total_bytes=sum(stats.memory[op] for op in ops),
            total_ms=math.fsum(stats.runtimes[op] for op in ops),
        )
        for ops in members.values()
    ]


def _knapsack(groups: Iterable[_Group], left_bytes: int) -> list[_Group]:
    """Pick the groups of most time whose bytes fit into those left; groups without bytes are always picked."""
    taken: list[_Group] = []
    equal: dict[tuple[int, float], list[_Group]] = {}
    for group in groups:
        if group.total_bytes == 0:
            taken.append(group)
        elif group.total_bytes <= left_bytes:
            equal.setdefault((group.total_bytes, group.total_ms), []).append(group)
    if sum(size * len(alike) for (size, _), alike in equal.items()) <= left_bytes:
        return [*taken, *(group for alike in equal.values() for group in alike)]
    unit_bytes = math.gcd(*(size for size, _ in equal))
    longest_ms = max(ms for _, ms in equal)
    milp = Milp()
    counts = [milp.variable(cost=-ms / longest_ms, upper=len(alike)) for (_, ms), alike in equal.items()]
    sizes = [size // unit_bytes for size, _ in equal]
    milp.row(zip(counts, sizes, strict=True), upper=left_bytes // unit_bytes)
    solution = milp.solve(POLICY_LIMITS)
    if solution.status is not Status.OPTIMAL:
        raise SolverError(
            f"the best of {len(counts)} kinds of ops was not proven in {POLICY_LIMITS.time_limit_s:g} s; "
            "decide on the modules inside this one instead"
        )
    numbers = [round(solution.values[count]) for count in counts]
    if sum(size * number for size, number in zip(sizes, numbers, strict=True)) > left_bytes // unit_bytes:
        raise SolverError("HiGHS gave an answer above the bytes allowed; please report the module")
    return [*taken, *(group for alike, number in zip(equal.values(), numbers, strict=True) for group in alike[:number])]
