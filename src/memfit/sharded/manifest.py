"""What a save says of itself: which elements of which tensor lie where, with checksums.

The types are its only definition. A file is an envelope with a checksum of its content, which is read before anything
in it is believed.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from memfit.errors import InputError

VERSION = 1
MANIFEST = "manifest.json"


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Elements `begin` up to `end` of a flattened tensor, at `offset` bytes of a rank's file.

    `crc32` has one checksum for every `block_bytes` of the piece, so that a part of it can be read and checked.
    """

    rank: int
    offset: int
    begin: int
    end: int
    crc32: tuple[int, ...]


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor and the pieces that it consists of."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote: bytes of its file, its pieces, and tensors that it alone has, such as its random state."""

    rank: int
    file_bytes: int
    pieces: tuple[StoredTensor, ...]
    own: tuple[StoredTensor, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A whole save."""

    version: int
    memfit: str
    ranks: int
    block_bytes: int
    file_bytes: tuple[int, ...]
    tensors: tuple[StoredTensor, ...]
    own: tuple[tuple[StoredTensor, ...], ...]
    tied: dict[str, str]
    values: dict[str, Any]
    optimizer: dict[str, Any] | None
    extra: Any


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    sha256: str
    content: msgspec.Raw


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest's file."""
    content = msgspec.json.encode(manifest)
    envelope = _Envelope(
        version=manifest.version, sha256=hashlib.sha256(content).hexdigest(), content=msgspec.Raw(content)
    )
    return msgspec.json.encode(envelope)


def decode_manifest(encoded: bytes, where: str) -> Manifest:
    """Read a manifest; refuse one that is damaged or of another version."""
    try:
        envelope = msgspec.json.decode(encoded, type=_Envelope)
    except msgspec.MsgspecError as error:
        raise InputError(f"{where} is damaged: {error}; load another save") from error
    if envelope.version != VERSION:
        raise InputError(
            f"{where} has version {envelope.version}, and this memfit reads version {VERSION}; load it with the memfit "
            "that wrote it"
        )
    if hashlib.sha256(envelope.content).hexdigest() != envelope.sha256:
        raise InputError(f"{where} is damaged: its checksum is another one; load another save")
    try:
        return msgspec.json.decode(envelope.content, type=Manifest)
    except msgspec.MsgspecError as error:
        raise InputError(f"{where} is no manifest of a save: {error}; load another save") from error


def merge_records(records: list[RankRecord]) -> tuple[StoredTensor, ...]:
    """Every tensor once, with the pieces of all ranks in the order of its elements."""
    found: dict[tuple[str, ...], list[Piece]] = {}
    first: dict[tuple[str, ...], StoredTensor] = {}
    for record in records:
        for tensor in record.pieces:
            first.setdefault(tensor.path, tensor)
            found.setdefault(tensor.path, []).extend(tensor.pieces)
    return tuple(
        msgspec.structs.replace(first[path], pieces=tuple(sorted(pieces, key=lambda piece: piece.begin)))
        for path, pieces in found.items()
    )
