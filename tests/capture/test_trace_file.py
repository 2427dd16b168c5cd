"""Traces as files: what comes back is what was written, and nothing else is believed."""

from __future__ import annotations

import hashlib
import pickle
import zlib
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step, Trace, load_trace, save_trace
from memfit.capture.trace_types import SCHEMA
from memfit.errors import InputError


@pytest.fixture(scope="module")
def trace() -> Trace:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    return memfit.trace(Step(model, torch.randn(2, 8), loss=lambda o, _: o.sum()), target="h100-sxm")


def test_round_trip(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "step.memfit"
    save_trace(trace, path)
    loaded = load_trace(path)
    assert loaded == trace
    assert loaded.fingerprint == trace.fingerprint
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def rewrite(path: Path, trace: Trace) -> None:
    """A file with a right checksum around whatever content."""
    packed = zlib.compress(msgspec.msgpack.encode(trace))
    path.write_bytes(b"memfit trace %d %s\n" % (SCHEMA, hashlib.sha256(packed).hexdigest().encode()) + packed)


@pytest.mark.parametrize("cut", [0, 5, 60, -1])
def test_truncated_files_are_refused(trace: Trace, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "step.memfit"
    save_trace(trace, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match=r"not a memfit trace|damaged"):
        load_trace(path)


def test_a_flipped_bit_is_refused(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "step.memfit"
    save_trace(trace, path)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(InputError, match="damaged"):
        load_trace(path)


def test_other_versions_are_refused(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "step.memfit"
    save_trace(trace, path)
    path.write_bytes(path.read_bytes().replace(b"memfit trace 3", b"memfit trace 9", 1))
    with pytest.raises(InputError, match="schema 9, this memfit reads 3"):
        load_trace(path)


def test_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "exploded",))

    path = tmp_path / "step.memfit"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match="not a memfit trace"):
        load_trace(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "break_it",
    [
        lambda t: msgspec.structs.replace(t, storages=t.storages[: len(t.storages) // 2]),
        lambda t: msgspec.structs.replace(t, ops=(msgspec.structs.replace(t.ops[0], call=99), *t.ops[1:])),
        lambda t: msgspec.structs.replace(
            t, storages=(msgspec.structs.replace(t.storages[0], bytes=-1), *t.storages[1:])
        ),
        lambda t: msgspec.structs.replace(t, calls=(msgspec.structs.replace(t.calls[0], parent=0), *t.calls[1:])),
        lambda t: msgspec.structs.replace(t, ops=(msgspec.structs.replace(t.ops[0], source=10**6), *t.ops[1:])),
    ],
)
def test_inconsistent_content_is_refused(trace: Trace, tmp_path: Path, break_it) -> None:
    path = tmp_path / "step.memfit"
    rewrite(path, break_it(trace))
    with pytest.raises(InputError, match="inconsistent"):
        load_trace(path)


def test_wrong_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.memfit"
    packed = zlib.compress(msgspec.msgpack.encode({"schema": "one"}))
    path.write_bytes(b"memfit trace %d %s\n" % (SCHEMA, hashlib.sha256(packed).hexdigest().encode()) + packed)
    with pytest.raises(InputError, match="valid trace"):
        load_trace(path)
