"""What the process has allocated with malloc at this moment, as the C library counts it.

Note [In use]: the kernel counts pages, and malloc keeps pages that were freed: a process that grew in an earlier step
does not grow in this one. The C library knows what is in use. That has tensors and everything else, so differences
between two moments are of use, not the number itself.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_TRIAL_BYTES = 1 << 20


class _Info(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def in_use_bytes() -> int | None:
    """Bytes in use (Note [In use]); None where the C library does not say, or where tensors have another malloc."""
    count = _counter()
    return None if count is None else count()


@functools.cache
def _counter() -> Callable[[], int] | None:
    """glibc's count, tried on a tensor: another malloc may have taken its place."""
    try:
        info = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    info.restype = _Info

    def count() -> int:
        found = info()
        return found.uordblks + found.hblkhd

    before = count()
    trial = torch.empty(_TRIAL_BYTES, dtype=torch.uint8)
    seen = count() - before
    del trial
    return count if seen >= _TRIAL_BYTES else None
