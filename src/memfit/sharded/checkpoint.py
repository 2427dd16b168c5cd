"""Atomic checkpoints: every rank writes its part, rank 0 a manifest, and any number of ranks can load.

A save is written under a hidden name. When all ranks have told rank 0 that their files are on the disk, it writes the
manifest, gives the save its name and points `latest` to it, each step on the disk before the next. Whatever stops a
save, `latest` names one that is complete. Nothing in a save is unpickled: files have raw elements, the rest is JSON.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from memfit._version import __version__
from memfit.errors import InputError
from memfit.sharded.checkpoint_files import (
    BLOCK_BYTES,
    MANIFEST,
    VERSION,
    DataReader,
    DataWriter,
    Manifest,
    Piece,
    RankRecord,
    StoredTensor,
    begin_save,
    data_file,
    decode_manifest,
    dtype_name,
    encode_manifest,
    finish_save,
    from_json,
    latest_name,
    merge_records,
    remove_old,
    save_names,
    tensor_bytes,
    to_json,
    unfinished,
    write_durably,
)
from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.sharded.optimizer_state import check_elementwise, flat_places, load_named_state, parameter_names
from memfit.sharded.rank_coordinator import RankCoordinator
from memfit.sharded.runtime import ShardedRuntime
from memfit.sharded.state_dict import sharded_runtime, sharded_state_dict
from memfit.torch_private.wrappers import name_in_state

_EXTRA_STATE = "_extra_state"

PathNames = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was loaded: the save, how many ranks wrote it, the user's `extra`, whether random states were set."""

    save: str
    ranks: int
    extra: Any
    rng: bool


class _Begun(msgspec.Struct, frozen=True):
    """What a rank has before a save: rank 0 the save's name, all of them digests of what every rank has whole."""

    name: str
    digests: tuple[tuple[PathNames, str], ...]


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    keep: int = 2,
) -> Path:
    """Save a model, sharded or plain, and its optimizer; return the folder of the save. All ranks must call it.

    `extra` is saved as JSON, for example the step. Of the saves in `folder`, the newest `keep` stay.
    """
    if not isinstance(keep, int) or keep < 1:
        raise InputError(f"keep is {keep!r}; give the number of saves that stay, 1 or more")
    target = Path(folder)
    runtime = sharded_runtime(model)
    _check_blocks(runtime)
    coordinator = RankCoordinator(runtime)
    state = sharded_state_dict(model, optimizer)
    tied = _tied(model)
    tensors, values = _divided(state, tied)
    whole = {path: tensor for path, tensor in tensors.items() if not isinstance(tensor, FlatDTensor)}
    name = ""

    def begin() -> bytes:
        encoded = to_json(extra, "extra")
        digests = tuple((path, _digest(tensor)) for path, tensor in whole.items())
        with _writing(target):
            made = begin_save(target) if coordinator.rank == 0 else ""
        return msgspec.json.encode((_Begun(made, digests), values, encoded))

    def write(first: _Begun) -> bytes:
        same = dict(first.digests)
        different = {path for path, tensor in whole.items() if same.get(path) != _digest(tensor)}
        with _writing(target):
            return msgspec.json.encode(_write_own(unfinished(target, name), coordinator, tensors, different))

    def finish(records: list[RankRecord], values: Mapping[str, Any], encoded: Any) -> bytes:
        with _writing(target):
            _check_files(unfinished(target, name), records)
            manifest = Manifest(
                version=VERSION,
                memfit=__version__,
                ranks=coordinator.ranks,
                block_bytes=BLOCK_BYTES,
                file_bytes=tuple(record.file_bytes for record in records),
                tensors=merge_records(records),
                own=tuple(record.own for record in records),
                tied=tied,
                values=values["model"],
                optimizer=values["optimizer"],
                extra=encoded,
            )
            write_durably(unfinished(target, name) / MANIFEST, encode_manifest(manifest))
            finish_save(target, name)
            remove_old(target, keep)
        return b""

    try:
        answers = coordinator.together("the start of a save", begin)
        first, values, encoded = msgspec.json.decode(answers[0], type=tuple[_Begun, dict[str, Any], Any])
        name = first.name
        answers = coordinator.together("the writing of a save", lambda: write(first))
        records = [msgspec.json.decode(each, type=RankRecord) for each in answers]
        coordinator.first("the end of a save", lambda: finish(records, values, encoded))
    except BaseException:
        if coordinator.rank == 0 and name:
            shutil.rmtree(unfinished(target, name), ignore_errors=True)
        raise
    return target / name


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    save: str | None = None,
    rng: bool = True,
) -> Loaded:
    """Load the latest save, or the one named, on any number of ranks, or into a plain model. All ranks must call it.

    Each rank reads only the blocks that have its elements. With as many ranks as saved, random states are set too
    unless `rng` is False. After an error the model may have parts of the save: load another one.
    """
    target = Path(folder)
    runtime = sharded_runtime(model)
    _check_blocks(runtime)
    coordinator = RankCoordinator(runtime)
    name = coordinator.first("the start of a load", lambda: _chosen(target, save).encode()).decode()

    def act() -> bytes:
        manifest = read_manifest(target, name)
        own = (
            {each.path: each for each in manifest.own[coordinator.rank]} if manifest.ranks == coordinator.ranks else {}
        )
        stored = {**{each.path: each for each in manifest.tensors}, **own}
        with DataReader(target / name, manifest) as reader, torch.no_grad():
            _load_model(model, manifest, stored, reader)
            if optimizer is not None:
                _load_optimizer(model, runtime, optimizer, manifest, stored, reader, target / name)
            found = {path[1]: reader.read(each, 0, each.shape[0]) for path, each in own.items() if path[0] == "rng"}
        if rng:
            set_rng_state(found)
        loaded = Loaded(save=name, ranks=manifest.ranks, extra=from_json(manifest.extra), rng=rng and bool(found))
        results.append(loaded)
        return b""

    results: list[Loaded] = []
    coordinator.together("a load", act)
    return results[0]


