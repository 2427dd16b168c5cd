"""What PyTorch's CUDA caching allocator reserves for a sequence of mallocs and frees on its streams.

A replica of `DeviceCachingAllocator` in c10/cuda/CUDACachingAllocator.cpp (torch 2.10 to 2.13); each method
names the C++ function it follows, and docs/design/allocator.md lists what is modelled and what is not. The decisions:

- how large a block a request needs, and how large a segment: `AllocatorConfig.round_size`, `allocation_size`
- which free block serves it: `CachingAllocator._get_free_block`
- whether that block is split: `CachingAllocator._should_split`
- which free blocks it looks at: those of the stream that asks, `CachingAllocator._pool_for`
- which free neighbours are merged: `Block.merge` (blocks.py)
- what goes back to the device when memory is short: `CachingAllocator.malloc`, `_release_available_cached_blocks`,
  `empty_cache`

Addresses are invented. Where cudaMalloc puts a segment is unknown, so segments get increasing addresses that
are never used twice. It matters only in a tie: among free blocks of one size the allocator takes the lowest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.errors import InputError, StateError
from memfit.memory.blocks import Block, BlockPool, ExpandableSegment

MIB = 1 << 20
FREE = -1
"""The `requested_bytes` of a `MemoryEvent` that frees its key."""

_FIRST_ADDRESS = 1 << 44
_UNLIMITED_ADDRESS_SPACE_BYTES = 1 << 44
_ROUNDUP_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: 1 MiB, 2 MiB, … 32 GiB and more


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """The allocator's constants and the options of `PYTORCH_ALLOC_CONF` that change what is reserved.

    `limit_bytes` is the device memory that the allocator may reserve; None means no limit.
    `roundup_power2_divisions` holds one value for every size, or sixteen for 1 MiB, 2 MiB, … 32 GiB and more.
    """

    round_bytes: int = 512  # kMinBlockSize
    small_limit_bytes: int = MIB  # kSmallSize
    small_segment_bytes: int = 2 * MIB  # kSmallBuffer
    large_segment_bytes: int = 20 * MIB  # large_segment_size_mb
    min_large_alloc_bytes: int = 10 * MIB  # kMinLargeAlloc
    round_large_bytes: int = 2 * MIB  # kRoundLarge
    expandable_segments: bool = False
    max_split_bytes: int | None = None  # max_split_size_mb
    max_non_split_rounding_bytes: int = 20 * MIB  # max_non_split_rounding_mb
    roundup_power2_divisions: tuple[int, ...] = ()
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        sizes = {
            "round_bytes": self.round_bytes,
            "small_limit_bytes": self.small_limit_bytes,
            "small_segment_bytes": self.small_segment_bytes,
            "large_segment_bytes": self.large_segment_bytes,
            "min_large_alloc_bytes": self.min_large_alloc_bytes,
            "round_large_bytes": self.round_large_bytes,
        }
        for name, value in sizes.items():
            if value <= 0:
                raise InputError(f"AllocatorConfig.{name} is {value}; give a positive number of bytes")
        if self.small_segment_bytes < self.small_limit_bytes:
            raise InputError(
                f"AllocatorConfig.small_segment_bytes is {self.small_segment_bytes}, less than"
                f" small_limit_bytes ({self.small_limit_bytes});"
                " a small segment must hold the largest small block"
            )
        if self.large_segment_bytes < self.min_large_alloc_bytes:
            raise InputError(
                f"AllocatorConfig.large_segment_bytes is {self.large_segment_bytes}, less than"
                f" min_large_alloc_bytes ({self.min_large_alloc_bytes});"
                " a large segment must hold any block below that"
            )
        # parseMaxSplitSize refuses less than a large segment.
        if self.max_split_bytes is not None and self.max_split_bytes < self.large_segment_bytes:
            raise InputError(
                f"AllocatorConfig.max_split_bytes is {self.max_split_bytes}; give at least"
                f" large_segment_bytes ({self.large_segment_bytes}), or None to let every block be split"
            )
        if self.limit_bytes is not None and self.limit_bytes < 0:
            raise InputError(f"AllocatorConfig.limit_bytes is {self.limit_bytes}; give bytes, or None for no limit")
        divisions = self.roundup_power2_divisions
        if len(divisions) not in (0, 1, _ROUNDUP_INTERVALS) or any(d < 0 or d & (d - 1) for d in divisions):
            raise InputError(
                f"AllocatorConfig.roundup_power2_divisions is {divisions}; give one power of two (or 0),"
                f" or {_ROUNDUP_INTERVALS} of them for 1 MiB, 2 MiB, … 32 GiB and more"
            )

    def round_size(self, requested_bytes: int) -> int:
        """`round_size`: bytes of the block that a request needs."""
        if requested_bytes < self.round_bytes:
            return self.round_bytes
        if self.roundup_power2_divisions:
            # AcceleratorAllocatorConfig::roundup_power2_divisions(size)
            interval = max(requested_bytes.bit_length() - MIB.bit_length(), 0)
            divisions = self.roundup_power2_divisions[min(interval, len(self.roundup_power2_divisions) - 1)]
            if divisions > 1 and requested_bytes > self.round_bytes * divisions:
                # roundup_power2_next_division; the size is above `divisions`, so a division is never empty
                division_bytes = (1 << (requested_bytes.bit_length() - 1)) // divisions
                return _round_up(requested_bytes, division_bytes)
        return _round_up(requested_bytes, self.round_bytes)

    def allocation_size(self, size_bytes: int) -> int:
        """`get_allocation_size`: bytes asked of cudaMalloc when no free block serves a block of this size."""
        if size_bytes <= self.small_limit_bytes:
            return self.small_segment_bytes
        if size_bytes < self.min_large_alloc_bytes:
            return self.large_segment_bytes
        return _round_up(size_bytes, self.round_large_bytes)


class BlockState(str, Enum):
    """State of a block, spelled as in `torch.cuda.memory_snapshot()`."""

    ACTIVE = "active_allocated"
    INACTIVE = "inactive"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSnapshot:
    """One block of a segment; `key` and `requested_bytes` are its malloc's, None and 0 when free."""

    address: int
    size_bytes: int
    requested_bytes: int
    state: BlockState
    key: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSnapshot:
    """One contiguous range of reserved memory and the blocks that tile it, lowest address first."""

    address: int
    size_bytes: int
    is_large: bool
    is_expandable: bool
    blocks: tuple[BlockSnapshot, ...]
    stream: int = 0


