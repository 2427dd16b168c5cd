"""Replays recorded CUDA memory snapshots through memfit's caching allocator, and compares every decision of the two.

A file holds what the allocator of a real process did, event by event, and its segments and blocks at the end
(docs/evidence.md has the sources). Where cudaMalloc puts a segment is the driver's choice, so that address is taken
from the record; everything else is the model's own: whether a new segment is needed and how large, which free block
serves a request, whether it is split, what is merged.

Note [The layout at the start]: a recording may begin in mid-process. What is live at the end is known, and events run
backwards say what was live before each; what lies between live blocks of a segment is free, as one block, since free
neighbours are always merged. Only what a live block has beyond its request is unknown where it was freed later; there
the block is taken as the request rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from memfit.memory import Block, BlockState, CachingAllocator, ExpandableSegment
from memfit.memory.allocator import AllocatorConfig

FOLDER = Path(__file__).parent / "snapshots"
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SNAPSHOT = 0, 1, 2, 3, 7
_UNUSED_SPACE_BYTES = 1 << 40
"""Addresses behind an expandable segment's pages; how many there were is not recorded."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The events of a file, in order, and how it ended."""

    action: list[int]
    address: list[int]
    size_bytes: list[int]
    stream: list[int]
    segments: dict[int, tuple[int, bool, int, bool]]
    """By address: size, whether its blocks are large, stream, whether it is expandable."""
    blocks: dict[int, tuple[int, int, bool]]
    """By address: size, requested size, whether it is live."""

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a file."""
        with np.load(path) as found:
            names = ("address", "size", "large", "stream", "expandable")
            segments = zip(*(found[f"segment_{name}"].tolist() for name in names), strict=True)
            return cls(
                found["action"].tolist(),
                found["address"].tolist(),
                found["size"].tolist(),
                found["stream"].tolist(),
                {address: (size, large, stream, grows) for address, size, large, stream, grows in segments},
                {at: (size, asked, bool(live)) for _, at, size, asked, live in found["block"].tolist()},
            )

    @property
    def expandable(self) -> bool:
        return any(grows for *_, grows in self.segments.values())

    def events(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield action, address, size and stream of each event."""
        return zip(self.action, self.address, self.size_bytes, self.stream, strict=True)

    def at_start(self, config: AllocatorConfig) -> tuple[dict[int, tuple[int, int]], set[int]]:
        """Size and requested size of blocks that are live at the start, by address, and the segments (see the Note)."""
        live = {at: (size, asked) for at, (size, asked, alive) in self.blocks.items() if alive}
        segments = set(self.segments)
        for action, address, size, _ in reversed(list(self.events())):
            if action == ALLOC:
                del live[address]
            elif action == FREE_COMPLETED:
                live[address] = (config.round_size(size), size)
            elif action == SEGMENT_ALLOC:
                segments.remove(address)
        return live, segments


