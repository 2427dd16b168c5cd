"""Traces made by hand or by hypothesis, with no capture behind them."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from memfit.capture import (
    AFTER_STEP,
    BEFORE_STEP,
    NO_INDEX,
    Category,
    Module,
    ModuleCall,
    Op,
    Parameter,
    Phase,
    Storage,
    TensorRef,
    Trace,
)
from memfit.hardware import load_device


def ref(storage: int) -> TensorRef:
    return TensorRef(storage=storage, shape=(1,), stride=(1,), offset=0, dtype="float32")


def op(
    phase: Phase = Phase.FORWARD,
    *,
    reads: tuple[int, ...] = (),
    makes: tuple[int, ...] = (),
    call: int = NO_INDEX,
    workspace: int = 0,
    source: int = 0,
    name: str = "aten.op.default",
) -> Op:
    return Op(
        name=name,
        phase=phase,
        call=call,
        inputs=tuple(map(ref, reads)),
        outputs=tuple(map(ref, makes)),
        arguments="",
        flops=0,
        read_bytes=0,
        written_bytes=0,
        workspace_bytes=workspace,
        view=False,
        random=False,
        saved=False,
        mutates=(),
        mutated_op=NO_INDEX,
        forward_op=NO_INDEX,
        source=source,
    )


def storage(
    size: int,
    alloc_at: int = BEFORE_STEP,
    free_after: int = AFTER_STEP,
    category: Category = Category.ACTIVATION,
    *,
    call: int = NO_INDEX,
    name: str = "",
    module: str = "",
) -> Storage:
    return Storage(
        released=free_after,
        bytes=size,
        category=category,
        alloc_at=alloc_at,
        free_after=free_after,
        call=call,
        module=module,
        name=name,
        saved_by=(),
    )


def call(
    module: str,
    begin: int,
    end: int,
    backward: tuple[int, int] = (NO_INDEX, NO_INDEX),
    *,
    parent: int = NO_INDEX,
    index: int = 0,
    phase: Phase = Phase.FORWARD,
) -> ModuleCall:
    return ModuleCall(
        module=module,
        kind="Kind",
        index=index,
        parent=parent,
        phase=phase,
        begin=begin,
        end=end,
        backward_begin=backward[0],
        backward_end=backward[1],
    )


def module(path: str, parameters: tuple[int, ...] = (), buffers: tuple[int, ...] = ()) -> Module:
    return Module(path=path, kind="Kind", parameters=parameters, buffers=buffers)


def parameter(name: str, storage: int, gradient: int = NO_INDEX, state: tuple[int, ...] = ()) -> Parameter:
    return Parameter(
        names=(name,),
        storage=storage,
        shape=(1,),
        dtype="float32",
        trainable=True,
        gradient=gradient,
        state=state,
    )


def make(ops: Any = (), storages: Any = (), calls: Any = (), **more: Any) -> Trace:
    settings: dict[str, Any] = {
        "schema": 1,
        "memfit": "0",
        "torch": "0",
        "device": "cpu",
        "device_type": "cpu",
        "threads": 1,
        "autocast": None,
        "optimizer": "",
        "modules": (),
        "parameters": (),
        "sources": ("",),
        "notes": (),
    }
    settings |= more
    settings["hardware"] = load_device(settings["device"])
    return Trace(ops=tuple(ops), storages=tuple(storages), calls=tuple(calls), **settings)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any trace whose indices make sense: nested calls, lives of every kind, reads of what is alive."""
    count = draw(st.integers(0, 14))
    backward_from = draw(st.integers(0, count))
    storages = []
    for _ in range(draw(st.integers(0, 16))):
        alloc_at = draw(st.integers(BEFORE_STEP, count))
        # From birth - 1 on: a storage may be noted after the op before its birth and die at once.
        free_after = draw(st.one_of(st.just(AFTER_STEP), st.integers(max(alloc_at - 1, 0), max(count - 1, 0))))
        free_after = free_after if free_after < count else AFTER_STEP
        category = draw(st.sampled_from(list(Category)))
        storages.append(storage(draw(st.integers(0, 2000)), alloc_at, free_after, category))
    calls: list[ModuleCall] = []
    if count:
        _draw_calls(draw, calls, NO_INDEX, "", 0, backward_from, depth=0)
        _draw_calls(draw, calls, NO_INDEX, "again", backward_from, count, depth=2)
    innermost = [NO_INDEX] * count
    for number, each in enumerate(calls):
        for index in range(each.begin, each.end):
            innermost[index] = number
    for number, each in enumerate(storages):
        if 0 <= each.alloc_at < count and innermost[each.alloc_at] != NO_INDEX:
            maker = innermost[each.alloc_at]
            if calls[maker].begin == each.alloc_at and draw(st.booleans()):
                maker = calls[maker].parent  # made just before the call began
            storages[number] = msgspec.structs.replace(each, call=maker)
    ops = []
    for index in range(count):
        alive = [
            number
            for number, each in enumerate(storages)
            if each.alloc_at < index and (each.free_after == AFTER_STEP or each.free_after >= index)
        ]
        ops.append(
            op(
                Phase.FORWARD if index < backward_from else Phase.BACKWARD,
                reads=tuple(draw(st.lists(st.sampled_from(alive), max_size=3))) if alive else (),
                makes=tuple(number for number, each in enumerate(storages) if each.alloc_at == index),
                call=innermost[index],
                workspace=draw(st.sampled_from((0, 0, 100, 5000))),
            )
        )
    return make(ops, storages, calls)


def _draw_calls(
    draw: st.DrawFn, calls: list[ModuleCall], parent: int, path: str, begin: int, end: int, depth: int
) -> None:
    last = max((each.begin for each in calls), default=0)
    backward = draw(st.one_of(st.just((NO_INDEX, NO_INDEX)), st.just((last, max(end, last)))))
    number = len(calls)
    index = sum(each.module == path for each in calls)
    calls.append(call(path, begin, end, backward, parent=parent, index=index))
    if depth == 3:
        return
    edges = sorted(draw(st.lists(st.integers(begin, end), max_size=4)))
    for i in range(0, len(edges) - 1, 2):
        name = draw(st.sampled_from(("a", "b")))
        inner = f"{path}.{name}" if path else name
        _draw_calls(draw, calls, number, inner, edges[i], edges[i + 1], depth + 1)
