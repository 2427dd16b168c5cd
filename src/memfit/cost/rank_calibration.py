"""Calibration with as many ranks as will share this machine: all of them at once, and the collectives between them.

Note [Ranks of one machine]: ranks of a CPU have its cores and its memory's bandwidth in common, and more ranks than
cores take turns. So every rank times the same ops at the same time, and what is written is what one rank reaches while
the others work too. Times of a machine that had one rank are of no use then, nor are these to it: nothing is cached.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from memfit.cost.calibration import Calibration, calibrate
from memfit.cost.collectives import Algorithm, Collective, Group, collective_figures, traffic
from memfit.errors import InputError
from memfit.hardware import Device, Link, load_device

_SIZES = tuple(1 << power for power in range(14, 25, 2))
_REPEATS = 9
_LEAST = 1e-9


def calibrate_on_ranks(
    device: str | Device = "cpu", *, name: str | None = None, progress: bool = True, folder: Path | None = None
) -> Calibration:
    """Measure on every rank of the process group at once, which all of them must call; return this rank's figures.

    The link between ranks is the same on all. See Note [Ranks of one machine].
    """
    if not dist.is_initialized():
        raise InputError("there is no process group: start with torchrun --nproc-per-node 2 -m memfit calibrate")
    base = load_device(device) if isinstance(device, str) else device
    if base.type != "cpu":
        raise InputError(f"ranks that share a machine are calibrated on its CPU, not on {base.name!r}")
    ranks = dist.get_world_size()
    link = measure_link(base)
    dist.barrier()
    with tempfile.TemporaryDirectory() as temporary:
        own = calibrate(base, folder=folder or Path(temporary), progress=progress and dist.get_rank() == 0)
    dist.barrier()  # the others have worked until here, too
    return replace(own, name=name or f"{base.name}-{ranks}-ranks", link=link, ranks=ranks)


def measure_link(base: Device) -> Link:
    """Time collectives of several sizes between all ranks, and fit the latency and bandwidth of a link to them."""
    backend, ranks = collective_figures().backend(base), dist.get_world_size()
    rows, times = [], []
    for kind in (Collective.ALL_GATHER, Collective.ALL_REDUCE):
        needed = traffic(kind, Algorithm.RING, Group(nodes=1, ranks_per_node=ranks))
        for n_bytes in _SIZES:
            rows.append((needed.intra_hops, needed.intra_share * n_bytes))
            times.append(max(_LEAST, _slowest_ms(_collective(kind, n_bytes)) - backend.launch_ms))
    latency_ms, ms_per_byte = fit_link(rows, times)
    return Link(name="measured", kind="gloo", bandwidth_bytes_per_s=1e3 / ms_per_byte, latency_ms=latency_ms)


def fit_link(rows: list[tuple[int, float]], times: list[float]) -> tuple[float, float]:
    """Return milliseconds of a hop and of a byte that come nearest to the times, each weighed by its own length."""
    matrix, measured = np.array(rows, float), np.array(times)
    found, *_ = np.linalg.lstsq(matrix / measured[:, None], np.ones_like(measured), rcond=None)
    latency_ms, ms_per_byte = found.tolist()
    return max(_LEAST, latency_ms), max(_LEAST / 1e6, ms_per_byte)


def _collective(kind: Collective, n_bytes: int) -> Callable[[], None]:
    whole = torch.ones(n_bytes // 4)
    part = torch.ones(-(-whole.numel() // dist.get_world_size()))
    if kind is Collective.ALL_GATHER:
        gathered = torch.empty(part.numel() * dist.get_world_size())
        return lambda: dist.all_gather_into_tensor(gathered, part)
    return lambda: dist.all_reduce(whole)


def _slowest_ms(run: Callable[[], None]) -> float:
    """Return the median time of a collective, on the rank where it is longest."""
    run()
    found = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        run()
        found.append((time.perf_counter() - began) * 1e3)
    slowest = torch.tensor(statistics.median(found), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()
