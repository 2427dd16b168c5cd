"""Random units inside random traces, with every kind of constraint a unit may have."""

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
    ModuleCall,
    Op,
    Phase,
    Storage,
    TensorRef,
    Trace,
    check_trace,
)
from memfit.capture.trace_types import SCHEMA
from memfit.hardware import load_device
from memfit.tradeoff import Unit

SIZES = (0, 1, 2, 3, 4, 4, 8, 8, 16, 33)
TIMES = (0.0, 0.0, 0.125, 0.25, 0.25, 0.5, 1.0, 3.0)


def ref(storage: int) -> TensorRef:
    return TensorRef(storage=storage, shape=(1,), stride=(1,), offset=0, dtype="float32")


@dataclass
class OpDraft:
    phase: Phase
    reads: list[int] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    call: int = NO_INDEX
    view: bool = False
    random: bool = False
    writes: list[int] = field(default_factory=list)
    workspace: int = 0
    forward_op: int = NO_INDEX

    def op(self) -> Op:
        return Op(
            name="aten.op_.default" if self.writes else "aten.op.default",
            phase=self.phase,
            call=self.call,
            inputs=tuple(map(ref, self.reads)),
            outputs=tuple(map(ref, self.makes)),
            arguments="[[],{}]",
            flops=0,
            read_bytes=0,
            written_bytes=0,
            workspace_bytes=self.workspace,
            view=self.view,
            random=self.random,
            saved=False,
            mutates=tuple(self.writes),
            mutated_op=NO_INDEX,
            forward_op=self.forward_op,
            source=0,
        )


@dataclass
class StorageDraft:
    size: int
    alloc_at: int
    free_after: int = AFTER_STEP
    released: int | None = None
    category: Category = Category.ACTIVATION
    savers: set[int] = field(default_factory=set)

    def storage(self) -> Storage:
        return Storage(
            bytes=self.size,
            category=self.category,
            alloc_at=self.alloc_at,
            free_after=self.free_after,
            released=self.free_after if self.released is None else self.released,
            call=NO_INDEX,
            module="",
            name="",
            saved_by=tuple(sorted(self.savers)),
        )


def make_trace(ops: list[Op], storages: list[Storage], calls: list[ModuleCall], device: str = "cpu") -> Trace:
    settings: dict[str, Any] = {
        "schema": SCHEMA,
        "memfit": "0",
        "torch": "0",
        "device": device,
        "device_type": "cpu" if device == "cpu" else "cuda",
        "hardware": load_device(device),
        "threads": 1,
        "autocast": None,
        "optimizer": "",
        "modules": (),
        "parameters": (),
        "sources": ("",),
        "notes": (),
    }
    made = Trace(ops=tuple(ops), storages=tuple(storages), calls=tuple(calls), **settings)
    check_trace(made)
    return made


def call_of(module: str, begin: int, end: int, backward: tuple[int, int], parent: int = NO_INDEX) -> ModuleCall:
    return ModuleCall(
        module=module,
        kind="Kind",
        index=0,
        parent=parent,
        phase=Phase.FORWARD,
        begin=begin,
        end=end,
        backward_begin=backward[0],
        backward_end=backward[1],
    )


