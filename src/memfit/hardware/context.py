"""The context of a process on the GPU that is here, measured: what it holds outside torch's caching allocator."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

_QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredContext:
    """Bytes of the device that torch's caching allocator does not hold, once kernels and libraries are loaded.

    Unless it is `of_this_process`, the driver could not tell processes apart, and what others hold is in it.
    """

    size_bytes: int
    of_this_process: bool


def measure_context(index: int = 0) -> MeasuredContext | None:
    """Measure the context on a GPU after a product and a convolution, forward and backward; None without a GPU."""
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    device = torch.device("cuda", index)
    layers = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 64))
    layers.to(device)
    layers(torch.ones(8, 8, 16, 16, device=device)).sum().backward()
    torch.cuda.synchronize(device)
    held_bytes = torch.cuda.memory_reserved(device)
    used = used_by_process(_ask_driver(), os.getpid())
    if used is not None and used > held_bytes:
        return MeasuredContext(size_bytes=used - held_bytes, of_this_process=True)
    free, total = torch.cuda.mem_get_info(device)
    return MeasuredContext(size_bytes=total - free - held_bytes, of_this_process=False)


def used_by_process(listed: str, process: int) -> int | None:
    """Return the bytes of a process in what nvidia-smi lists, `pid, MiB` a line; None where it is not there.

    In a container the driver lists other numbers than the process has, or none.
    """
    for line in listed.splitlines():
        number, _, mebibytes = line.partition(",")
        if number.strip() == str(process) and mebibytes.strip().isdigit():
            return int(mebibytes) * _MIB
    return None


def _ask_driver() -> str:
    try:
        return subprocess.run(_QUERY, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