class AllocatorOutOfMemory(StateError):
    """A malloc did not fit under `limit_bytes`, even after every releasable cached block was given back.

    `event_index` is set when the malloc came from `simulate`.
    """

    def __init__(self, tried_bytes: int, limit_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(tried_bytes, limit_bytes, allocated_bytes, reserved_bytes)
        self.tried_bytes = tried_bytes
        self.limit_bytes = limit_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.free_bytes = limit_bytes - reserved_bytes
        self.unused_bytes = reserved_bytes - allocated_bytes
        self.event_index: int | None = None

    def __str__(self) -> str:
        where = "" if self.event_index is None else f" at event {self.event_index}"
        return (
            f"out of memory{where}. Tried to allocate {_format_size(self.tried_bytes)}."
            f" The device has a total capacity of {_format_size(self.limit_bytes)}"
            f" of which {_format_size(self.free_bytes)} is free."
            f" {_format_size(self.allocated_bytes)} is allocated,"
            f" and {_format_size(self.unused_bytes)} is reserved but unallocated."
            " If that is large, try expandable_segments; else raise limit_bytes or allocate less"
        )


class CachingAllocator:
    """The allocator itself: malloc and free by key, and what is requested, allocated and reserved meanwhile.

    A key is any int that the caller uses for one live allocation; it may be used again once freed. A stream is any int;
    a free block serves only the stream that it was first allocated for, until it goes back to the device.
    """

    def __init__(self, config: AllocatorConfig | None = None) -> None:
        self.config = config = config or AllocatorConfig()
        # torch orders the blocks of one pool by stream, then size; a pool for each stream is the same.
        self._small: dict[int, BlockPool] = {}
        self._large: dict[int, BlockPool] = {}
        self._rounded: dict[int, int] = {}  # a step asks for the same sizes again and again
        self._live: dict[int, Block | None] = {}  # None for an allocation of zero bytes
        self._any_block_serves = config.max_split_bytes is None and not config.expandable_segments
        self._max_split_bytes = sys.maxsize if config.max_split_bytes is None else config.max_split_bytes
        self._limit_bytes = sys.maxsize if config.limit_bytes is None else config.limit_bytes
        self._next_address = _FIRST_ADDRESS
        self._requested_bytes = self._allocated_bytes = self._reserved_bytes = 0
        self._retries = 0
        self.reset_peaks()

    @property
    def requested_bytes(self) -> int:
        """Bytes that live allocations asked for."""
        return self._requested_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks of live allocations (`torch.cuda.memory_allocated`)."""
        return self._allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the device (`torch.cuda.memory_reserved`)."""
        return self._reserved_bytes

    @property
    def peak_requested_bytes(self) -> int:
        return self._peak_requested_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        return self._peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self._peak_reserved_bytes

    @property
    def retries(self) -> int:
        """How often the cache was emptied to make room (`num_alloc_retries`); each stalls a real device."""
        return self._retries

    def reset_peaks(self) -> None:
        """`resetPeakStats`: peaks start again from what is held now."""
        self._peak_requested_bytes = self._requested_bytes
        self._peak_allocated_bytes = self._allocated_bytes
        self._peak_reserved_bytes = self._reserved_bytes

    def malloc(self, key: int, requested_bytes: int, stream: int = 0) -> None:
        """`malloc`: take the best free block, or a new segment, or one after emptying the cache."""
        if requested_bytes < 0:
            raise InputError(f"malloc of {requested_bytes} bytes for key {key}; give zero or more")
        if key in self._live:
            raise StateError(f"malloc for key {key}, which is still allocated; free it first or use another key")
        if requested_bytes == 0:
            self._live[key] = None
            return
        size_bytes = self._rounded.get(requested_bytes)
        if size_bytes is None:
            size_bytes = self._rounded[requested_bytes] = self.config.round_size(requested_bytes)
        pool = self._pool_for(size_bytes, stream)
        block = pool.pop_best(size_bytes) if self._any_block_serves else self._get_free_block(pool, size_bytes)
        if block is None:
            block = self._alloc_block(pool, size_bytes)
        if block is None and self._release_available_cached_blocks(pool, size_bytes):
            block = self._alloc_block(pool, size_bytes)
        if block is None:
            self.empty_cache()
            self._retries += 1
            block = self._alloc_block(pool, size_bytes)
        if block is None:
            tried_bytes = self.config.allocation_size(size_bytes)
            raise AllocatorOutOfMemory(tried_bytes, self._limit_bytes, self._allocated_bytes, self._reserved_bytes)
        self._alloc_found_block(key, requested_bytes, block, size_bytes)

    def free(self, key: int) -> None:
        """`free` and `free_block`: merge the block with its free neighbours and keep it in the cache."""
        try:
            block = self._live.pop(key)
        except KeyError:
            raise StateError(f"free of key {key}, which is not allocated; malloc it first") from None
        if block is None:
            return
        self._allocated_bytes -= block.size_bytes
        self._requested_bytes -= block.requested_bytes
        block.key = None
        block.requested_bytes = 0
        before, after = block.prev, block.next
        if before is not None and before.key is None:
            block.merge(before)
        if after is not None and after.key is None:
            block.merge(after)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """`emptyCache`, that is `release_cached_blocks`: give back all that is wholly free, on every stream."""
        for pool in (*self._large.values(), *self._small.values()):
            self._release_blocks(pool)

    def segments(self) -> tuple[SegmentSnapshot, ...]:
        """`snapshot`: the segments by address. An expandable segment gives one for each mapped range."""
        free = [block for pool in (*self._small.values(), *self._large.values()) for block in pool]
        blocks = [*free, *(block for block in self._live.values() if block is not None)]
        heads = [block for block in blocks if block.prev is None or not block.prev.mapped]
        return tuple(_snapshot_segment(head) for head in sorted(heads, key=lambda block: block.address))

    def _pool_for(self, size_bytes: int, stream: int) -> BlockPool:
        """`get_pool`, and the free blocks of a stream in it."""
        is_small = size_bytes <= self.config.small_limit_bytes
        pools = self._small if is_small else self._large
        pool = pools.get(stream)
        if pool is None:
            segment_bytes = self.config.small_segment_bytes if is_small else self.config.large_segment_bytes
            pool = pools[stream] = BlockPool(is_small=is_small, segment_bytes=segment_bytes, stream=stream)
        return pool

    def _get_free_block(self, pool: BlockPool, size_bytes: int) -> Block | None:
        """`get_free_block`: best fit, within the rules for blocks that may not be split."""
        index = pool.lower_bound(size_bytes)
        if index == len(pool):
            return None
        block = pool[index]
        if self.config.expandable_segments:
            # A block at the edge of the mapped range counts with the bytes it can grow to.
            for candidate in map(pool.__getitem__, range(index + 1, len(pool))):
                if candidate.expandable_bytes >= block.expandable_bytes:
                    break
                block = candidate
        if size_bytes < self._max_split_bytes <= block.size_bytes:
            return None
        if (
            size_bytes >= self._max_split_bytes
            and block.size_bytes >= size_bytes + self.config.max_non_split_rounding_bytes
        ):
            return None
        pool.remove(block)
        return block

    def _should_split(self, block: Block, size_bytes: int) -> bool:
        """`should_split`: whether what is left of the block becomes a free block of its own."""
        remaining = block.size_bytes - size_bytes
        if block.pool.is_small or self.config.expandable_segments:
            return remaining >= self.config.round_bytes
        return size_bytes < self._max_split_bytes and remaining > self.config.small_limit_bytes

    def _alloc_found_block(self, key: int, requested_bytes: int, block: Block, size_bytes: int) -> None:
        """`alloc_found_block`: split the block if that is worth it and hand it out."""
        if block.size_bytes != size_bytes and self._should_split(block, size_bytes):
            remaining = block
            block = remaining.split(size_bytes)
            remaining.pool.insert(remaining)
        block.key = key
        block.requested_bytes = requested_bytes
        self._live[key] = block
        self._allocated_bytes += block.size_bytes
        self._requested_bytes += requested_bytes
        if self._allocated_bytes > self._peak_allocated_bytes:  # `max` takes twice as long
            self._peak_allocated_bytes = self._allocated_bytes
        if self._requested_bytes > self._peak_requested_bytes:
            self._peak_requested_bytes = self._requested_bytes

    def _alloc_block(self, pool: BlockPool, size_bytes: int) -> Block | None:
        """`alloc_block`: a new segment from the device, None when it does not fit."""
        if self.config.expandable_segments:
            return self._try_allocate_expandable_block(pool, size_bytes)
        segment_bytes = self.config.allocation_size(size_bytes)
        if not self._reserve(segment_bytes):
            return None
        return Block(pool, self._take_addresses(segment_bytes), segment_bytes)

    def _reserve(self, size_bytes: int) -> bool:
        """Take memory from the device, where cudaMalloc or cuMemCreate would."""
        if self._reserved_bytes + size_bytes > self._limit_bytes:
            return False
        self._reserved_bytes += size_bytes
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self._reserved_bytes)
        return True

    def _take_addresses(self, size_bytes: int) -> int:
        address = self._next_address
        self._next_address += size_bytes
        return address

    def _release_available_cached_blocks(self, pool: BlockPool, size_bytes: int) -> bool:
        """`release_available_cached_blocks`: give back just enough of the blocks that may not be split."""
        if self.config.max_split_bytes is None or self.config.expandable_segments:
            return False
        target = max(size_bytes, self._max_split_bytes)
        index = pool.lower_bound(target)
        if index < len(pool):
            self._release_block(pool[index])
            return True
        released = 0
        while released < target and len(pool) and pool[-1].size_bytes >= self._max_split_bytes:
            released += pool[-1].size_bytes
            self._release_block(pool[-1])
        return released >= target

    def _release_blocks(self, pool: BlockPool) -> None:
        """`release_blocks`: give back unsplit free blocks, or the whole pages inside free blocks."""
        for block in pool:
            if block.segment is not None:
                self._unmap_block(block, block.segment)
            elif not block.is_split:
                self._release_block(block)

    def _release_block(self, block: Block) -> None:
        """`release_block`: cudaFree of one segment."""
        block.pool.remove(block)
        self._reserved_bytes -= block.size_bytes

    def _find_expandable_block(self, pool: BlockPool, size_bytes: int) -> Block:
        """`find_expandable_block`: the lowest run of free and unmapped blocks with room, or a new segment."""
        for block in pool.unmapped():
            if block.prev is not None and block.prev.key is None:
                block = block.prev
            if _has_available_address_space(block, size_bytes):
                return block
        memory_bytes = self.config.limit_bytes or max(_UNLIMITED_ADDRESS_SPACE_BYTES, size_bytes)
        space_bytes = _round_up(memory_bytes + memory_bytes // 8, pool.segment_bytes)
        segment = ExpandableSegment(self._take_addresses(space_bytes), space_bytes, pool.segment_bytes)
        block = Block(pool, segment.address, space_bytes, segment=segment, mapped=False)
        pool.insert(block)
        return block

    def _try_allocate_expandable_block(self, pool: BlockPool, size_bytes: int) -> Block | None:
        """`try_allocate_expandable_block`: map pages until the block at the found place is large enough."""
        block = self._find_expandable_block(pool, size_bytes)
        if not block.mapped and not self._map_block(block, min(block.size_bytes, size_bytes)):
            return None
        while block.size_bytes < size_bytes:
            following = block.next
            assert following is not None  # the address space is larger than the limit
            if not self._map_block(following, min(size_bytes - block.size_bytes, following.size_bytes)):
                return None
            block = following  # it has swallowed the block before it
        pool.remove(block)
        return block

    def _map_block(self, block: Block, size_bytes: int) -> bool:
        """`map_block`: back the start of an unmapped block with pages and merge it with free neighbours."""
        segment = block.segment
        assert segment is not None
        mapped_bytes = segment.round_to_pages(size_bytes)
        if not self._reserve(mapped_bytes):
            return False
        pool = block.pool
        pool.remove(block)
        if mapped_bytes < block.size_bytes:
            address, size_bytes = block.address + mapped_bytes, block.size_bytes - mapped_bytes
            remaining = Block(pool, address, size_bytes, segment=segment, mapped=False)
            remaining.splice(block, block.next)
            block.size_bytes = mapped_bytes
            pool.insert(remaining)
        block.mapped = True
        block.merge(block.prev)
        block.merge(block.next)
        pool.insert(block)
        return True

    def _unmap_block(self, block: Block, segment: ExpandableSegment) -> None:
        """`unmap_block`: give back whole pages of a free block, and the segment when none is left."""
        address, size_bytes = segment.whole_pages(block.address, block.size_bytes)
        if size_bytes == 0:
            return
        pool = block.pool
        pool.remove(block)
        before_bytes = address - block.address
        if before_bytes:
            pool.insert(block.split(before_bytes))
        after_bytes = block.size_bytes - size_bytes
        if after_bytes:
            after = Block(pool, address + size_bytes, after_bytes, segment=segment)
            after.splice(block, block.next)
            block.size_bytes = size_bytes
            pool.insert(after)
        block.mapped = False
        block.merge(block.prev)
        block.merge(block.next)
        self._reserved_bytes -= size_bytes
        if block.is_split:  # otherwise release_expandable_segment drops it
            pool.insert(block)


class MemoryEvent(NamedTuple):
    """A malloc of `requested_bytes` for `key`, or its free when `requested_bytes` is `FREE` (-1)."""

    key: int
    requested_bytes: int
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllocatorResult:
    """What `simulate` found: peaks, the index of the event that first reached each, and the course of both.

    The arrays hold the bytes after each event. A peak may be above all of them when a malloc maps pages,
    fails, and gives them back before it succeeds. A peak's event is None when nothing was ever allocated.
    """

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_allocated_event: int | None
    peak_reserved_event: int | None
    allocated_bytes: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]
    retries: int


