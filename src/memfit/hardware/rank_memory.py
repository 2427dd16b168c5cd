"""What one rank has of its device: the context, NCCL's own memory and a margin are not for tensors.

Note [What a rank has]: a process holds memory that torch's caching allocator knows nothing of. The context grows as
kernels are loaded and differs between drivers by a gigabyte; NCCL's buffers depend on channels, transports and the
number of communicators. Both are ranges, with sources (data/devices/*.toml, data/nccl.toml), and what is expected of
each, the middle, is taken off the device unless it is given. What is left is `available_bytes`. Predictions of what the
allocator reserves have been off; the `margin` (data/allocators.toml) is by how much they have been too low at worst. A
plan may reserve `usable_bytes`, which with the margin on top are the available ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import InputError
from memfit.units import display_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes that are known from what was seen elsewhere: the lowest, the highest, and what to expect."""

    low_bytes: int
    expected_bytes: int
    high_bytes: int

    @classmethod
    def exactly(cls, n_bytes: int) -> ByteRange:
        """Return the range of bytes that are known."""
        return cls(low_bytes=n_bytes, expected_bytes=n_bytes, high_bytes=n_bytes)

    @classmethod
    def between(cls, low_bytes: int, high_bytes: int) -> ByteRange:
        """Return the range of which the middle is expected."""
        return cls(low_bytes=low_bytes, expected_bytes=(low_bytes + high_bytes) // 2, high_bytes=high_bytes)

    def __str__(self) -> str:
        if self.low_bytes == self.high_bytes:
            return display_bytes(self.low_bytes)
        return f"{display_bytes(self.low_bytes)} to {display_bytes(self.high_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of one rank's device and what is taken off it (Note [What a rank has])."""

    device_bytes: int
    context: ByteRange
    nccl: ByteRange
    margin: float

    @property
    def available_bytes(self) -> int:
        """What the allocator may reserve: the device less context and NCCL as they are expected."""
        return self.device_bytes - self.context.expected_bytes - self.nccl.expected_bytes

    @property
    def usable_bytes(self) -> int:
        """What a plan may reserve: with the margin it is what is available."""
        return int(self.available_bytes / (1.0 + self.margin))

    @property
    def margin_bytes(self) -> int:
        """What the margin leaves free."""
        return self.available_bytes - self.usable_bytes

    @property
    def most_bytes(self) -> int:
        """The most that the allocator can ever reserve: context and NCCL at their lowest, and no margin."""
        return self.device_bytes - self.context.low_bytes - self.nccl.low_bytes


def check_margin(margin: object) -> float:
    """Return a margin, such as 0.03 or `"3%"`, as a part of what is reserved, or refuse it."""
    if isinstance(margin, str):
        number, percent = (margin[:-1], 100.0) if margin.endswith("%") else (margin, 1.0)
        try:
            margin = float(number) / percent
        except ValueError:
            raise InputError(f"margin is {margin!r}; write a part of what is reserved, such as 0.03 or 3%") from None
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise InputError(f"margin is {margin!r}; write a part of what is reserved, from 0 to below 1, such as 0.03")
    return float(margin)