@st.composite
def units_in_traces(draw: st.DrawFn, most_ops: int = 10) -> tuple[Trace, Unit, np.ndarray]:
    """A trace, one unit of it and the times of its ops."""
    before, count, after = draw(st.integers(0, 2)), draw(st.integers(1, most_ops)), draw(st.integers(0, 2))
    begin, end = before, before + count
    forward = end + after
    # backward: of what comes after the unit, of the unit, of what comes before it
    backward, backward_end = forward + 2, forward + 4
    total = backward_end + 2
    storages: list[StorageDraft] = [
        StorageDraft(draw(st.sampled_from(SIZES)), BEFORE_STEP, category=category)
        for category in draw(
            st.lists(st.sampled_from((Category.PARAMETER, Category.BUFFER, Category.INPUT)), max_size=3)
        )
    ]
    ops: list[OpDraft] = []
    for index in range(forward):
        ops.append(_draw_op(draw, index, storages))
    for function in draw(st.sampled_from(((), (draw(st.integers(0, forward - 1)),)))):
        for op in ops[function : function + draw(st.integers(1, 4))]:
            op.forward_op = function
    for index in range(forward, total):
        inside = backward <= index < backward_end
        ops.append(OpDraft(Phase.BACKWARD, forward_op=draw(st.integers(begin, end - 1)) if inside else NO_INDEX))
    for number, storage in enumerate(storages):
        _draw_fate(draw, number, storage, ops, begin, end, forward, backward, backward_end)
    trace = make_trace(
        [op.op() for op in ops],
        [storage.storage() for storage in storages],
        [
            call_of("", 0, forward, (forward, total)),
            call_of("unit", begin, end, (backward, backward_end), parent=0),
        ],
    )
    unit = Unit(
        name="unit",
        module="unit",
        kind="Kind",
        call=1,
        begin=begin,
        end=end,
        backward_begin=backward,
        backward_end=backward_end,
    )
    times = np.array(draw(st.lists(st.sampled_from(TIMES), min_size=total, max_size=total)))
    return trace, unit, times


def _draw_op(draw: st.DrawFn, index: int, storages: list[StorageDraft]) -> OpDraft:
    known = range(len(storages))
    op = OpDraft(Phase.FORWARD, call=1)
    if known:
        op.reads = draw(st.lists(st.sampled_from(known), max_size=2, unique=True))
    kind = draw(st.sampled_from(("new", "new", "new", "two", "view", "write", "random", "random write", "nothing")))
    op.workspace = draw(st.sampled_from((0, 0, 5, 40)))
    op.random = kind.startswith("random")
    if kind.endswith("write") and known:
        written = draw(st.sampled_from(known))
        op.reads = list(dict.fromkeys([written, *op.reads]))
        op.writes, op.makes = [written], [written]
    elif kind == "view" and op.reads:
        op.view, op.makes, op.workspace = True, [op.reads[0]], 0
    elif kind != "nothing":
        for _ in range(2 if kind == "two" else 1):
            op.makes.append(len(storages))
            storages.append(StorageDraft(draw(st.sampled_from(SIZES)), index))
    return op


def _draw_fate(
    draw: st.DrawFn,
    number: int,
    storage: StorageDraft,
    ops: list[OpDraft],
    begin: int,
    end: int,
    forward: int,
    backward: int,
    backward_end: int,
) -> None:
    """Who saves a storage, and when it goes: never before its last use."""
    users = [i for i, op in enumerate(ops) if number in op.reads or number in op.makes]
    last = max([*users, storage.alloc_at, 0])
    fate = draw(st.sampled_from(("dies", "dies", "saved", "saved", "saved", "saved outside", "held", "stays")))
    if storage.category in (Category.PARAMETER, Category.BUFFER):
        return
    inside = [i for i in users if begin <= i < end and not ops[i].view]
    outside = [i for i in users if not begin <= i < end and not ops[i].view]
    if fate == "dies":
        storage.free_after = draw(st.integers(last, forward))
    elif fate == "saved" and inside:
        storage.savers = set(draw(st.lists(st.sampled_from(inside), min_size=1, max_size=2)))
        storage.free_after = draw(st.integers(backward, backward_end - 1))
    elif fate == "saved outside" and outside:
        storage.savers = set(draw(st.lists(st.sampled_from(outside + inside), min_size=1, max_size=2)))
        storage.free_after = draw(st.integers(forward, backward_end))
    elif fate == "held":
        storage.savers = set(draw(st.lists(st.sampled_from(inside), max_size=2))) if inside else set()
        storage.free_after = draw(st.sampled_from((backward_end, backward_end + 1, AFTER_STEP)))
    if storage.savers and storage.free_after != AFTER_STEP:
        storage.released = draw(st.integers(last, draw(st.sampled_from((max(last, end - 1), storage.free_after)))))
    storage.savers = {op if ops[op].forward_op == NO_INDEX else ops[op].forward_op for op in storage.savers}
