"""What allocations take of the device's memory, as its allocator rounds them."""

from __future__ import annotations

from memfit.memory import Bytes, Timeline


def rounded(n_bytes: int, rounding_bytes: int) -> int:
    """Bytes up to the end of a block."""
    return -(-n_bytes // rounding_bytes) * rounding_bytes


def allocation_bytes(timeline: Timeline) -> Bytes:
    """What every allocation of a timeline takes."""
    return timeline.allocation_bytes
