"""Traces as files: compact, versioned, checked before they are believed, never pickled."""

from __future__ import annotations

import hashlib
import os
import zlib

import msgspec

from memfit.capture.grammar import check_trace
from memfit.capture.record import SCHEMA, Trace
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
