"""How the suite is run: a file by one worker, long files first, and quick garbage collections for measurements."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

# Threads of one worker that spin while they wait take the cores from the other. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


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


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Keep what there is when a file begins out of its garbage collections: half a million objects, 0.3 s for each.

    For files that measure memory, since each measurement begins with a collection. Not for those about captures that
    look through the heap, for `gc.get_objects` and `gc.get_referrers` pass over what is frozen.
    """
    gc.freeze()
    yield
    gc.unfreeze()
