"""How much memory a step could still take on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on the device, with what torch holds of it and does not use; None where nobody says."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    found = [each for each in (_machine(), _group(), _process()) if each is not None]
    return max(0, min(found)) if found else None


def _machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _group() -> int | None:
    """What the control group of a container leaves."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        caches = sum(
            int(line.split()[1])
            for line in (folder / "memory.stat").read_text().splitlines()
            if line.startswith(("active_file ", "inactive_file "))
        )
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + caches


def _process() -> int | None:
    """What is left of the process's address space, where that is limited."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
    except ImportError:
        return None
    used = mapped_bytes()
    return None if used is None else limit - used


def mapped_bytes() -> int | None:
    """What the process has mapped: tensors, and libraries, stacks and what malloc keeps as well."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
