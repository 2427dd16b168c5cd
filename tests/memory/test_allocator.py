"""The caching allocator against sequences worked out by hand from c10/cuda/CUDACachingAllocator.cpp,
against a second implementation by linear scan, and against invariants that hold for any sequence."""

from __future__ import annotations

import cProfile
import pickle
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import InputError, StateError
from memfit.memory.allocator import (
    FREE,
    AllocatorConfig,
    AllocatorOutOfMemory,
    BlockState,
    CachingAllocator,
    MemoryEvent,
    simulate,
)

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
DEFAULT = AllocatorConfig()
EXPANDABLE = AllocatorConfig(expandable_segments=True)

# Each case: what it shows, configuration, events, allocated bytes and reserved bytes after each event.
SEQUENCES = [
    (
        "get_free_block: a free block serves only the stream that it was allocated on",
        DEFAULT,
        [(0, 30 * MIB, 1), (0, FREE), (1, 30 * MIB, 2), (2, 30 * MIB, 1), (1, FREE), (3, 20 * MIB, 2)],
        [30 * MIB, 0, 30 * MIB, 60 * MIB, 30 * MIB, 50 * MIB],
        [30 * MIB, 30 * MIB, 60 * MIB, 60 * MIB, 60 * MIB, 60 * MIB],
    ),
    (
        "release_cached_blocks: at the limit free blocks of every stream go back, and are another stream's after that",
        AllocatorConfig(limit_bytes=40 * MIB),
        [(0, 30 * MIB, 1), (0, FREE), (1, 30 * MIB, 2)],
        [30 * MIB, 0, 30 * MIB],
        [30 * MIB, 30 * MIB, 30 * MIB],
    ),
    (
        "find_expandable_block: an expandable segment belongs to one stream",
        EXPANDABLE,
        [(0, 30 * MIB, 1), (0, FREE), (1, 30 * MIB, 2), (2, 40 * MIB, 1)],
        [30 * MIB, 0, 30 * MIB, 70 * MIB],
        [40 * MIB, 40 * MIB, 80 * MIB, 80 * MIB],
    ),
    (
        "round_size: at least 512 bytes, then multiples of 512; one small segment of 2 MiB serves them",
        DEFAULT,
        [(0, 1), (1, 512), (2, 513), (0, FREE), (2, FREE), (1, FREE)],
        [512, 1024, 2048, 1536, 512, 0],
        [2 * MIB] * 6,
    ),
    (
        "allocate(0) gives a null pointer and takes no block",
        DEFAULT,
        [(0, 0), (1, 100), (0, FREE), (1, FREE)],
        [0, 512, 512, 0],
        [0, 2 * MIB, 2 * MIB, 2 * MIB],
    ),
    (
        "get_pool: 1 MiB is small, one byte more is large (kSmallSize)",
        DEFAULT,
        [(0, MIB), (1, MIB), (2, MIB + 1)],
        [MIB, 2 * MIB, 3 * MIB + 512],
        [2 * MIB, 2 * MIB, 22 * MIB],
    ),
    (
        "get_allocation_size: 20 MiB below kMinLargeAlloc, then multiples of 2 MiB (kRoundLarge)",
        DEFAULT,
        [(0, 10 * MIB - 512), (1, 10 * MIB - 512), (2, 10 * MIB), (3, 11 * MIB)],
        # 1 takes the rest of 0's segment (10 MiB + 512), and keeps the odd 1024 bytes, too few to split.
        [10 * MIB - 512, 20 * MIB, 30 * MIB, 42 * MIB],
        [20 * MIB, 20 * MIB, 30 * MIB, 42 * MIB],
    ),
    (
        "should_split: in the large pool a remainder of 1 MiB stays with the block",
        DEFAULT,
        [(0, 11 * MIB), (1, 1 * MIB + 512), (0, FREE)],
        # 0 gets a segment of 12 MiB whole; 1 opens a segment of 20 MiB and splits it.
        [12 * MIB, 13 * MIB + 512, MIB + 512],
        [12 * MIB, 32 * MIB, 32 * MIB],
    ),
    (
        "should_split: in the large pool more than 1 MiB becomes a free block",
        DEFAULT,
        [(0, 10 * MIB + 512), (0, FREE), (1, 10 * MIB + 512), (2, 12 * MIB), (1, FREE), (3, 10 * MIB)],
        # A segment of 12 MiB less 10 MiB + 512 leaves 2 MiB - 512, which is split off again each time.
        [10 * MIB + 512, 0, 10 * MIB + 512, 22 * MIB + 512, 12 * MIB, 22 * MIB],
        [12 * MIB, 12 * MIB, 12 * MIB, 24 * MIB, 24 * MIB, 24 * MIB],
    ),
    (
        "should_split: in the small pool 512 bytes are enough",
        DEFAULT,
        [(0, MIB), (1, MIB - 512), (2, 512), (3, 1)],
        [MIB, 2 * MIB - 512, 2 * MIB, 2 * MIB + 512],
        [2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB],
    ),
    (
        "get_free_block: the smallest block that fits, not the first",
        DEFAULT,
        [(0, 100 * MIB), (1, 50 * MIB), (0, FREE), (1, FREE), (2, 40 * MIB), (3, 90 * MIB)],
        # 2 takes the 50 MiB block, so that 3 still finds its 100 MiB and nothing more is reserved.
        [100 * MIB, 150 * MIB, 50 * MIB, 0, 40 * MIB, 130 * MIB],
        [100 * MIB, 150 * MIB, 150 * MIB, 150 * MIB, 150 * MIB, 150 * MIB],
    ),
    (
        "try_merge_blocks: neighbours join into one block, blocks of two segments never",
        DEFAULT,
        [
            (0, 8 * MIB),
            (1, 8 * MIB),
            (2, 8 * MIB),
            (0, FREE),
            (1, FREE),
            (2, FREE),
            (3, 20 * MIB),
            (4, 40 * MIB),
        ],
        [8 * MIB, 16 * MIB, 24 * MIB, 16 * MIB, 8 * MIB, 0, 20 * MIB, 60 * MIB],
        [20 * MIB, 20 * MIB, 40 * MIB, 40 * MIB, 40 * MIB, 40 * MIB, 40 * MIB, 80 * MIB],
    ),
    (
        "get_free_block: a request below max_split_size leaves oversize blocks alone",
        AllocatorConfig(max_split_bytes=100 * MIB),
        [(0, 200 * MIB), (0, FREE), (1, 50 * MIB), (2, 180 * MIB), (3, 190 * MIB)],
        # 2 may not have it: 200 is not below 180 + 20 (max_non_split_rounding). 3 takes it unsplit.
        [200 * MIB, 0, 50 * MIB, 230 * MIB, 430 * MIB],
        [200 * MIB, 200 * MIB, 250 * MIB, 430 * MIB, 430 * MIB],
    ),
    (
        "release_available_cached_blocks: an oversize block large enough goes back to the device",
        AllocatorConfig(max_split_bytes=100 * MIB, limit_bytes=420 * MIB),
        [(0, 150 * MIB), (1, 200 * MIB), (0, FREE), (1, FREE), (2, 110 * MIB)],
        # Neither is within 20 MiB of 110; the smallest that is at least 110 is released: 150. The 200 stay.
        [150 * MIB, 350 * MIB, 200 * MIB, 0, 110 * MIB],
        [150 * MIB, 350 * MIB, 350 * MIB, 350 * MIB, 310 * MIB],
    ),
    (
        "release_available_cached_blocks: several, the largest first, when no single one is enough",
        AllocatorConfig(max_split_bytes=100 * MIB, limit_bytes=500 * MIB),
        [(0, 110 * MIB), (1, 120 * MIB), (2, 130 * MIB), (0, FREE), (1, FREE), (2, FREE), (3, 240 * MIB)],
        # 130 and 120 are given back, which suffices for 240; 110 stays.
        [110 * MIB, 230 * MIB, 360 * MIB, 250 * MIB, 130 * MIB, 0, 240 * MIB],
        [110 * MIB, 230 * MIB, 360 * MIB, 360 * MIB, 360 * MIB, 360 * MIB, 350 * MIB],
    ),
    (
        "release_available_cached_blocks: a request below max_split_size also releases an oversize block",
        AllocatorConfig(max_split_bytes=100 * MIB, limit_bytes=250 * MIB),
        [(0, 60 * MIB), (1, 150 * MIB), (2, 5 * MIB), (0, FREE), (1, FREE), (3, 70 * MIB)],
        # Nothing serves 70: 60 is too small, 150 oversize. The 150 goes back, the 60 stays cached.
        [60 * MIB, 210 * MIB, 215 * MIB, 155 * MIB, 5 * MIB, 75 * MIB],
        [60 * MIB, 210 * MIB, 230 * MIB, 230 * MIB, 230 * MIB, 150 * MIB],
    ),
    (
        "release_available_cached_blocks: blocks below max_split_size are left to release_cached_blocks",
        AllocatorConfig(max_split_bytes=100 * MIB, limit_bytes=180 * MIB),
        [(0, 90 * MIB), (1, 1), (0, FREE), (2, 110 * MIB), (1, FREE)],
        # No oversize block is cached; release_cached_blocks then gives the 90 back.
        [90 * MIB, 90 * MIB + 512, 512, 110 * MIB + 512, 110 * MIB],
        [90 * MIB, 92 * MIB, 92 * MIB, 112 * MIB, 112 * MIB],
    ),
    (
        "release_cached_blocks: every unsplit free segment goes, of both pools; split ones stay",
        AllocatorConfig(limit_bytes=100 * MIB),
        [(0, 40 * MIB), (1, 5 * MIB), (2, 5 * MIB), (3, 100), (0, FREE), (1, FREE), (3, FREE), (4, 80 * MIB)],
        [40 * MIB, 45 * MIB, 50 * MIB, 50 * MIB + 512, 10 * MIB + 512, 5 * MIB + 512, 5 * MIB, 85 * MIB],
        [40 * MIB, 60 * MIB, 60 * MIB, 62 * MIB, 62 * MIB, 62 * MIB, 62 * MIB, 100 * MIB],
    ),
    (
        "map_block: pages of 2 MiB in the small pool and 20 MiB in the large one",
        EXPANDABLE,
        [(0, 1), (1, 2 * MIB), (2, 15 * MIB), (3, 5 * MIB), (4, 100 * MIB)],
        # 2 takes 15 of the 18 MiB left; 3 finds 3 MiB at the edge and maps a page, 4 finds 18 and maps five.
        [512, 2 * MIB + 512, 17 * MIB + 512, 22 * MIB + 512, 122 * MIB + 512],
        [2 * MIB, 22 * MIB, 22 * MIB, 42 * MIB, 142 * MIB],
    ),
    (
        "should_split: with expandable segments 512 bytes are enough in the large pool too",
        EXPANDABLE,
        [(0, 20 * MIB - 512), (1, 20 * MIB + 512), (0, FREE), (2, 19 * MIB), (3, MIB - 512)],
        [20 * MIB - 512, 40 * MIB, 20 * MIB + 512, 39 * MIB + 512, 40 * MIB],
        [20 * MIB, 40 * MIB, 40 * MIB, 40 * MIB, 42 * MIB],
    ),
    (
        "try_allocate_expandable_block: freed neighbours and new pages make one block",
        EXPANDABLE,
        [(0, 30 * MIB), (1, 30 * MIB), (0, FREE), (1, FREE), (2, 70 * MIB)],
        [30 * MIB, 60 * MIB, 30 * MIB, 0, 70 * MIB],
        [40 * MIB, 60 * MIB, 60 * MIB, 60 * MIB, 80 * MIB],
    ),
    (
        "get_free_block: a block at the edge counts with what it can grow to, so a larger hole is preferred",
        EXPANDABLE,
        # [0: 30][1: 5][edge: 5]: 2 fits the edge (5 MiB) best, but the hole of 0 cannot grow and is taken.
        [(0, 30 * MIB), (1, 5 * MIB), (0, FREE), (2, 5 * MIB), (3, 5 * MIB), (4, 20 * MIB), (5, 5 * MIB)],
        [30 * MIB, 35 * MIB, 5 * MIB, 10 * MIB, 15 * MIB, 35 * MIB, 40 * MIB],
        [40 * MIB] * 7,
    ),
]


