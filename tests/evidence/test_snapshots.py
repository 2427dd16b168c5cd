"""memfit's caching allocator does what that of real GPUs did, address by address."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.memory.allocator import AllocatorConfig
from tests.evidence.snapshots import RecordedAllocator, Recording, compare, files


def test_all_published_recordings_are_here() -> None:
    assert len(files()) == 12


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_recorded_process_is_replayed_address_by_address(path: Path) -> None:
    found = compare(path)
    assert not found.differences
    assert found.mallocs == Recording.read(path).action.count(0) > 700


def test_recordings_from_an_empty_allocator_compare_every_segment() -> None:
    for path in files():
        if path.stem.startswith("niu"):
            assert compare(path).segments == len(Recording.read(path).segments) > 30


def test_another_allocator_is_told_from_the_recorded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the split of large blocks the comparison must fail: it can."""
    monkeypatch.setattr(RecordedAllocator, "_should_split", lambda self, block, size_bytes: block.pool.is_small)
    assert all(compare(path).differences for path in files())


def test_layout_at_the_start_is_found_by_running_events_backwards() -> None:
    for path in files():
        live, segments = Recording.read(path).at_start(AllocatorConfig())
        if path.stem.startswith("niu"):
            assert not live and not segments
        else:
            assert len(live) > 200 and len(segments) == 2
