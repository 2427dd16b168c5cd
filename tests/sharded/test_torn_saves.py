"""A save that stops at any single operation on files, by an error or with the process, leaves one that loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.sharded.checkpoint import load, save
from tests.distributed.sharded_state_plain import made, snapshot, step

pytestmark = pytest.mark.slow

OPERATIONS = ("mkdir", "open", "write", "fsync", "rename", "replace", "rmdir", "unlink")


class Disk:
    """Counts operations and stops at one of them. `lose` takes back what was never brought to the disk."""

    def __init__(self, patch: pytest.MonkeyPatch, stop: Callable[[], None], at: int | None) -> None:
        self.count = 0
        self._stop = stop
        self._at = at
        self._real = {name: getattr(os, name) for name in OPERATIONS}
        self._unsynced: dict[str, int] = {}
        self._names: list[tuple[str, str, Callable[[], Any]]] = []  # folder, path and how to take it back
        for name in OPERATIONS:
            patch.setattr(os, name, getattr(self, f"_{name}", None) or self._counted(name))

    def lose(self, names: str) -> None:
        """Half of what was written to files that were not synced, and all such names, or the oldest of them alone."""
        for file in self._unsynced.values():
            os.ftruncate(file, os.fstat(file).st_size // 2)
        for _, _, undo in self._names[:1] if names == "oldest" else reversed(self._names):
            undo()

    def _operation(self) -> None:
        if self.count == self._at:
            self._stop()
        self.count += 1

    def _counted(self, name: str) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            self._operation()
            return self._real[name](*args, **kwargs)

        return act

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._operation()
        self._real["mkdir"](path, *args, **kwargs)
        self._later(path, lambda: shutil.rmtree(path, ignore_errors=True))

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not flags & os.O_CREAT:
            return self._real["open"](path, flags, *args, **kwargs)
        self._operation()
        new = not os.path.exists(path)
        file = self._real["open"](path, flags, *args, **kwargs)
        if new:
            folder = self._real["open"](os.path.dirname(path), os.O_RDONLY)  # found again under another name
            name = os.path.basename(path)
            self._later(path, lambda: os.unlink(name, dir_fd=folder) if name in os.listdir(folder) else None)
        return file

    def _write(self, file: int, content: Any) -> int:
        self._operation()
        path = os.readlink(f"/proc/self/fd/{file}")
        if path not in self._unsynced:
            self._unsynced[path] = os.dup(file)
            content = content[: len(content) // 2]  # a write may take less than it is given
        return self._real["write"](file, content)

    def _fsync(self, file: int) -> None:
        self._operation()
        path = os.readlink(f"/proc/self/fd/{file}")
        self._unsynced.pop(path, None)
        self._names = [each for each in self._names if each[0] != path]

    def _rename(self, source: Any, target: Any) -> None:
        self._operation()
        self._real["rename"](source, target)
        self._names = [each for each in self._names if each[1] != os.path.abspath(source)]
        self._later(target, lambda: self._real["rename"](target, source))

    def _replace(self, source: Any, target: Any) -> None:
        self._operation()
        before = Path(target).read_bytes() if os.path.exists(target) else None
        self._real["replace"](source, target)
        self._names = [each for each in self._names if each[1] != os.path.abspath(source)]
        self._later(target, lambda: Path(target).unlink() if before is None else Path(target).write_bytes(before))

    def _later(self, path: Any, undo: Callable[[], Any]) -> None:
        path = os.path.abspath(path)
        self._names.append((os.path.dirname(path), path, undo))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk really does when it syncs takes long, and is told apart here by what Disk forgets."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


class Prepared:
    """Two saves, a model one step further, and what the states before and after that step look like."""

    def __init__(self, folder: Path) -> None:
        self.model, self.optimizer = made()
        for _ in range(2):
            step(self.model, self.optimizer)
            save(folder / "saves", self.model, self.optimizer)
        self.before = snapshot(self.model, self.optimizer)
        step(self.model, self.optimizer)
        self.after = snapshot(self.model, self.optimizer)
        self._folder = folder

    def copy(self, name: object) -> Path:
        return Path(shutil.copytree(self._folder / "saves", self._folder / str(name)))

    def save(self, folder: Path) -> None:
        save(folder, self.model, self.optimizer)

    def operations(self) -> int:
        """How many operations a save is; each of them is where one can stop."""
        folder = self.copy("count")
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, lambda: None, None)
            self.save(folder)
        return disk.count

    def goes_on(self, folder: Path) -> bool:
        """The latest save is the one before or the new one, and the next save works. Whether it is the new one."""
        model, optimizer = made(1)
        load(folder, model, optimizer)
        found = snapshot(model, optimizer)
        assert found in (self.before, self.after)
        step(model, optimizer)
        save(folder, model, optimizer)
        other = made(2)
        load(folder, *other)
        assert snapshot(*other) == snapshot(model, optimizer)
        shutil.rmtree(folder)
        return found == self.after


def test_an_error_of_any_operation_leaves_a_save(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    prepared = Prepared(tmp_path)
    new = []
    for at in range(prepared.operations()):
        folder = prepared.copy(at)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, fail, at)
            with pytest.raises(InputError, match="No space left on device"):
                prepared.save(folder)
        new.append(prepared.goes_on(folder))
    assert len(new) > 30
    assert new == sorted(new)
    assert not new[0]


@pytest.mark.parametrize("lost", ["nothing", "oldest", "everything"])
def test_a_death_at_any_operation_leaves_a_save(tmp_path: Path, lost: str) -> None:
    """Of the process, or of the machine: then what was not brought to the disk may go too, in any order."""
    prepared = Prepared(tmp_path)
    new = []
    for at in range(prepared.operations()):
        folder = prepared.copy(at)
        child = os.fork()
        if child == 0:
            _die_saving(prepared, folder, at, lost)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        new.append(prepared.goes_on(folder))
    assert not new[0]
    assert new[-1]


def _die_saving(prepared: Prepared, folder: Path, at: int, lost: str) -> None:
    """In a child process, which never returns from here."""
    patch = pytest.MonkeyPatch()

    def die() -> None:
        patch.undo()
        if lost != "nothing":
            disk.lose(lost)
        os._exit(9)

    try:
        disk = Disk(patch, die, at)
        prepared.save(folder)
    finally:
        os._exit(1)
