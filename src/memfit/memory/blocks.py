"""Blocks of device memory and the ordered pools that hold the free ones (the allocator's data structures).

They mirror `Block`, `BlockPool` and `ExpandableSegment` of c10/cuda/CUDACachingAllocator.cpp. They only carry out what
`CachingAllocator` (allocator.py) decides, such as whether a block is split.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple


class ExpandableSegment(NamedTuple):
    """A reserved range of addresses that is backed by device memory page by page."""

    address: int
    size_bytes: int
    page_bytes: int

    def round_to_pages(self, size_bytes: int) -> int:
        """Return the bytes that `ExpandableSegment::map` backs for a request that starts on a page."""
        return -(-size_bytes // self.page_bytes) * self.page_bytes

    def whole_pages(self, address: int, size_bytes: int) -> tuple[int, int]:
        """Address and bytes of the pages wholly inside a range, as `ExpandableSegment::unmap` finds them."""
        begin = self.address + self.round_to_pages(address - self.address)
        end = address + size_bytes
        end -= (end - self.address) % self.page_bytes
        return begin, max(end - begin, 0)


class Block:
    """A run of addresses in one segment, linked to its neighbours; allocated, free, or not yet mapped."""

    __slots__ = (
        "address",
        "key",
        "mapped",
        "next",
        "pool",
        "prev",
        "requested_bytes",
        "segment",
        "size_bytes",
    )

    def __init__(
        self,
        pool: BlockPool,
        address: int,
        size_bytes: int,
        *,
        segment: ExpandableSegment | None = None,
        mapped: bool = True,
    ) -> None:
        self.pool = pool
        self.address = address
        self.size_bytes = size_bytes
        self.segment = segment
        self.mapped = mapped
        self.key: int | None = None  # who owns it; None while it is free
        self.requested_bytes = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def expandable_bytes(self) -> int:
        """What the block can grow to: its own bytes and those of an unmapped block right behind it."""
        if self.next is not None and not self.next.mapped:
            return self.size_bytes + self.next.size_bytes
        return self.size_bytes

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Link this block between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self

    def split(self, size_bytes: int) -> Block:
        """Cut the first bytes off as a new block; this one keeps the rest. Neither may be in a pool now."""
        head = Block(self.pool, self.address, size_bytes, segment=self.segment, mapped=self.mapped)
        head.splice(self.prev, self)
        self.address += size_bytes
        self.size_bytes -= size_bytes
        return head

    def merge(self, other: Block | None) -> None:
        """Merge with a neighbour that is free and in the same mapped state (`try_merge_blocks`)."""
        if other is None or other.key is not None or other.mapped is not self.mapped:
            return
        other.pool.remove(other)
        if other is self.prev:
            self.address = other.address
            self.splice(other.prev, self.next)
        else:
            self.splice(self.prev, other.next)
        self.size_bytes += other.size_bytes


class BlockPool:
    """Free blocks of one stream ordered by size then address, and unmapped blocks ordered by address.

    Python lists kept sorted by bisection: a search is O(log n) and an insertion only moves pointers, which is
    quick for the thousands of free blocks that a step can leave.
    """

    __slots__ = ("_free", "_unmapped", "is_small", "segment_bytes", "stream")

    def __init__(self, *, is_small: bool, segment_bytes: int, stream: int = 0) -> None:
        self.is_small = is_small
        self.stream = stream
        self.segment_bytes = segment_bytes
        # No two blocks have one address, so that a comparison never gets to the block.
        self._free: list[tuple[int, int, Block]] = []
        self._unmapped: list[tuple[int, Block]] = []

    def insert(self, block: Block) -> None:
        if block.mapped:
            insort(self._free, (block.size_bytes, block.address, block))
        else:
            insort(self._unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self._free[bisect_left(self._free, (block.size_bytes, block.address))]
        else:
            del self._unmapped[bisect_left(self._unmapped, (block.address,))]

    def lower_bound(self, size_bytes: int) -> int:
        """Return the index of the smallest free block of at least this size, `len(pool)` when there is none."""
        return bisect_left(self._free, (size_bytes,))

    def pop_best(self, size_bytes: int) -> Block | None:
        """Take out the smallest free block of at least this size, the lowest of equal ones; None when there is none."""
        free = self._free
        index = bisect_left(free, (size_bytes,))
        return free.pop(index)[2] if index < len(free) else None

    def __getitem__(self, index: int) -> Block:
        return self._free[index][2]

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[Block]:
        """Free blocks, smallest first; safe against changes while iterating."""
        return iter([block for _, _, block in self._free])

    def unmapped(self) -> Iterator[Block]:
        """Yield unmapped blocks, lowest address first; the pool may not change meanwhile."""
        return (block for _, block in self._unmapped)
