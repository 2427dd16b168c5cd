"""How the suite is run: a file by one worker, long files first, and a garbage collection that takes no time."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling


class FileScheduling(LoadGroupScheduling):
    """Gives a file, or the files of an `xdist_group`, to one worker: fixtures of modules are then made once."""

    def _split_scope(self, nodeid: str) -> str:
        group = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if group == nodeid else group


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    return FileScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers begin with what takes long, so that no worker waits for the other at the end."""
    if hasattr(config, "workerinput"):
        long = {item.path for item in items if any(map(item.get_closest_marker, ("slow", "distributed")))}
        items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Leave out of every later garbage collection what imports made: half a million objects, 0.3 s for each.

    Measurements of memory collect garbage before they begin, so many tests would spend most of their time on it.
    """
    gc.collect()
    gc.freeze()
