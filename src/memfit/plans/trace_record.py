"""Build the record that a plan document keeps of its trace, and locate its peak."""

from __future__ import annotations

from typing import cast

from msgspec import UNSET

from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Parameter, Phase, TensorRef, Trace, short
from memfit.paths import module_label
from memfit.plans.record import (
    CastRecord,
    Dtype,
    InputRecord,
    LoopRecord,
    ModelCallRecord,
    OutputRecord,
    ParameterRecord,
    PeakAt,
    TensorRecord,
    TraceRecord,
)
from memfit.solve import count_micro_batches


def build_trace_record(trace: Trace) -> TraceRecord:
    """Return what a plan keeps of a trace, which tells one step from another."""
    return TraceRecord(
        torch=strip_build(trace.torch),
        device=trace.device,
        device_type=trace.device_type,
        threads=trace.threads,
        autocast=trace.autocast,
        optimizer=trace.optimizer,
        ops=len(trace.ops),
        inputs=_inputs(trace),
        parameters=tuple(
            ParameterRecord(names=each.names, shape=each.shape, dtype=_own_dtype(trace, each), trainable=each.trainable)
            for each in trace.parameters
        ),
        micro_batches=count_micro_batches(trace),
        loop=build_loop_record(trace),
        in_eval=trace.in_eval,
        cast=UNSET if trace.cast is None else CastRecord(dtype=cast(Dtype, trace.cast.dtype), units=trace.cast.units),
    )


def _own_dtype(trace: Trace, parameter: Parameter) -> str:
    """Return the dtype that a parameter has in the model."""
    return trace.cast.kept if trace.cast is not None and parameter.dtype == trace.cast.dtype else parameter.dtype


def build_loop_record(trace: Trace) -> LoopRecord:
    """Record how the step calls its model, to compare a real loop with."""
    forward = [call for call in trace.calls if call.phase is Phase.FORWARD]
    roots = [call for call in forward if call.module == ""]
    roots = roots or [call for call in forward if call.parent == NO_INDEX]  # several models in a container
    start = roots[0].begin if roots else 0
    return LoopRecord(
        calls=tuple(
            ModelCallRecord(
                inputs=tuple(TensorRecord(shape=shape, dtype=dtype) for shape, dtype in call.inputs),
                outputs=tuple(_output_record(trace, root.end, number) for number in call.outputs),
            )
            for call, root in zip(trace.model_calls, roots, strict=False)
        ),
        gradients_in_forward_bytes=sum(
            each.bytes
            for each in trace.storages
            if each.category is Category.GRADIENT
            and each.alloc_at == BEFORE_STEP
            and (each.free_after == AFTER_STEP or each.free_after > start)
        ),
        recomputes=any(call.phase is Phase.BACKWARD for call in trace.calls),
    )


def _output_record(trace: Trace, after: int, number: int) -> OutputRecord:
    """Record what holds a result of the model's call that ended at op `after` when the next backward begins."""
    if number == NO_INDEX:
        return OutputRecord(bytes=0, held="other")
    storage = trace.storages[number]
    backward = next((op for op in range(after, len(trace.ops)) if trace.ops[op].phase is Phase.BACKWARD), None)
    if backward is None or storage.alloc_at == BEFORE_STEP or storage.saved_by:
        held = "other"
    elif storage.free_after != AFTER_STEP and storage.free_after < backward:
        held = "nothing"
    else:
        held = "step"
    return OutputRecord(bytes=storage.bytes, held=held)


def strip_build(version: str) -> str:
    """Strip the build from a version of torch: `2.13.0+cpu` and `2.13.0+cu130` are both `2.13.0`."""
    return version.partition("+")[0]


def peak_at(trace: Trace, op: int, *, second_run_of: str | None = None) -> PeakAt:
    """Locate an op; an index outside the ops is the start or the end of the step.

    Views take no time and no memory: for one of them it is the next op of the phase that does something.
    """
    if not 0 <= op < len(trace.ops):
        return PeakAt(op=op, name="", phase="before the step" if op < 0 else "end of the step", module=None)
    phase = trace.ops[op].phase
    later = (each for each in range(op, len(trace.ops)) if not trace.ops[each].view)
    running = next(later, op)
    op = running if trace.ops[running].phase is phase else op
    found = trace.ops[op]
    module = trace.calls[found.call].module if found.call != NO_INDEX else None
    return PeakAt(op=op, name=found.name, phase=found.phase.value, module=module, second_run_of=second_run_of)


def _inputs(trace: Trace) -> tuple[InputRecord, ...]:
    """Record the batch as the first op that reads each tensor sees it."""
    first: dict[int, TensorRef] = {}
    for op in trace.ops:
        for ref in op.inputs:
            first.setdefault(ref.storage, ref)
    found = []
    for number, storage in enumerate(trace.storages):
        if storage.category is Category.INPUT and storage.alloc_at == BEFORE_STEP:
            ref = first.get(number)
            shape, dtype = (None, None) if ref is None else (ref.shape, ref.dtype)
            found.append(InputRecord(shape=shape, dtype=dtype, bytes=storage.bytes))
    return tuple(found)


def describe_peak(at: PeakAt) -> str:
    """Return where a peak is, in words."""
    if at.second_run_of is not None:
        return f"the second run of {module_label(at.second_run_of)}"
    if not at.name:
        return at.phase
    module = "outside any module" if at.module is None else f"in {module_label(at.module)}"
    return f"{at.phase}, {short(at.name)}, {module}"
