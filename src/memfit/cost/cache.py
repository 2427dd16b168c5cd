"""Measured times on disk, one file for each device, torch version and number of threads."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

import msgspec

from memfit.errors import InputError

ENVIRONMENT = "MEMFIT_CACHE"


def cache_folder() -> Path:
    """Where measured times are kept: MEMFIT_CACHE, or memfit in the user's cache folder."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfit"


class TimeCache:
    """Times by key in one file. What others wrote meanwhile is kept when this one is saved."""

    def __init__(self, identity: str, folder: Path | None = None) -> None:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", identity).strip("-")
        self.path = (folder or cache_folder()) / f"times-{name}.json"
        self.times: dict[str, list[float]] = self._read()

    def _read(self) -> dict[str, list[float]]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, list[float]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            raise InputError(f"the measured times in {self.path} cannot be read ({error}); delete the file") from error

    def save(self) -> None:
        """Write what is known, at once or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.times = {**self._read(), **self.times}
        handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(dict(sorted(self.times.items()))))
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
