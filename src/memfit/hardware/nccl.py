"""What NCCL takes of a device outside torch's caching allocator, as data with sources."""

from __future__ import annotations

from functools import cache
from importlib import resources

from memfit.hardware.rank_memory import ByteRange
from memfit.hardware.schema import Figure, FigureTable, Reader, Source, convert, read_toml


class _Communicator(FigureTable, frozen=True):
    low_bytes: int | Figure
    high_bytes: int | Figure


class _NcclFile(FigureTable, frozen=True):
    two_ranks: _Communicator
    more_ranks: _Communicator
    sources: dict[str, Source]


def nccl_range(ranks: int) -> ByteRange:
    """Return what NCCL takes of a device outside the allocator, for one communicator of so many ranks."""
    if ranks < 2:
        return ByteRange.exactly(0)
    return _communicators()["two_ranks" if ranks == 2 else "more_ranks"]


@cache
def _communicators() -> dict[str, ByteRange]:
    with resources.as_file(resources.files("memfit.hardware") / "data" / "nccl.toml") as path:
        file = convert(read_toml(path), _NcclFile, str(path))
        reader = Reader(str(path), file.sources)
    return {
        name: ByteRange.between(
            reader.whole(f"{name}.low_bytes", table.low_bytes), reader.whole(f"{name}.high_bytes", table.high_bytes)
        )
        for name, table in (("two_ranks", file.two_ranks), ("more_ranks", file.more_ranks))
    }
