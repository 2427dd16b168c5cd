"""The bandwidth of the disk that a CPU offloads to: temporary files, mapped into memory, as the engine uses them.

What is measured is what a step waits for: space is reserved, so that a full disk is an error and no broken mapping; a
tensor is copied into the mapping; and it is copied back into a new tensor. The kernel writes pages to the disk by
itself, beside the step, and may still hold them when they are read.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from memfit.hardware import OffloadLink

_BYTES = 64 << 20
_REPEATS = 5


def measure_disk(folder: Path | None = None, *, n_bytes: int = _BYTES, repeats: int = _REPEATS) -> OffloadLink:
    """Time copies to and from new mapped files in `folder`, by default that of temporary files.

    Raise `OSError` where the folder cannot be written to or has no space.
    """
    source = torch.ones(n_bytes, dtype=torch.uint8)
    away, back = [], []
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for number in range(repeats):
            path = os.path.join(temporary, str(number))
            began = time.perf_counter()
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, n_bytes)
            mapped = torch.from_file(path, shared=True, size=n_bytes, dtype=torch.uint8)
            mapped.copy_(source)
            away.append(time.perf_counter() - began)
            began = time.perf_counter()
            found = torch.empty_like(source).copy_(mapped)
            back.append(time.perf_counter() - began)
            del mapped, found
            os.unlink(path)
    return OffloadLink(
        name="disk",
        to_host_bytes_per_s=n_bytes / statistics.median(away),
        to_device_bytes_per_s=n_bytes / statistics.median(back),
    )
