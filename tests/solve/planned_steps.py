"""Small steps with units one after another, made by hand or at random, for tests of memory under a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from memfit.capture import (
    AFTER_STEP,
    BEFORE_STEP,
    NO_INDEX,
    Category,
    Op,
    Phase,
    Storage,
    TensorRef,
    Trace,
    check_trace,
)
from memfit.capture.trace_types import SCHEMA
from memfit.hardware import load_device
from memfit.tradeoff import Policy, Unit
from memfit.tradeoff.columns import TraceColumns
from memfit.tradeoff.policy import UnitColumns, build_policy


def ref(storage: int) -> TensorRef:
    return TensorRef(storage=storage, shape=(1,), stride=(1,), offset=0, dtype="float32")


def op(phase: Phase, reads: Any = (), makes: Any = (), *, workspace: int = 0, view: bool = False) -> Op:
    return Op(
        name="aten.op.default",
        phase=phase,
        call=NO_INDEX,
        inputs=tuple(map(ref, reads)),
        outputs=tuple(map(ref, makes)),
        arguments="[[],{}]",
        flops=0,
        read_bytes=0,
        written_bytes=0,
        workspace_bytes=workspace,
        view=view,
        random=False,
        saved=False,
        mutates=(),
        mutated_op=NO_INDEX,
        forward_op=NO_INDEX,
        source=0,
    )


def storage(
    n_bytes: int,
    alloc_at: int,
    free_after: int,
    saved_by: Any = (),
    category: Category = Category.ACTIVATION,
    released: int | None = None,
) -> Storage:
    """What autograd saves is let go by all others after the last op that saves it, unless said otherwise."""
    if released is None:
        released = max(saved_by) if saved_by else free_after
    return Storage(
        bytes=n_bytes,
        category=category,
        alloc_at=alloc_at,
        free_after=free_after,
        released=released,
        call=NO_INDEX,
        module="",
        name="",
        saved_by=tuple(saved_by),
    )


def unit(name: str, begin: int, end: int, backward_begin: int, backward_end: int) -> Unit:
    return Unit(
        name=name,
        module=name,
        kind="Kind",
        call=NO_INDEX,
        begin=begin,
        end=end,
        backward_begin=backward_begin,
        backward_end=backward_end,
    )


def make(ops: Any, storages: Any, device: str = "cpu") -> Trace:
    made = Trace(
        schema=SCHEMA,
        memfit="0",
        torch="0",
        device=device,
        device_type="cpu" if device == "cpu" else "cuda",
        hardware=load_device(device),
        threads=1,
        autocast=None,
        optimizer="",
        ops=tuple(ops),
        storages=tuple(storages),
        calls=(),
        modules=(),
        parameters=(),
        sources=("",),
        notes=(),
    )
    check_trace(made)
    return made


def facts_of(trace: Trace) -> TraceColumns:
    return TraceColumns.of(trace, np.ones(len(trace.ops)))


@dataclass
class Draft:
    size: int
    alloc_at: int
    home: int
    users: list[int] = field(default_factory=list)


@st.composite
def planned_steps(draw: st.DrawFn) -> tuple[TraceColumns, list[tuple[Unit, Policy]]]:
    """A step of up to four units, each checkpointed with any policy or not at all.

    Forward: units with ops between them, then one op at least. Backward: each unit's, last one first, one op between
    them. Storages are read within their unit and outside, saved or not, and go at any time after their last use.
    """
    spans, at = [], 0
    for _ in range(draw(st.integers(1, 4))):
        begin = at + draw(st.integers(0, 2))
        at = begin + draw(st.integers(1, 5))
        spans.append((begin, at))
    forward = at + draw(st.integers(1, 2))
    length = draw(st.integers(1, 3))
    total = forward + (length + 1) * len(spans) + 2
    units = []
    for place, (begin, end) in enumerate(reversed(spans)):
        first = forward + 1 + place * (length + 1)
        units.append(unit(f"unit{begin}", begin, end, first, first + length))
    drafts = [Draft(draw(st.integers(1, 9)), BEFORE_STEP, NO_INDEX)]
    ops = []
    for index in range(forward):
        home = next((number for number, (begin, end) in enumerate(spans) if begin <= index < end), NO_INDEX)
        known = range(max(0, len(drafts) - 6), len(drafts))
        reads = draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
        view = bool(reads) and draw(st.integers(0, 7)) == 0
        makes = [reads[0]] if view else list(range(len(drafts), len(drafts) + draw(st.integers(0, 2))))
        drafts += [Draft(draw(st.integers(0, 20)), index, home) for number in makes if number >= len(drafts)]
        for number in (*reads, *makes):
            drafts[number].users.append(index)
        workspace = 0 if view else draw(st.sampled_from((0, 0, 13)))
        ops.append(op(Phase.FORWARD, reads, makes, workspace=workspace, view=view))
    ops += [op(Phase.BACKWARD, workspace=draw(st.sampled_from((0, 5)))) for _ in range(total - forward - 1)]
    ops.append(op(Phase.OPTIMIZER))
    storages = [_fate(draw, each, ops, units[::-1], forward, total) for each in drafts]
    trace_columns = facts_of(make(ops, storages))
    chosen = []
    for each in units:
        problem = UnitColumns.of(trace_columns, each)
        groups = st.integers(0, max(0, problem.groups - 1))
        policy = build_policy(problem, saving(problem, draw(st.lists(groups, max_size=3))))
        if policy.stop >= 0 and draw(st.integers(0, 4)):
            chosen.append((each, policy))
    return trace_columns, chosen


def saving(problem: UnitColumns, groups: Any) -> np.ndarray:
    """The flags of what is dropped when these groups are saved."""
    dropped = np.ones(problem.groups, bool)
    if problem.groups:
        dropped[list(groups)] = False
    return dropped


def policy_saving(trace_columns: TraceColumns, each: Unit, *ops: int) -> Policy:
    """The policy of a unit that saves these of its ops and drops all else; without views, ops are groups."""
    problem = UnitColumns.of(trace_columns, each)
    return build_policy(problem, saving(problem, ops))


def _fate(draw: st.DrawFn, each: Draft, ops: list[Op], units: list[Unit], forward: int, total: int) -> Storage:
    last = max([*each.users, each.alloc_at, 0])
    savers = [index for index in each.users if not ops[index].view]
    fate = draw(st.sampled_from(("dies", "soon", "own", "own", "own", "saved", "stays")))
    if fate == "soon":
        return storage(each.size, each.alloc_at, last)
    if fate == "dies" or not savers:
        return storage(each.size, each.alloc_at, draw(st.integers(last, total - 1)))
    if fate == "stays":
        return storage(each.size, each.alloc_at, AFTER_STEP)
    saved_by = sorted(set(draw(st.lists(st.sampled_from(savers), min_size=1, max_size=2))))
    if fate == "own" and each.home != NO_INDEX:
        home = units[each.home]
        saved_by = [index for index in saved_by if home.begin <= index < home.end] or [each.alloc_at]
        free_after = draw(st.integers(home.backward_begin, home.backward_end - 1))
    else:
        free_after = draw(st.integers(forward, total - 1))
    most = draw(
        st.sampled_from((last, max(last, units[each.home].end - 1) if each.home != NO_INDEX else last, free_after))
    )
    return storage(each.size, each.alloc_at, free_after, saved_by, released=draw(st.integers(last, max(last, most))))