class RecordedAllocator(CachingAllocator):
    """The allocator, with segments at the addresses that a real driver chose."""

    def __init__(self, config: AllocatorConfig) -> None:
        super().__init__(config)
        self.offered: list[tuple[int, int]] = []
        """Address and size of segments that the recording makes for the next malloc."""
        self.refused: list[int] = []
        """Sizes of segments that the model made and the recording did not."""

    def _take_addresses(self, size_bytes: int) -> int:
        if self.offered and self.offered[0][1] == size_bytes:
            return self.offered.pop(0)[0]
        self.refused.append(size_bytes)
        return super()._take_addresses(size_bytes)

    def address_of(self, key: int) -> int | None:
        """Return the address of a live allocation; None for one of no bytes."""
        block = self._live[key]
        return None if block is None else block.address

    def adopt(self, address: int, segment: tuple[int, bool, int, bool], live: dict[int, tuple[int, int, int]]) -> None:
        """Take over a segment with its live blocks: key, size and requested size of each, by address."""
        size_bytes, large, stream, expandable = segment
        pool = self._pool_for(self.config.small_limit_bytes + 1 if large else 1, stream)
        space = None
        if expandable:
            space = ExpandableSegment(address, size_bytes + _UNUSED_SPACE_BYTES, pool.segment_bytes)
        end, last = address, None

        def append(begin: int, n_bytes: int, *, mapped: bool = True) -> Block:
            block = Block(pool, begin, n_bytes, segment=space, mapped=mapped)
            block.splice(last, None)
            return block

        for begin in sorted(live):
            key, n_bytes, requested_bytes = live[begin]
            if begin > end:
                last = append(end, begin - end)
                pool.insert(last)
            last = append(begin, n_bytes)
            last.key, last.requested_bytes = key, requested_bytes
            self._live[key] = last
            end = begin + n_bytes
        if end < address + size_bytes:
            last = append(end, address + size_bytes - end)
            pool.insert(last)
        if space is not None:
            pool.insert(append(address + size_bytes, _UNUSED_SPACE_BYTES, mapped=False))
        self._reserve(size_bytes)


@dataclass(slots=True)
class Comparison:
    """How many mallocs and segments were compared, and in what the model differs from the recording."""

    mallocs: int = 0
    segments: int = 0
    differences: list[str] = field(default_factory=list)


def compare(path: Path) -> Comparison:
    """Replay a file and compare the address of every malloc, every segment, and the layout at the end."""
    recording, found = Recording.read(path), Comparison()
    config = AllocatorConfig(expandable_segments=recording.expandable)
    allocator = RecordedAllocator(config)
    live, segments = recording.at_start(config)
    keys = {address: number for number, address in enumerate(live)}
    for address in sorted(segments):
        segment = recording.segments[address]
        inside = {at: (keys[at], *live[at]) for at in live if address <= at < address + segment[0]}
        allocator.adopt(address, segment, inside)
    for number, (action, address, size_bytes, stream) in enumerate(recording.events()):
        if action == SEGMENT_ALLOC:
            allocator.offered.append((address, size_bytes))
            found.segments += 1
        elif action == ALLOC:
            keys[address] = len(live) + number
            allocator.malloc(keys[address], size_bytes, stream)
            found.mallocs += 1
            chosen = allocator.address_of(keys[address])
            if chosen != address or allocator.offered or allocator.refused:
                found.differences.append(
                    f"event {number}, {size_bytes} bytes: at {chosen}, recorded at {address};"
                    f" segments only recorded {allocator.offered}, only in the model {allocator.refused}"
                )
                return found  # everything after it would differ as well
        elif action == FREE_COMPLETED:
            allocator.free(keys.pop(address))
        elif action not in (FREE_REQUESTED, SNAPSHOT):
            raise NotImplementedError(f"{path.name}: event {number} is action {action}, which no file had so far")
    found.differences += _layout_differences(allocator, recording)
    return found


def _layout_differences(allocator: CachingAllocator, recording: Recording) -> list[str]:
    """Compare segments and blocks at the end."""
    ours = {
        each.address: (each.size_bytes, each.is_large, each.stream, each.is_expandable) for each in allocator.segments()
    }
    blocks = {
        block.address: (block.size_bytes, block.requested_bytes, block.state is BlockState.ACTIVE)
        for segment in allocator.segments()
        for block in segment.blocks
    }
    # A free block still shows its last request in a snapshot.
    theirs = {at: (size, asked if alive else 0, alive) for at, (size, asked, alive) in recording.blocks.items()}
    return [
        f"{what} {at}: {mine.get(at)}, recorded {recorded.get(at)}"
        for what, mine, recorded in (("segment", ours, recording.segments), ("block", blocks, theirs))
        for at in sorted(mine.keys() | recorded.keys())
        if mine.get(at) != recorded.get(at)
    ]


def files() -> list[Path]:
    """Every recording in this folder."""
    return sorted(FOLDER.glob("*.npz"))