def saves(folder: str | os.PathLike[str]) -> list[str]:
    """List the names of the saves in a folder, oldest first; the last may be incomplete."""
    return save_names(Path(folder))


def read_manifest(folder: Path, name: str) -> Manifest:
    """Read the manifest of a save."""
    path = folder / name / MANIFEST
    try:
        encoded = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}; the saves there are {', '.join(save_names(folder)) or 'none'}"
        ) from error
    return decode_manifest(encoded, str(path))


def _chosen(folder: Path, save: str | None) -> str:
    name = latest_name(folder) if save is None else save
    if name is None or name not in save_names(folder):
        raise InputError(
            f"there is no {'save' if name is None else f'save {name!r}'} in {folder}; it has "
            f"{', '.join(save_names(folder)) or 'none'}"
        )
    return name


def _check_blocks(runtime: ShardedRuntime | None) -> None:
    """Refuse parameters of which a rank has elements that do not follow each other in the whole tensor."""
    for unit in () if runtime is None else runtime.units:
        for flat in unit.flats:
            for slot, inner in zip(flat.layout.slots, flat.inners, strict=True):
                if inner is not None:
                    raise InputError(
                        f"{slot.names[0]!r} is divided by tensor or expert parallel, too, which memfit's saves have no "
                        "form for; use torch.distributed.checkpoint: get_state_dict(model, optimizer) and dcp.save, "
                        "dcp.load and set_state_dict"
                    )


def _tied(model: nn.Module) -> dict[str, str]:
    """Map further names of tied parameters to the first."""
    first: dict[nn.Parameter, str] = {}
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name_in_state(name)
        if first.setdefault(parameter, name) != name:
            found[name] = first[parameter]
    return found


def _divided(state: Mapping[str, Any], tied: Mapping[str, str]) -> tuple[dict[PathNames, torch.Tensor], dict[str, Any]]:
    """Split a state into its tensors by path, and the rest as JSON."""
    tensors: dict[PathNames, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in state["model"].items():
        if isinstance(value, FlatDTensor) and type(value.local) is not torch.Tensor:
            raise InputError(
                f"{name!r} is a {type(value.local).__name__}, a tensor subclass, which only its own class can write; "
                "save with torch.distributed.checkpoint.save({'model': model.state_dict()}, checkpoint_id=folder)"
            )
        if isinstance(value, torch.Tensor):
            if name not in tied:
                tensors["model", name] = value
        else:
            values[name] = to_json(value, f"{name!r} of the model's state")
    optimizer: dict[str, Any] | None = None
    if "optimizer" in state:
        scalars: dict[str, dict[str, Any]] = {}
        for name, found in state["optimizer"]["state"].items():
            scalars[name] = {}
            for key, value in found.items():
                if isinstance(value, FlatDTensor) or (isinstance(value, torch.Tensor) and value.dim()):
                    tensors["optimizer", name, key] = value
                else:
                    scalars[name][key] = to_json(value, f"optimizer state {key!r} of {name!r}")
        groups = to_json(state["optimizer"]["param_groups"], "param_groups of the optimizer")
        optimizer = {"state": scalars, "param_groups": groups}
    return tensors, {"model": values, "optimizer": optimizer}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor_bytes(tensor), digest_size=16).hexdigest()


