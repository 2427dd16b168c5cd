"""Saves of a plain model, in one process: what is in them, and what damage does."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from memfit.errors import InputError
from memfit.sharded import checkpoint, checkpoint_files
from memfit.sharded.checkpoint import load, read_manifest, save, saves
from tests.distributed.sharded_state_plain import made, snapshot, step


def test_a_plain_model_comes_back_with_optimizer_buffers_and_extra(tmp_path: Path) -> None:
    model, optimizer = made()
    step(model, optimizer)
    where = save(tmp_path / "new" / "folder", model, optimizer, extra={"step": 7, "shape": (1, 2)})
    assert where == tmp_path / "new" / "folder" / "save-00000001"
    other, other_optimizer = made(1)
    loaded = load(tmp_path / "new" / "folder", other, other_optimizer)
    assert loaded.extra == {"step": 7, "shape": (1, 2)}
    assert loaded.rng
    assert snapshot(other, other_optimizer) == snapshot(model, optimizer)


def test_the_newest_saves_stay(tmp_path: Path) -> None:
    model, optimizer = made()
    for number in range(5):
        save(tmp_path, model, optimizer, extra=number, keep=3)
    assert saves(tmp_path) == ["save-00000003", "save-00000004", "save-00000005"]
    assert load(tmp_path, model, optimizer).extra == 4
    assert load(tmp_path, model, optimizer, save="save-00000003").extra == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", *saves(tmp_path)]


def test_blocks_are_read_only_where_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 64)
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", 64)
    model = nn.Linear(100, 10)
    where = save(tmp_path, model)
    manifest = read_manifest(tmp_path, where.name)
    stored = next(each for each in manifest.tensors if each.path == ("model", "weight"))
    assert len(stored.pieces[0].crc32) == 4000 // 64 + 1
    for begin, end, blocks in ((0, 1, 1), (15, 17, 2), (16, 32, 1), (990, 1000, 2), (5, 5, 0)):
        with checkpoint_files.DataReader(where, manifest) as reader:
            assert torch.equal(reader.read(stored, begin, end), model.weight.detach().view(-1)[begin:end])
            assert reader.bytes <= 64 * blocks


@pytest.mark.parametrize("file", ["rank-0.bin", "manifest.json"])
def test_every_flipped_bit_is_found_and_named(tmp_path: Path, file: str) -> None:
    model, optimizer = made()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer) / file
    good = path.read_bytes()
    for position in range(0, len(good), 1 if len(good) < 500 else 97):
        damaged = bytearray(good)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=file.replace(".", r"\.")) as caught:
            load(tmp_path, model, optimizer)
        if file.endswith(".bin"):
            assert "the piece of " in str(caught.value)
    path.write_bytes(good)
    load(tmp_path, model, optimizer)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    model, optimizer = made()
    step(model, optimizer)
    path = save(tmp_path, model, optimizer) / "rank-0.bin"
    good = path.read_bytes()
    for length in range(0, len(good), 97):
        path.write_bytes(good[:length])
        with pytest.raises(InputError, match=r"rank-0\.bin is damaged: the piece of .* ends too early"):
            load(tmp_path, model, optimizer)
    path.unlink()
    with pytest.raises(InputError, match=r"rank-0\.bin cannot be read: No such file"):
        load(tmp_path, model, optimizer)


def test_nothing_is_pickled_or_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pickle")

    for owner, name in ((torch, "load"), (torch, "save"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(owner, name, refuse)
    model, optimizer = made()
    step(model, optimizer)
    save(tmp_path, model, optimizer, extra=[1])
    load(tmp_path, *made(1))
    room = Path(checkpoint.__file__).parent
    words = ("import pickle", "torch.load(", "torch.save(", "_object(", "_object_list(")
    found = [(path.name, word) for path in sorted(room.glob("*.py")) for word in words if word in path.read_text()]
    assert found == []


def test_another_model_is_refused_with_names(tmp_path: Path) -> None:
    model, optimizer = made()
    save(tmp_path, model, optimizer)
    with pytest.raises(InputError, match=r"the save has not '3.bias', '3.weight'"):
        load(tmp_path, nn.Sequential(*model, nn.Linear(2, 2)))
    with pytest.raises(InputError, match=r"the model has not '2.bias', '2.weight'"):
        load(tmp_path, nn.Sequential(*model[:2]))
    with pytest.raises(InputError, match=r"'0.weight' has shape \(5, 3\) in the save and \(5, 4\) in the model"):
        load(tmp_path, nn.Sequential(nn.Linear(4, 5), *model[1:]))
    save(tmp_path, model)
    with pytest.raises(InputError, match="saved without an optimizer"):
        load(tmp_path, model, optimizer)


def test_a_folder_without_a_save_and_wrong_options_are_refused(tmp_path: Path) -> None:
    model, _ = made()
    with pytest.raises(InputError, match="there is no save in"):
        load(tmp_path, model)
    save(tmp_path, model)
    with pytest.raises(InputError, match=r"there is no save 'save-00000009' in .*; it has save-00000001"):
        load(tmp_path, model, save="save-00000009")
    with pytest.raises(InputError, match="keep is 0"):
        save(tmp_path, model, keep=0)
    with pytest.raises(InputError, match="extra has a object"):
        save(tmp_path, model, extra=object())
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match=r"a save in .* failed"):
        save(file, model)
    assert saves(tmp_path) == ["save-00000001"]


def test_a_save_of_a_later_version_is_refused(tmp_path: Path) -> None:
    model, _ = made()
    path = save(tmp_path, model) / "manifest.json"
    envelope = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**envelope, "version": 2}))
    with pytest.raises(InputError, match="has version 2, and this memfit reads version 1"):
        load(tmp_path, model)


class Counts(nn.Module):
    """A module with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.counts

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.counts = state


def test_extra_state_of_modules_and_tied_parameters_come_back(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), Counts(), nn.Linear(4, 4, bias=False))
        model[2].weight = model[0].weight
        return model

    model = build()
    model[1].counts = {"seen": 3, "range": (0.5, float("inf"))}
    where = save(tmp_path, model)
    assert (where / "rank-0.bin").stat().st_size < 2 * 64 + 5056 + 20_000  # the weight once, and random states
    other = build()
    load(tmp_path, other)
    assert other[1].counts == model[1].counts
    assert torch.equal(other[0].weight, model[0].weight)
    assert other[0].weight is other[2].weight
