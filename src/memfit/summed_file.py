"""Bytes in a file, believed only when their sums are those that were written.

The engines offload a CPU's tensors so, and `memfit calibrate` measures how fast that is.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

Content = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]

OFFLOAD_FOLDER = "MEMFIT_OFFLOAD"
"""The environment variable that names the folder of the file; without it, the one of Python's `tempfile`."""
COPY_THREADS = 2
"""How many threads write and read beside a step."""
_CHUNK_BYTES = 8 << 20
_PAGE_BYTES = 4096


def write_summed(file: int, content: Content, offset: int) -> list[Sums]:
    """Write everything at an offset of the file; return the sums of its pages."""
    sums = []
    for begin in range(0, len(content), _CHUNK_BYTES):
        chunk = content[begin : begin + _CHUNK_BYTES]
        sums.append(page_sums(chunk))
        done = 0
        while done < len(chunk):
            done += os.pwrite(file, chunk[done:].data, offset + begin + done)
    return sums


def read_summed(file: int, content: Content, offset: int, sums: list[Sums]) -> None:
    """Fill `content` from an offset of the file; raise where the file ends early or holds other bytes."""
    for number, begin in enumerate(range(0, len(content), _CHUNK_BYTES)):
        chunk = content[begin : begin + _CHUNK_BYTES]
        done = 0
        while done < len(chunk):
            count = os.preadv(file, [chunk[done:].data], offset + begin + done)
            if not count:
                raise EOFError(f"the file ends {len(content) - begin - done} bytes early")
            done += count
        if not np.array_equal(page_sums(chunk), sums[number]):
            raise ValueError("the file holds other bytes than were written")


def page_sums(content: Content) -> Sums:
    """Return the sums of the words of each page, which take a tenth of the time of a CRC."""
    whole = len(content) // _PAGE_BYTES * _PAGE_BYTES
    pages = content[:whole].view(np.uint64).reshape(-1, _PAGE_BYTES // 8).sum(axis=1, dtype=np.uint64)
    rest = np.zeros(_PAGE_BYTES, np.uint8)
    rest[: len(content) - whole] = content[whole:]
    return np.append(pages, rest.view(np.uint64).sum(dtype=np.uint64))