def _write_own(
    folder: Path, coordinator: RankCoordinator, tensors: Mapping[PathNames, torch.Tensor], different: set[PathNames]
) -> RankRecord:
    """Write this rank's file: its parts, and what it has otherwise than rank 0."""
    writer = DataWriter(folder / data_file(coordinator.rank))
    try:

        def stored(path: PathNames, value: torch.Tensor) -> StoredTensor:
            sharded = isinstance(value, FlatDTensor)
            local = (value.local if isinstance(value, FlatDTensor) else value).reshape(-1)
            begin = value.begin if isinstance(value, FlatDTensor) else 0
            pieces: tuple[Piece, ...] = ()
            if local.numel() and (coordinator.writes or not sharded):
                offset, checksums = writer.add(local)
                pieces = (
                    Piece(
                        rank=coordinator.rank, offset=offset, begin=begin, end=begin + local.numel(), crc32=checksums
                    ),
                )
            return StoredTensor(path=path, dtype=dtype_name(value.dtype), shape=tuple(value.shape), pieces=pieces)

        pieces = tuple(
            stored(path, value)
            for path, value in tensors.items()
            if isinstance(value, FlatDTensor) or coordinator.rank == 0
        )
        own = [stored(path, tensors[path]) for path in sorted(different)] if coordinator.rank else []
        own += [stored(("rng", kind), value) for kind, value in rng_state().items()]
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    return RankRecord(rank=coordinator.rank, file_bytes=writer.bytes, pieces=pieces, own=tuple(own))


def _check_files(folder: Path, records: list[RankRecord]) -> None:
    for record in records:
        path = folder / data_file(record.rank)
        found = path.stat().st_size if path.exists() else None
        if found != record.file_bytes:
            raise InputError(
                f"rank {record.rank} wrote {record.file_bytes} bytes to {path}, and rank 0 sees "
                f"{'no such file' if found is None else f'{found} bytes'}; give a folder that all ranks share"
            )


def _load_model(
    model: nn.Module, manifest: Manifest, stored: Mapping[PathNames, StoredTensor], reader: DataReader
) -> None:
    state = model.state_dict()
    saved = {path[1] for path in stored if path[0] == "model"} | manifest.tied.keys() | manifest.values.keys()
    for what, names in (("the save has not", state.keys() - saved), ("the model has not", saved - state.keys())):
        if names:
            shown = sorted(names)
            more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
            raise InputError(f"{what} {', '.join(map(repr, shown[:5]))}{more}; load into the model that was saved")
    for name, value in state.items():
        module = name.rpartition(".")[0]
        if name in manifest.values:
            model.get_submodule(module).set_extra_state(from_json(manifest.values[name]))
            continue
        tensor = stored["model", manifest.tied.get(name, name)]
        if isinstance(value, torch.Tensor) and tuple(value.shape) != tensor.shape:
            raise InputError(f"{name!r} has shape {tensor.shape} in the save and {tuple(value.shape)} in the model")
        if name.rpartition(".")[2] == _EXTRA_STATE:
            model.get_submodule(module).set_extra_state(_whole(reader, tensor))
        elif isinstance(value, FlatDTensor):
            value.local.copy_(reader.read(tensor, value.begin, value.end).view(value.local.shape))
        else:
            value.copy_(_whole(reader, tensor))


def _load_optimizer(
    model: nn.Module,
    runtime: ShardedRuntime | None,
    optimizer: torch.optim.Optimizer,
    manifest: Manifest,
    stored: Mapping[PathNames, StoredTensor],
    reader: DataReader,
    where: Path,
) -> None:
    if manifest.optimizer is None:
        raise InputError(f"{where} was saved without an optimizer; load it without one, or save with one")
    places = flat_places(runtime)
    held = {name: parameter for parameter, names in parameter_names(model, optimizer).items() for name in names}
    state: dict[str, dict[str, Any]] = from_json(manifest.optimizer["state"])
    for path, tensor in stored.items():
        if path[0] != "optimizer" or path[1] not in held:
            continue
        place = places.get(held[path[1]])
        if place is None:
            value = _whole(reader, tensor)
        else:
            flat, number = place
            part = flat.parts[number]
            check_elementwise(f"{path[2]!r} of {path[1]!r}", tensor.shape, flat.flat_specs[number].shape)
            value = flat.flat_specs[number].wrap(reader.read(tensor, part.begin, part.end))
        state.setdefault(path[1], {})[path[2]] = value
    groups = from_json(manifest.optimizer["param_groups"])
    load_named_state(model, runtime, optimizer, {"state": state, "param_groups": groups}, copy=False)


def _whole(reader: DataReader, tensor: StoredTensor) -> torch.Tensor:
    return reader.read(tensor, 0, torch.Size(tensor.shape).numel()).view(tensor.shape)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise a failed write of the block as an `InputError` with the system's reason."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"a save in {folder} failed: {error.strerror or error}; the save before it is as it was"
        ) from error


# -- The state of random number generators, as bytes, so that dropout goes on as it would have ------------------------


def rng_state() -> dict[str, torch.Tensor]:
    """Return the generator states of torch, of its current CUDA device, of Python and of numpy."""
    state = {
        "torch": torch.get_rng_state(),
        "python": _bytes(random.getstate()),
        "numpy": _bytes([each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state()]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set those generators that the state has."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        version, numbers, gauss = msgspec.json.decode(state["python"].numpy().tobytes())
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state:
        name, keys, *rest = msgspec.json.decode(state["numpy"].numpy().tobytes())
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
