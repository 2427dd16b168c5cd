"""Calibration with as many ranks as will share this machine: all of them at once, and the collectives between them.

Note [Ranks of one machine]: ranks of a CPU have its cores and its memory's bandwidth in common. So as many ranks as the
cores can run time the same ops at the same time, and what is written is what one rank reaches while the others work
too. More ranks than that take turns: a short op is then either not interrupted at all, or for many times its length,
so that no median of its times is what it takes in the long run. The ranks that are too many wait meanwhile, and every
time is multiplied by how many ranks share a core. Whole steps are then run by all ranks, and correct this. Each stretch
is begun by all at once: a rank whose neighbour is done has the machine for itself. Times of a machine that had one rank
are of no use to several, nor are these to it: nothing is cached.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from memfit.capture import Step
from memfit.cost.calibration import STEP_REPEATS, Calibration, calibrate, with_long_run
from memfit.cost.collectives import Collective, Group, collective_figures, traffic
from memfit.cost.host import phases_ms
from memfit.errors import InputError
from memfit.hardware import CollectiveRate, Device, Efficiency, FamilyEfficiency, HostTimes, Link, load_device

_SIZES = tuple(1 << power for power in range(14, 25, 2))
_REPEATS = 9
_LEAST = 1e-9


def calibrate_on_ranks(
    device: str | Device = "cpu", *, name: str | None = None, progress: bool = True, folder: Path | None = None
) -> Calibration:
    """Measure on every rank of the process group at once, which all of them must call; return the first's figures.

    See Note [Ranks of one machine]. What the engines that shard take is measured by `verify.calibrate_engines`.
    """
    if not dist.is_initialized():
        raise InputError("there is no process group: start with torchrun --nproc-per-node 2 -m memfit calibrate")
    base = load_device(device) if isinstance(device, str) else device
    if base.type != "cpu":
        raise InputError(f"ranks that share a machine are calibrated on its CPU, not on {base.name!r}")
    ranks = dist.get_world_size()
    link = measure_link(base)
    dist.barrier()
    at_once = min(ranks, max(1, (os.cpu_count() or 1) // torch.get_num_threads()))
    timing = dist.new_group(list(range(at_once)))
    own: list[Calibration | None] = [None]
    if isinstance(timing, dist.ProcessGroup):  # this rank is in it
        with tempfile.TemporaryDirectory() as temporary:
            own = [
                calibrate(
                    base,
                    folder=folder or Path(temporary),
                    progress=progress and dist.get_rank() == 0,
                    meet=partial(dist.barrier, timing),
                )
            ]
    dist.barrier()
    dist.broadcast_object_list(own)
    found = own[0]
    assert found is not None
    efficiency = take_turns(found.efficiency, ranks / at_once)
    named = name or f"{base.name}-{ranks}-ranks"
    found = replace(found, name=named, efficiency=efficiency, link=link, ranks=ranks)
    return with_long_run(found, _step_ms)


def _step_ms(step: Step) -> float:
    """Return the time of a step while every rank runs it, the mean of all."""
    dist.barrier()
    taken = torch.tensor(float(phases_ms(step, "cpu", STEP_REPEATS).sum()), dtype=torch.float64)
    dist.all_reduce(taken)
    return taken.item() / dist.get_world_size()


def take_turns(efficiency: Efficiency, turns: float) -> Efficiency:
    """Return what a rank reaches that has a core for one part in so many of the time."""

    def slower(each: FamilyEfficiency) -> FamilyEfficiency:
        return replace(
            each,
            compute=each.compute / turns,
            bandwidth=each.bandwidth / turns,
            overhead_ms=each.overhead_ms * turns,
        )

    return Efficiency(
        families=tuple(map(slower, efficiency.families)),
        half=tuple(map(slower, efficiency.half)),
        host=HostTimes(**{each.name: getattr(efficiency.host, each.name) * turns for each in fields(HostTimes)}),
    )


def measure_link(base: Device) -> Link:
    """Time collectives of several sizes between all ranks, and fit the latency and bandwidth of a link to them.

    Each kind has figures of its own, since what Gloo copies and allocates beside the sending differs: its reduce-
    scatter is an all-reduce of a copy, and parts that ranks send straight to each other are not copied at all.
    """
    backend, ranks = collective_figures().backend(base), dist.get_world_size()
    rows, times, rates = [], [], []
    for kind, begin in _COLLECTIVES.items():
        algorithm = backend.algorithms[backend.run_as(kind)][0]
        needed = traffic(backend.run_as(kind), algorithm, Group(nodes=1, ranks_per_node=ranks))
        own = [(needed.intra_hops, needed.intra_share * n_bytes) for n_bytes in _SIZES]
        taken = [max(_LEAST, _slowest_ms(begin(n_bytes, ranks)) - backend.launch_ms) for n_bytes in _SIZES]
        latency_ms, ms_per_byte = fit_link(own, taken)
        rates.append(CollectiveRate(kind=kind.value, bandwidth_bytes_per_s=1e3 / ms_per_byte, latency_ms=latency_ms))
        rows += own
        times += taken
    latency_ms, ms_per_byte = fit_link(rows, times)
    return Link(
        name="measured",
        kind="gloo",
        bandwidth_bytes_per_s=1e3 / ms_per_byte,
        latency_ms=latency_ms,
        collectives=tuple(rates),
    )


def fit_link(rows: list[tuple[int, float]], times: list[float]) -> tuple[float, float]:
    """Return milliseconds of a hop and of a byte that come nearest to the times, each weighed by its own length."""
    matrix, measured = np.array(rows, float), np.array(times)
    found, *_ = np.linalg.lstsq(matrix / measured[:, None], np.ones_like(measured), rcond=None)
    latency_ms, ms_per_byte = found.tolist()
    return max(_LEAST, latency_ms), max(_LEAST / 1e6, ms_per_byte)


def _all_gather(n_bytes: int, ranks: int) -> Callable[[], None]:
    whole, part = _whole_and_part(n_bytes, ranks)
    return lambda: dist.all_gather_into_tensor(whole, part)


def _reduce_scatter(n_bytes: int, ranks: int) -> Callable[[], None]:
    whole, part = _whole_and_part(n_bytes, ranks)
    return lambda: dist.reduce_scatter_tensor(part, whole)


def _all_reduce(n_bytes: int, ranks: int) -> Callable[[], None]:
    whole, _ = _whole_and_part(n_bytes, ranks)
    return lambda: dist.all_reduce(whole)


def _all_to_all(n_bytes: int, ranks: int) -> Callable[[], None]:
    """Every rank sends its part to each other, as memfit's sharded runtime does on CPUs."""
    whole, part = _whole_and_part(n_bytes, ranks)
    others = [rank for rank in range(ranks) if rank != dist.get_rank()]
    places = whole.chunk(ranks)

    def run() -> None:
        works = [dist.irecv(places[rank], rank) for rank in others] + [dist.isend(part, rank) for rank in others]
        for work in works:
            assert work is not None
            work.wait()

    return run


def _whole_and_part(n_bytes: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    part = torch.ones(-(-n_bytes // (4 * ranks)))
    return torch.ones(part.numel() * ranks), part


_COLLECTIVES: dict[Collective, Callable[[int, int], Callable[[], None]]] = {
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_TO_ALL: _all_to_all,
}


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