@pytest.mark.parametrize(
    ("config", "events", "allocated", "reserved"),
    [pytest.param(*case[1:], id=case[0].split(":")[0] + f"-{i}") for i, case in enumerate(SEQUENCES)],
)
def test_sequences_worked_out_from_the_source(config, events, allocated, reserved):
    result = simulate([MemoryEvent(*event) for event in events], config)
    assert result.allocated_bytes.tolist() == allocated
    assert result.reserved_bytes.tolist() == reserved


@pytest.mark.parametrize(
    ("requested_bytes", "divisions", "rounded_bytes"),
    [
        # roundup_power2_next_division: "1200 and 4 divisions" is the example of its comment, scaled by 1024
        (1200 * KIB, (4,), 1280 * KIB),
        # test_cuda.py, test_allocator_settings: 21 Mi floats with 4 divisions, and with [64:8,…]
        (84 * MIB, (4,), 96 * MIB),
        (84 * MIB, (0, 0, 0, 0, 0, 0, 8, *[0] * 9), 88 * MIB),
        (84 * MIB, (8, 8, 8, 8, 8, 8, 0, *[8] * 9), 84 * MIB),
        (100 * GIB, (*[0] * 15, 2), 128 * GIB),
        (2 * KIB, (4,), 2 * KIB),  # round_size: divisions apply above 512 * divisions only
        (2 * KIB + 1, (4,), 2 * KIB + 512),
        (64 * MIB, (4,), 64 * MIB),
        (3 * MIB + 1, (1,), 3 * MIB + 512),  # one division is none
        (3 * MIB + 1, (), 3 * MIB + 512),
    ],
)
def test_round_size_with_power_of_two_divisions(requested_bytes, divisions, rounded_bytes):
    assert AllocatorConfig(roundup_power2_divisions=divisions).round_size(requested_bytes) == rounded_bytes


