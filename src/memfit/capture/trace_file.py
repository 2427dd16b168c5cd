"""Write, read and check traces.

A file is compact and versioned, checked before it is believed, and never pickled. `check_trace` has the rules that
every trace obeys, wherever it comes from.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator

import msgspec

from memfit.capture.trace_types import AFTER_STEP, BEFORE_STEP, NO_INDEX, SCHEMA, Phase, Trace
from memfit.errors import InputError
from memfit.files import write_whole

_MAGIC = b"memfit trace"
_LIMIT_BYTES = 4 << 30
"""More than this no trace of ours unpacks to."""


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; the file appears whole or not at all."""
    packed = zlib.compress(msgspec.msgpack.encode(trace), 6)
    header = b"%s %d %s\n" % (_MAGIC, SCHEMA, hashlib.sha256(packed).hexdigest().encode())
    write_whole(path, header + packed, "step.memfit")


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace. A file of another kind or version, damaged or inconsistent, is refused."""
    with open(path, "rb") as file:
        header = file.readline(256)
        packed = file.read()
    words = header.rsplit(b" ", 2)
    if len(words) != 3 or words[0] != _MAGIC:
        raise InputError(f"{path} is not a memfit trace; write one with memfit.save_trace")
    if words[1] != b"%d" % SCHEMA:
        version = words[1][:20].decode(errors="replace")
        raise InputError(f"{path} has trace schema {version}, this memfit reads {SCHEMA}; capture the step again")
    if words[2].strip() != hashlib.sha256(packed).hexdigest().encode():
        raise InputError(f"{path} is damaged: its content is not what was written; capture the step again")
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(packed, _LIMIT_BYTES)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise InputError(f"{path} is damaged: it does not unpack to a trace; capture the step again")
        trace = msgspec.msgpack.decode(content, type=Trace)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise InputError(f"{path} does not hold a valid trace: {error}; capture the step again") from error
    check_trace(trace, str(path))
    return trace


# -- The grammar of a trace: what must hold of every one, wherever it comes from --------------------------------------


def check_trace(trace: Trace, where: str = "trace") -> None:
    """Raise `InputError` with the first rule that does not hold."""
    for problem in _problems(trace):
        raise InputError(f"{where} is inconsistent: {problem}")


def _problems(trace: Trace) -> Iterator[str]:
    if trace.schema != SCHEMA:
        yield f"schema {trace.schema} instead of {SCHEMA}"
    yield from _storage_problems(trace)
    yield from _op_problems(trace)
    yield from _call_problems(trace)
    yield from _parameter_problems(trace)


def _storage_problems(trace: Trace) -> Iterator[str]:
    ops, calls = len(trace.ops), len(trace.calls)
    for number, storage in enumerate(trace.storages):
        if storage.bytes < 0:
            yield f"storage {number} has {storage.bytes} bytes"
        if not BEFORE_STEP <= storage.alloc_at <= ops or not AFTER_STEP <= storage.free_after <= ops:
            yield f"storage {number} is alive from op {storage.alloc_at} to {storage.free_after} of {ops}"
        if storage.free_after != AFTER_STEP and storage.free_after < storage.alloc_at:
            yield f"storage {number} is freed after op {storage.free_after}, allocated at {storage.alloc_at}"
        if not NO_INDEX <= storage.call < calls:
            yield f"storage {number} belongs to module call {storage.call} of {calls}"
        if any(not 0 <= op < ops for op in storage.saved_by):
            yield f"storage {number} is saved by ops {storage.saved_by} of {ops}"


def _op_problems(trace: Trace) -> Iterator[str]:
    storages, calls, sources = len(trace.storages), len(trace.calls), len(trace.sources)
    for index, op in enumerate(trace.ops):
        for ref in (*op.inputs, *op.outputs):
            if not NO_INDEX <= ref.storage < storages:
                yield f"op {index} ({op.name}) uses storage {ref.storage} of {storages}"
                return
            if len(ref.shape) != len(ref.stride):
                yield f"op {index} ({op.name}) has a tensor of shape {ref.shape} and strides {ref.stride}"
        if any(
            ref.storage != NO_INDEX and trace.storages[ref.storage].alloc_at > index
            for ref in (*op.inputs, *op.outputs)
        ):
            yield f"op {index} ({op.name}) uses a storage that is not allocated yet"
        if any(
            ref.storage != NO_INDEX and AFTER_STEP < trace.storages[ref.storage].free_after < index
            for ref in (*op.inputs, *op.outputs)
        ):
            yield f"op {index} ({op.name}) uses a storage that is already freed"
        if not NO_INDEX <= op.call < calls or not 0 <= op.source < sources:
            yield f"op {index} ({op.name}) belongs to module call {op.call} of {calls}, line {op.source} of {sources}"
        latest = (
            index if op.phase in (Phase.FORWARD, Phase.LOSS) else index - 1
        )  # the first op of a function is its own
        if not NO_INDEX <= op.forward_op <= latest or not NO_INDEX <= op.mutated_op < index:
            yield f"op {index} ({op.name}) refers to ops {op.forward_op} and {op.mutated_op}, which come later"
        if op.forward_op != NO_INDEX and op.phase is Phase.OPTIMIZER:
            yield f"op {index} ({op.name}) of the {op.phase.value} has a forward op"
        if min(op.flops, op.read_bytes, op.written_bytes, op.workspace_bytes) < 0:
            yield f"op {index} ({op.name}) has a negative price"


def _call_problems(trace: Trace) -> Iterator[str]:
    ops = len(trace.ops)
    for number, call in enumerate(trace.calls):
        if not NO_INDEX <= call.parent < number:
            yield f"module call {number} ({call.module}) has parent {call.parent}"
            return
        if not 0 <= call.begin <= call.end <= ops:
            yield f"module call {number} ({call.module}) runs ops {call.begin} to {call.end} of {ops}"
        if call.parent != NO_INDEX:
            parent = trace.calls[call.parent]
            if not parent.begin <= call.begin <= call.end <= parent.end:
                yield f"module call {number} ({call.module}) is not inside {parent.module}"


def _parameter_problems(trace: Trace) -> Iterator[str]:
    storages = len(trace.storages)
    for parameter in trace.parameters:
        numbers = (parameter.storage, parameter.gradient, *parameter.state)
        if not parameter.names or any(not NO_INDEX <= number < storages for number in numbers):
            yield f"parameter {parameter.names} has storages {numbers} of {storages}"
    for module in trace.modules:
        if any(not NO_INDEX <= number < storages for number in (*module.parameters, *module.buffers)):
            yield f"module {module.path} has storages {module.parameters} and {module.buffers} of {storages}"