def simulate(events: Iterable[tuple[int, int] | MemoryEvent], config: AllocatorConfig | None = None) -> AllocatorResult:
    """Run events, each a `MemoryEvent` or such a pair, through a new allocator.

    Raises `AllocatorOutOfMemory`, with the index of the event, when one does not fit under the limit.
    """
    allocator = CachingAllocator(config)
    allocated: list[int] = []
    reserved: list[int] = []
    peak_allocated = peak_reserved = 0
    peak_allocated_event: int | None = None
    peak_reserved_event: int | None = None
    for index, event in enumerate(events):
        if event[1] == FREE:
            allocator.free(event[0])
        else:
            try:
                allocator.malloc(*event)
            except AllocatorOutOfMemory as error:
                error.event_index = index
                raise
            if allocator.peak_allocated_bytes > peak_allocated:
                peak_allocated, peak_allocated_event = allocator.peak_allocated_bytes, index
            if allocator.peak_reserved_bytes > peak_reserved:
                peak_reserved, peak_reserved_event = allocator.peak_reserved_bytes, index
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return AllocatorResult(
        peak_requested_bytes=allocator.peak_requested_bytes,
        peak_allocated_bytes=peak_allocated,
        peak_reserved_bytes=peak_reserved,
        peak_allocated_event=peak_allocated_event,
        peak_reserved_event=peak_reserved_event,
        allocated_bytes=np.array(allocated, dtype=np.int64),
        reserved_bytes=np.array(reserved, dtype=np.int64),
        retries=allocator.retries,
    )


def _round_up(size_bytes: int, step_bytes: int) -> int:
    return -(-size_bytes // step_bytes) * step_bytes


def _has_available_address_space(block: Block | None, size_bytes: int) -> bool:
    available = 0
    while available < size_bytes and block is not None and block.key is None:
        available += block.size_bytes
        block = block.next
    return available >= size_bytes


def _snapshot_segment(head: Block) -> SegmentSnapshot:
    blocks: list[BlockSnapshot] = []
    block: Block | None = head
    while block is not None and block.mapped:
        blocks.append(
            BlockSnapshot(
                address=block.address,
                size_bytes=block.size_bytes,
                requested_bytes=block.requested_bytes,
                state=BlockState.INACTIVE if block.key is None else BlockState.ACTIVE,
                key=block.key,
            )
        )
        block = block.next
    return SegmentSnapshot(
        address=head.address,
        size_bytes=sum(each.size_bytes for each in blocks),
        is_large=not head.pool.is_small,
        is_expandable=head.segment is not None,
        stream=head.pool.stream,
        blocks=tuple(blocks),
    )


def _format_size(size_bytes: int) -> str:
    """Format bytes as torch's messages show them (`format_size`)."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes} bytes"