@pytest.mark.parametrize("config", [DEFAULT, EXPANDABLE], ids=["native", "expandable"])
def test_ties_in_size_go_to_the_lowest_address(config):
    """BlockComparatorSize orders by size, then by pointer; growing to the same size is no reason to go on."""
    allocator = CachingAllocator(config)
    for key in range(6):
        allocator.malloc(key, 30 * MIB)
    for key in (4, 0, 2):
        allocator.free(key)
    allocator.malloc(6, 30 * MIB)
    keys = [block.key for segment in allocator.segments() for block in segment.blocks]
    assert keys == [6, 1, None, 3, None, 5]


def test_a_hole_that_cannot_grow_is_taken_before_the_edge():
    """The loop over expandable_size in get_free_block."""
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(0, 30 * MIB)
    allocator.malloc(1, 5 * MIB)
    allocator.free(0)
    allocator.malloc(2, 5 * MIB)
    (segment,) = allocator.segments()
    assert [(b.key, b.size_bytes // MIB) for b in segment.blocks] == [(2, 5), (None, 25), (1, 5), (None, 5)]


def test_pages_are_unmapped_at_the_limit_and_gaps_filled_first():
    """release_blocks, unmap_block, find_expandable_block."""
    allocator = CachingAllocator(AllocatorConfig(expandable_segments=True, limit_bytes=100 * MIB))
    allocator.malloc(0, 50 * MIB)
    allocator.malloc(1, 10 * MIB)
    allocator.malloc(2, 40 * MIB)
    base = allocator.segments()[0].address
    allocator.free(0)
    # [50 free][1: 10][2: 40], all 100 MiB mapped. 51 MiB fit no hole; pages 0 and 1 go back, not enough.
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(3, 51 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    (segment,) = allocator.segments()
    assert segment.address == base + 40 * MIB
    assert [(b.key, b.size_bytes // MIB) for b in segment.blocks] == [(None, 10), (1, 10), (2, 40)]
    # 45 MiB: the gap of 40 and the free 10 behind it are the lowest place with room; both pages come back.
    allocator.malloc(4, 45 * MIB)
    assert allocator.reserved_bytes == 100 * MIB
    (segment,) = allocator.segments()
    assert segment.address == base
    assert [(b.key, b.size_bytes // MIB) for b in segment.blocks] == [(4, 45), (None, 5), (1, 10), (2, 40)]
    assert allocator.retries == 1


@pytest.mark.parametrize(
    ("requested_bytes", "ranges"),
    [
        (60 * MIB, [[1], [3, 4]]),  # behind the edge, at 120 of 180 MiB of addresses: 1 1/8 of the device
        (80 * MIB, [[1], [3], [4]]),  # no room for it there, so find_expandable_block opens a second segment
    ],
)
def test_pages_move_elsewhere_when_no_gap_is_large_enough(requested_bytes, ranges):
    allocator = CachingAllocator(AllocatorConfig(expandable_segments=True, limit_bytes=160 * MIB))
    for key, mib in enumerate((40, 20, 40, 20)):
        allocator.malloc(key, mib * MIB)
    allocator.free(0)
    allocator.free(2)
    # Free pages: two at the front and two in the middle; only two more fit under the limit.
    allocator.malloc(4, requested_bytes)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 40 * MIB + requested_bytes
    assert [[b.key for b in s.blocks] for s in allocator.segments()] == ranges


def test_pages_mapped_before_a_failure_count_in_the_peak():
    """try_allocate_expandable_block maps in steps; what it mapped stays mapped when a later step fails."""
    allocator = CachingAllocator(AllocatorConfig(expandable_segments=True, limit_bytes=100 * MIB))
    for key in range(3):
        allocator.malloc(key, 20 * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.empty_cache()
    allocator.free(1)  # large pool: a page not mapped, a free page, then addresses not mapped
    for key in range(50):
        allocator.malloc(key, MIB)
    for key in range(50):
        allocator.free(key)
    assert allocator.reserved_bytes == 70 * MIB
    allocator.reset_peaks()
    # 41 MiB: the first page is mapped (90), the third does not fit (110); all is released, then 60 mapped.
    allocator.malloc(0, 41 * MIB)
    assert allocator.peak_reserved_bytes == 90 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_empty_cache_gives_back_an_empty_expandable_segment():
    """release_expandable_segment."""
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(0, 30 * MIB)
    allocator.malloc(1, 100)
    allocator.free(0)
    allocator.free(1)
    assert allocator.reserved_bytes == 42 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.segments() == ()
    allocator.malloc(0, 30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_out_of_memory_says_what_torch_says():
    allocator = CachingAllocator(AllocatorConfig(limit_bytes=64 * MIB))
    allocator.malloc(0, 30 * MIB)
    allocator.malloc(1, 6 * MIB)
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(2, 30 * MIB)
    error = caught.value
    assert (error.tried_bytes, error.free_bytes, error.unused_bytes) == (30 * MIB, 14 * MIB, 14 * MIB)
    assert "Tried to allocate 30.00 MiB" in str(error)
    assert "64.00 MiB of which 14.00 MiB is free" in str(error)
    assert "36.00 MiB is allocated, and 14.00 MiB is reserved but unallocated" in str(error)
    assert isinstance(error, StateError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    # As in torch, the caller may free something and go on.
    allocator.free(0)
    allocator.malloc(2, 44 * MIB)
    assert allocator.reserved_bytes == 64 * MIB


def test_simulate_names_the_event_that_does_not_fit():
    events = [MemoryEvent(0, MIB), MemoryEvent(0, FREE), MemoryEvent(1, GIB)]
    with pytest.raises(AllocatorOutOfMemory, match="at event 2") as caught:
        simulate(events, AllocatorConfig(limit_bytes=100 * MIB))
    assert caught.value.event_index == 2


def test_simulate_gives_the_first_event_of_each_peak():
    events = [(0, 30 * MIB), (1, 30 * MIB), (0, FREE), (1, FREE), (2, 31 * MIB), (3, 29 * MIB), (4, 0)]
    result = simulate(events)
    assert (result.peak_requested_bytes, result.peak_allocated_bytes) == (60 * MIB, 62 * MIB)
    assert result.peak_reserved_bytes == 92 * MIB
    # 31 MiB take a segment of 32 MiB whole; 29 MiB take a free one of 30 MiB whole.
    assert (result.peak_allocated_event, result.peak_reserved_event) == (5, 4)
    assert result.allocated_bytes.dtype == result.reserved_bytes.dtype == np.int64


def test_simulate_of_nothing_has_no_peak_event():
    result = simulate([(0, 0), (0, FREE)])
    assert result.peak_allocated_event is result.peak_reserved_event is None
    assert result.peak_reserved_bytes == 0
    assert simulate([]).allocated_bytes.shape == (0,)


def test_reset_peaks_starts_from_what_is_held():
    allocator = CachingAllocator()
    allocator.malloc(0, 50 * MIB)
    allocator.malloc(1, MIB)
    allocator.free(0)
    allocator.reset_peaks()
    assert allocator.peak_allocated_bytes == allocator.allocated_bytes == MIB
    assert allocator.peak_requested_bytes == MIB
    assert allocator.peak_reserved_bytes == 52 * MIB


def test_snapshot_lists_blocks_with_their_state():
    allocator = CachingAllocator()
    allocator.malloc(7, 3 * MIB + 1)
    (segment,) = allocator.segments()
    assert (segment.size_bytes, segment.is_large, segment.is_expandable) == (20 * MIB, True, False)
    used, rest = segment.blocks
    assert (used.key, used.requested_bytes, used.size_bytes) == (7, 3 * MIB + 1, 3 * MIB + 512)
    assert (used.state, rest.state) == (BlockState.ACTIVE, BlockState.INACTIVE)
    assert used.state.value == "active_allocated"
    assert (rest.address, rest.key, rest.requested_bytes) == (used.address + used.size_bytes, None, 0)


def test_misuse_is_refused():
    allocator = CachingAllocator()
    allocator.malloc(0, 10)
    with pytest.raises(StateError, match="still allocated"):
        allocator.malloc(0, 10)
    with pytest.raises(StateError, match="not allocated"):
        allocator.free(1)
    with pytest.raises(InputError, match="-5 bytes"):
        allocator.malloc(1, -5)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"round_bytes": 0}, "round_bytes"),
        ({"small_segment_bytes": MIB // 2}, "small_segment_bytes"),
        ({"large_segment_bytes": MIB}, "large_segment_bytes"),
        ({"max_split_bytes": MIB}, "max_split_bytes"),
        ({"limit_bytes": -1}, "limit_bytes"),
        ({"roundup_power2_divisions": (3,)}, "roundup_power2_divisions"),
        ({"roundup_power2_divisions": (2, 2)}, "roundup_power2_divisions"),
    ],
)
def test_a_configuration_that_torch_would_refuse_is_refused(options, name):
    with pytest.raises(InputError, match=name):
        AllocatorConfig(**options)


class NaiveAllocator:
    """A second implementation: segments are lists of [bytes, owner] runs, searched from end to end.

    A pool is whether it is small, and its stream. An owner is a key, "free" or "unmapped"; neighbouring runs of one
    kind are joined after every change.
    """

    def __init__(self, config: AllocatorConfig) -> None:
        self.config = config
        self.segments: list[dict] = []  # address, pool, runs
        self.next_address = 1
        self.peak_reserved = 0

    def _runs(self, pool, owner):
        found = []
        for segment in self.segments:
            address = segment["address"]
            for index, (size, who) in enumerate(segment["runs"]):
                if segment["pool"] == pool and who == owner:
                    found.append((size, address, segment, index))
                address += size
        return sorted(found, key=lambda run: run[:2])

    def _tidy(self, segment):
        runs = []
        for size, who in segment["runs"]:
            if runs and who in ("free", "unmapped") and runs[-1][1] == who:
                runs[-1][0] += size
            else:
                runs.append([size, who])
        segment["runs"] = runs

    @property
    def reserved(self):
        return sum(size for segment in self.segments for size, who in segment["runs"] if who != "unmapped")

    @property
    def allocated(self):
        return sum(
            size for segment in self.segments for size, who in segment["runs"] if who not in ("free", "unmapped")
        )

    def _fits(self, more):
        fits = self.config.limit_bytes is None or self.reserved + more <= self.config.limit_bytes
        if fits:
            self.peak_reserved = max(self.peak_reserved, self.reserved + more)
        return fits

    def _page(self, pool):
        return self.config.small_segment_bytes if pool[0] else self.config.large_segment_bytes

    def _search(self, pool, size):
        def growth(run):
            runs, index = run[2]["runs"], run[3]
            behind = runs[index + 1] if index + 1 < len(runs) else [0, "free"]
            return run[0] + (behind[0] if behind[1] == "unmapped" else 0)

        fitting = [run for run in self._runs(pool, "free") if run[0] >= size]
        if not fitting:
            return None
        if self.config.expandable_segments:
            while len(fitting) > 1 and growth(fitting[1]) < growth(fitting[0]):
                fitting.pop(0)
        limit = self.config.max_split_bytes
        if limit is not None:
            if size < limit <= fitting[0][0]:
                return None
            if size >= limit and fitting[0][0] >= size + self.config.max_non_split_rounding_bytes:
                return None
        return fitting[0][2:]

    def _grow(self, pool, size):
        if self.config.expandable_segments:
            return self._grow_expandable(pool, size)
        new = self.config.allocation_size(size)
        if not self._fits(new):
            return None
        segment = {"address": self.next_address, "pool": pool, "runs": [[new, "free"]]}
        self.next_address += new
        self.segments.append(segment)
        return segment, 0

    def _grow_expandable(self, pool, size):
        page = self._page(pool)
        places = sorted(self._runs(pool, "unmapped"), key=lambda run: run[1])
        for _, _, segment, index in places:
            start = index - 1 if index and segment["runs"][index - 1][1] == "free" else index
            room = 0
            for length, who in segment["runs"][start:]:
                if who not in ("free", "unmapped"):
                    break
                room += length
            if room >= size:
                break
        else:
            memory = self.config.limit_bytes or 1 << 44
            space = -(-(memory + memory // 8) // page) * page
            segment = {"address": self.next_address, "pool": pool, "runs": [[space, "unmapped"]]}
            self.next_address += space
            self.segments.append(segment)
            start = 0
        while segment["runs"][start][1] == "unmapped" or segment["runs"][start][0] < size:
            runs = segment["runs"]
            gap = start if runs[start][1] == "unmapped" else start + 1
            have = 0 if gap == start else runs[start][0]
            pages = min(-(-(size - have) // page) * page, runs[gap][0])
            if not self._fits(pages):
                return None
            rest = runs[gap][0] - pages
            runs[gap : gap + 1] = [[pages, "free"], [rest, "unmapped"]] if rest else [[pages, "free"]]
            self._tidy(segment)
        return segment, start

    def _release_some(self, pool, size):
        limit = self.config.max_split_bytes
        if limit is None or self.config.expandable_segments:
            return False
        target = max(size, limit)
        free = self._runs(pool, "free")
        for run in free:
            if run[0] >= target:
                self.segments.remove(run[2])
                return True
        released = 0
        for run in reversed(free):
            if released >= target or run[0] < limit:
                break
            released += run[0]
            self.segments.remove(run[2])
        return released >= target

    def empty_cache(self):
        for segment in list(self.segments):
            if not self.config.expandable_segments:
                if len(segment["runs"]) == 1 and segment["runs"][0][1] == "free":
                    self.segments.remove(segment)
                continue
            page = self._page(segment["pool"])
            runs, offset, freed = [], 0, False
            for size, who in segment["runs"]:
                begin, end = -(-offset // page) * page, (offset + size) // page * page
                if who == "free" and begin < end:
                    freed = True
                    parts = [
                        [begin - offset, "free"],
                        [end - begin, "unmapped"],
                        [offset + size - end, "free"],
                    ]
                    runs += [part for part in parts if part[0]]
                else:
                    runs.append([size, who])
                offset += size
            segment["runs"] = runs
            self._tidy(segment)
            if freed and len(segment["runs"]) == 1:
                self.segments.remove(segment)

    def malloc(self, key, requested, stream):
        if requested == 0:
            return
        size = max(-(-requested // 512) * 512, 512)
        pool = (size <= self.config.small_limit_bytes, stream)
        found = self._search(pool, size) or self._grow(pool, size)
        if not found and self._release_some(pool, size):
            found = self._grow(pool, size)
        if not found:
            self.empty_cache()
            found = self._grow(pool, size)
        if not found:
            raise MemoryError
        segment, index = found
        have = segment["runs"][index][0]
        if pool[0] or self.config.expandable_segments:
            split = have - size >= 512
        else:
            limit = self.config.max_split_bytes
            split = have - size > MIB and (limit is None or size < limit)
        segment["runs"][index : index + 1] = [[size, key], [have - size, "free"]] if split else [[have, key]]

    def free(self, key):
        for segment in self.segments:
            for run in segment["runs"]:
                if run[1] == key:
                    run[1] = "free"
                    self._tidy(segment)
                    return

    def layout(self):
        """Runs of each mapped range, in address order."""
        ranges = []
        for segment in sorted(self.segments, key=lambda segment: segment["address"]):
            current: list = []
            for size, who in [*segment["runs"], [0, "unmapped"]]:
                if who == "unmapped":
                    if current:
                        ranges.append(current)
                    current = []
                else:
                    current.append((size, None if who == "free" else who))
        return ranges


SIZES = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 24 * MIB),
    st.integers(10 * MIB, 80 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 20 * MIB, 40 * MIB]),
)
STEPS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1 << 16)), max_size=60)
CONFIGS = st.builds(
    AllocatorConfig,
    expandable_segments=st.booleans(),
    max_split_bytes=st.sampled_from([None, None, 20 * MIB, 30 * MIB, 64 * MIB]),
    limit_bytes=st.sampled_from([None, None, 60 * MIB, 150 * MIB, 301 * MIB]),
)


def to_events(steps):
    """Events from drawn steps: a malloc, or the free of one of the live keys."""
    live: list[int] = []
    for key, (is_malloc, size, choice) in enumerate(steps):
        if is_malloc or not live:
            live.append(key)
            yield MemoryEvent(key, size, choice % 3)
        else:
            yield MemoryEvent(live.pop(choice % len(live)), FREE)


def check_invariants(allocator: CachingAllocator) -> None:
    assert allocator.reserved_bytes >= allocator.allocated_bytes >= allocator.requested_bytes >= 0
    assert allocator.peak_reserved_bytes >= allocator.peak_allocated_bytes >= allocator.peak_requested_bytes
    if allocator.config.limit_bytes is not None:
        assert allocator.peak_reserved_bytes <= allocator.config.limit_bytes
    segments = allocator.segments()
    assert sum(segment.size_bytes for segment in segments) == allocator.reserved_bytes
    used = [b for segment in segments for b in segment.blocks if b.state is BlockState.ACTIVE]
    assert sum(b.size_bytes for b in used) == allocator.allocated_bytes
    assert sum(b.requested_bytes for b in used) == allocator.requested_bytes
    end = 0
    for segment in segments:
        assert segment.address >= end  # segments do not overlap
        end = segment.address
        for block in segment.blocks:
            assert block.address == end  # blocks tile the segment
            assert block.size_bytes > 0
            assert block.size_bytes % 512 == 0
            end += block.size_bytes
        assert end == segment.address + segment.size_bytes
        states = [block.state for block in segment.blocks]
        assert (BlockState.INACTIVE, BlockState.INACTIVE) not in set(pairwise(states))


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, config=CONFIGS)
def test_agrees_with_the_naive_allocator_and_keeps_its_invariants(steps, config):
    allocator, naive = CachingAllocator(config), NaiveAllocator(config)
    live = set()
    for key, size, stream in to_events(steps):
        if size == FREE:
            if key in live:
                allocator.free(key)
                naive.free(key)
                live.remove(key)
        else:
            try:
                allocator.malloc(key, size, stream)
                live.add(key)
            except AllocatorOutOfMemory:
                with pytest.raises(MemoryError):
                    naive.malloc(key, size, stream)
            else:
                naive.malloc(key, size, stream)
        check_invariants(allocator)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (naive.allocated, naive.reserved)
        assert allocator.peak_reserved_bytes == naive.peak_reserved
        layout = [[(b.size_bytes, b.key) for b in segment.blocks] for segment in allocator.segments()]
        assert layout == naive.layout()
    for key in live:
        allocator.free(key)
    assert allocator.allocated_bytes == allocator.requested_bytes == 0
    assert all(len(segment.blocks) == 1 for segment in allocator.segments())
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.segments() == ()


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_expandable_segments_waste_no_more_than_pages_at_the_peak(steps):
    """Without holes to fill, an expandable segment is at most a page per pool above its blocks."""
    mallocs = [(key, size) for key, (_, size, _) in enumerate(steps)]
    result = simulate(mallocs, EXPANDABLE)
    assert result.peak_reserved_bytes < result.peak_allocated_bytes + 22 * MIB
    assert result.peak_reserved_bytes >= simulate(mallocs).peak_requested_bytes


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, config=CONFIGS)
def test_simulate_records_what_the_allocator_holds_after_each_event(steps, config):
    allocator = CachingAllocator(config)
    events = list(to_events(steps))
    allocated, reserved = [], []
    for index, (key, size, stream) in enumerate(events):
        try:
            allocator.free(key) if size == FREE else allocator.malloc(key, size, stream)
        except AllocatorOutOfMemory:
            events = events[:index]
            break
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    result = simulate(events, config)
    assert result.allocated_bytes.tolist() == allocated
    assert result.reserved_bytes.tolist() == reserved
    assert result.peak_allocated_bytes == max(allocated, default=0)
    assert result.peak_reserved_bytes >= max(reserved, default=0)
    if result.peak_allocated_event is not None:
        assert allocated.index(result.peak_allocated_bytes) == result.peak_allocated_event


@pytest.mark.parametrize("config", [DEFAULT, EXPANDABLE], ids=["native", "expandable"])
def test_work_grows_with_the_number_of_events_and_no_faster(config):
    assert work(16_000, config) < 2.5 * work(8_000, config)


def work(count, config):
    """Python calls, when every allocation lives until all are made and they die in random order: long free lists."""
    draw = random.Random(0)
    keys = list(range(count))
    events = [MemoryEvent(key, int(10 ** draw.uniform(1, 8))) for key in keys]
    draw.shuffle(keys)
    events += [MemoryEvent(key, FREE) for key in keys]
    profiler = cProfile.Profile()
    result = profiler.runcall(simulate, events, config)
    assert result.allocated_bytes[-1] == 0
    return sum(entry.callcount for entry in profiler.getstats())
