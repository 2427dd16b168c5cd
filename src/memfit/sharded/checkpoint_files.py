"""Files and folders that survive a crash: bytes and names are on the disk before the next step relies on them."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from memfit.errors import InputError, MissingFeatureError

BLOCK_BYTES = 4 << 20
"""What is checked at once, and the most that is read beside what is needed."""

LATEST = "latest"
_SAVE = re.compile(r"save-(\d{8})")
_UNFINISHED = re.compile(r"\.(save-\d{8})\.unfinished")


def data_file(rank: int) -> str:
    return f"rank-{rank}.bin"


class DataWriter:
    """The file of one rank, which pieces are added to."""

    def __init__(self, path: Path) -> None:
        if sys.byteorder != "little":
            raise MissingFeatureError("saves have little-endian bytes, and this machine is big-endian")
        self.bytes = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def add(self, local: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        """Write elements; where they begin, and the checksum of every block."""
        offset = self.bytes
        step = BLOCK_BYTES // local.element_size()
        checksums: list[int] = []
        for begin in range(0, local.numel(), step):
            block = tensor_bytes(local[begin : begin + step])
            checksums.append(zlib.crc32(block))
            write_all(self._file, block)
            self.bytes += len(block)
        return offset, tuple(checksums)

    def close(self) -> None:
        """Bring all of it to the disk."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def abandon(self) -> None:
        os.close(self._file)


class DataReader:
    """The files of a save; reads only the blocks that have wanted elements, and checks each."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.bytes = 0
        self._folder = folder
        self._manifest = manifest
        self._files: dict[int, int] = {}

    def __enter__(self) -> DataReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(self, tensor: StoredTensor, begin: int, end: int) -> torch.Tensor:
        """Elements `begin` up to `end` of a flattened tensor, on the host."""
        dtype = dtype_of(tensor.dtype)
        found = torch.empty(end - begin, dtype=dtype)
        covered = begin
        for piece in tensor.pieces:
            first, last = max(piece.begin, begin), min(piece.end, end)
            if first >= last:
                continue
            if first != covered:
                break
            for at, block in self._blocks(tensor, piece, dtype, first, last):
                low, high = max(at, first), min(at + block.numel(), last)
                found[low - begin : high - begin] = block[low - at : high - at]
            covered = last
        if covered < end:
            raise InputError(f"{self._folder} has no element {covered} of {'.'.join(tensor.path)}; load another save")
        return found

    def _blocks(
        self, tensor: StoredTensor, piece: Piece, dtype: torch.dtype, first: int, last: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the blocks of a piece with elements `first` up to `last`, each with the number of its first element."""
        size = dtype.itemsize
        step = self._manifest.block_bytes // size
        for number in range((first - piece.begin) // step, -(-(last - piece.begin) // step)):
            at = piece.begin + number * step
            elements = min(step, piece.end - at)
            content = bytearray(elements * size)
            got = self._read_into(piece.rank, content, piece.offset + number * step * size)
            self.bytes += got
            if got < len(content) or zlib.crc32(content) != piece.crc32[number]:
                what = "ends too early" if got < len(content) else "has another checksum than was saved"
                raise InputError(
                    f"{self._folder / data_file(piece.rank)} is damaged: the piece of {'.'.join(tensor.path)} with "
                    f"elements {at} to {at + elements} {what}; load another save"
                )
            yield at, tensor_of(content, dtype)

    def _read_into(self, rank: int, content: bytearray, offset: int) -> int:
        if rank not in self._files:
            path = self._folder / data_file(rank)
            try:
                self._files[rank] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise InputError(f"{path} cannot be read: {error.strerror}; load another save") from error
        view, got = memoryview(content), 0
        while got < len(view):
            count = os.preadv(self._files[rank], [view[got:]], offset + got)
            if not count:
                break
            got += count
        return got


def write_all(file: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and bring it to the disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(file, content)
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def save_names(folder: Path) -> list[str]:
    """Return the saves in a folder, the oldest first."""
    return sorted(each.name for each in folder.iterdir() if _SAVE.fullmatch(each.name)) if folder.is_dir() else []


def latest_name(folder: Path) -> str | None:
    """Return the save that the pointer names."""
    try:
        name = (folder / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    if not _SAVE.fullmatch(name):
        raise InputError(
            f"{folder / LATEST} names {name!r}, which is no save; write the name of one, such as save-00000001"
        )
    return name


def begin_save(folder: Path) -> str:
    """Make the folder of a new save under a temporary name, remove what a failed save left, and return the name."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in list(folder.iterdir()):
        if _UNFINISHED.fullmatch(each.name):
            shutil.rmtree(each)
    names = save_names(folder)
    number = 1 + (int(names[-1].removeprefix("save-")) if names else 0)
    name = f"save-{number:08d}"
    os.mkdir(unfinished(folder, name))
    return name


def unfinished(folder: Path, name: str) -> Path:
    """Return the folder of a save while it is written."""
    return folder / f".{name}.unfinished"


def finish_save(folder: Path, name: str) -> None:
    """Make a save that is complete the latest one."""
    sync_folder(unfinished(folder, name))
    os.rename(unfinished(folder, name), folder / name)
    sync_folder(folder)
    temporary = folder / f".{LATEST}"
    write_durably(temporary, f"{name}\n".encode())
    os.replace(temporary, folder / LATEST)
    sync_folder(folder)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest saves; each is renamed first, so that no partial save has the name of one."""
    names = save_names(folder)
    for name in names[: max(len(names) - keep, 0)]:
        if name != latest_name(folder):
            os.rename(folder / name, unfinished(folder, name))
            shutil.rmtree(unfinished(folder, name))


# -- What a save says of itself: which elements of which tensor lie where, with checksums -----------------------------
#
# The types are its only definition. A file is an envelope with a checksum of its content, which is read before
# anything in it is believed.


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
    """Encode a manifest as the bytes of its file."""
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
    """Merge the ranks' records: every tensor once, with all pieces in the order of its elements."""
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


# Python values as JSON that gives them back exactly: tuples, small tensors and floats that JSON has no word for.


_MARK = "$"


def to_json(value: Any, what: str) -> Any:
    """Convert to a value that msgspec can write; `what` names it where it cannot be written."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": tensor_bytes(value).hex(), "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if type(value) is list:
        return [to_json(each, what) for each in value]
    if type(value) is tuple:
        return {"$tuple": [to_json(each, what) for each in value]}
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key.startswith(_MARK)]
        if wrong:
            raise InputError(f"{what} has the key {wrong[0]!r}; keys must be strings that do not begin with '{_MARK}'")
        return {key: to_json(each, what) for key, each in value.items()}
    raise InputError(
        f"{what} has a {type(value).__name__}, which cannot be saved as JSON; give numbers, strings, lists, tuples, "
        "dicts and tensors"
    )


def from_json(value: Any) -> Any:
    """Restore the value that was given to `to_json`."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(from_json(each) for each in value["$tuple"])
    if "$dtype" in value:
        return dtype_of(value["$dtype"])
    if "$tensor" in value:
        content = bytearray.fromhex(value["$tensor"])
        return tensor_of(content, dtype_of(value["dtype"])).reshape(value["shape"])
    return {key: from_json(each) for key, each in value.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"this save has tensors of dtype {name!r}, which this PyTorch has not; install a newer one")
    return found


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor as contiguous bytes; on a CPU without a copy."""
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_of(content: bytearray, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor on these bytes."""
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
