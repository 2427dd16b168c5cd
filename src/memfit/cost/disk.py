"""The disk that a CPU offloads to, measured as a step meets it: written and read by threads, beside compute.

Copies take time, and on a CPU they also take it from the ops beside them: they need a core and the memory's bandwidth.
So threads write and read one file, as the engine's do (`summed_file.py`), while this thread computes. What is measured
is how long the copies take, and how much longer the ops do. The kernel brings pages to the disk by itself, and may
still hold them when they are read. The first round is left out: the file grows then, and later steps find it grown.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from memfit.hardware import OffloadLink
from memfit.summed_file import COPY_THREADS, OFFLOAD_FOLDER, Content, Sums, read_summed, write_summed

_T = TypeVar("_T")
_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_REPEATS = 7
_ALONE = 5


def measure_disk(folder: Path | None = None, *, n_bytes: int = _BYTES, repeats: int = _REPEATS) -> OffloadLink:
    """Time copies to and from a file in `folder`, by default the one that plans offload to, while ops run.

    Raise `OSError` where the folder cannot be written to or has no space.
    """
    offsets = range(0, n_bytes, _PIECE_BYTES)
    pieces = [np.ones(min(_PIECE_BYTES, n_bytes - offset), np.uint8) for offset in offsets]
    away: list[tuple[float, float]] = []
    back: list[tuple[float, float]] = []
    compute = _Compute()
    with (
        tempfile.TemporaryFile(dir=folder or os.environ.get(OFFLOAD_FOLDER), buffering=0) as file,
        ThreadPoolExecutor(COPY_THREADS) as threads,
    ):
        descriptor = file.fileno()

        def write(number: int) -> list[Sums]:
            return write_summed(descriptor, pieces[number], offsets[number])

        def read(number: int) -> Content:
            content = np.empty_like(pieces[number])
            read_summed(descriptor, content, offsets[number], sums[number])
            return content

        for _ in range(repeats + 1):
            times, sums = compute.beside(threads, write, range(len(pieces)))
            away.append(times)
            times, _ = compute.beside(threads, read, range(len(pieces)))
            back.append(times)
    away_s, slower_away_s = map(statistics.median, zip(*away[1:], strict=True))
    back_s, slower_back_s = map(statistics.median, zip(*back[1:], strict=True))
    return OffloadLink(
        name="disk",
        to_host_bytes_per_s=n_bytes / away_s,
        to_device_bytes_per_s=n_bytes / back_s,
        compute_s_per_byte=max(0.0, slower_away_s + slower_back_s) / n_bytes,
    )


class _Compute:
    """Some milliseconds of what a step does: products, and ops that only read and write memory."""

    def __init__(self) -> None:
        self._matrix = torch.full((384, 384), 1e-3)
        self._vector = torch.ones(1 << 19)

    def run(self) -> None:
        """Do it once."""
        self._matrix @ self._matrix
        self._vector + 1.0

    def beside(
        self, threads: ThreadPoolExecutor, work: Callable[[int], _T], numbers: Sequence[int]
    ) -> tuple[tuple[float, float], list[_T]]:
        """Have threads work while this one computes; return how long that took, what compute lost, and the results."""
        alone_s = statistics.median(self._run_s() for _ in range(_ALONE))
        began = time.perf_counter()
        jobs = [threads.submit(_timed, work, number) for number in numbers]
        runs = 0
        while not all(job.done() for job in jobs):
            self.run()
            runs += 1
        took_s = time.perf_counter() - began
        results = [job.result() for job in jobs]
        last = max(ended for _, ended in results)
        return (last - began, took_s - runs * alone_s), [found for found, _ in results]

    def _run_s(self) -> float:
        began = time.perf_counter()
        self.run()
        return time.perf_counter() - began


def _timed(work: Callable[[int], _T], number: int) -> tuple[_T, float]:
    return work(number), time.perf_counter()
