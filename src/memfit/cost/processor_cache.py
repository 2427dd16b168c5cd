"""How much of what an op touches is still in the processor's cache.

An op that is timed again and again on the same tensors finds them in the cache; in a step it often does not. The reuse
distance of a tensor is how many bytes were touched since it was touched last, counted around the step for what lives
longer. What is beyond the cache comes from memory. New storages take the place of those freed last, as a stack would:
their distance is that of the last moment at which memory stood as high.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict

import numpy as np
import torch

from memfit.capture import Op, Trace
from memfit.cost.roofline import item_bytes_of
from memfit.cost.runtime import Times

_USUAL_BYTES = 32 << 20
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 512 << 20
_FASTER = 1.4
"""What is touched again by this much faster than from memory was in the cache."""
_LAPS_BYTES = 128 << 20
_FEWEST_LAPS, _MOST_LAPS = 2, 16
_ROUNDS = 4
"""Over all sizes, so that a burst of other work spoils one of them at most."""


def measure_cache_bytes() -> int:
    """Return how many bytes may be touched before the first of them come from memory again, up to a factor of two.

    The system tells what the processor has, of which a virtual machine may own a few cores: one that was told 480 MiB
    kept 32. Where no size is faster than memory, half of what the system tells, as others use it too.
    """
    told_bytes = told_cache_bytes()
    sizes = [_LEAST_BYTES]
    while 2 * sizes[-1] <= min(4 * told_bytes, _MOST_BYTES):
        sizes.append(2 * sizes[-1])
    rates = dict.fromkeys(sizes, 0.0)
    for _ in range(_ROUNDS):
        for size in sizes:
            rates[size] = max(rates[size], _rate(size))
    memory = max(rate for size, rate in rates.items() if size >= 2 * told_bytes or size == sizes[-1])
    # the smallest may be slow too, with several threads
    from_fast = itertools.dropwhile(lambda size: rates[size] < _FASTER * memory, sizes)
    inside = list(itertools.takewhile(lambda size: rates[size] >= _FASTER * memory, from_fast))
    return min(told_bytes, inside[-1] if inside else told_bytes // 2)


def _rate(size: int) -> float:
    """Return how many bytes a second an op reads and writes that touches the same bytes again."""
    touched = torch.zeros(size // 4, dtype=torch.float32, device="cpu")
    touched.add_(1.0)
    laps = []
    for _ in range(min(_MOST_LAPS, max(_FEWEST_LAPS, _LAPS_BYTES // size))):
        began = time.perf_counter()
        touched.add_(1.0)
        laps.append(time.perf_counter() - began)
    return size / min(laps)


def told_cache_bytes() -> int:
    """Return the last-level cache of the processor; 32 MiB where the system does not say."""
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or _USUAL_BYTES
    except (ValueError, OSError):
        return _USUAL_BYTES


def cold_fractions(trace: Trace, cache_bytes: int) -> Times:
    """The part of each op's bytes, between 0 and 1, that comes from memory rather than from a cache of this size.

    Nothing does when the whole step fits in it, however often its bytes are touched.
    """
    touched = [_touched(trace, op) for op in trace.ops]
    levels, tops, made = _levels(trace)
    lasting = {storage for each in touched for storage in each if trace.storages[storage].alloc_at < 0}
    if sum(trace.storages[storage].bytes for storage in lasting) + max(tops, default=0) <= cache_bytes:
        return np.zeros(len(touched))
    totals = np.array([sum(each.values()) for each in touched], dtype=np.float64)
    clock = np.concatenate(([0.0], np.cumsum(totals))).tolist()
    step_bytes = clock[-1]
    last: dict[int, float] = {}
    for index, each in enumerate(touched):
        for storage in each:
            last[storage] = clock[index + 1] - step_bytes
    heights = _Heights()
    for index, top in enumerate(tops):
        heights.reached(top, clock[index + 1] - step_bytes)
    cold = np.zeros(len(touched))
    for index, each in enumerate(touched):
        now, new = clock[index], made[index]
        for storage, n_bytes in each.items():
            before = heights.last_above(levels[index]) if storage in new else last.get(storage, -step_bytes)
            if now - before > cache_bytes:
                cold[index] += n_bytes
            last[storage] = clock[index + 1]
        heights.reached(tops[index], clock[index + 1])
    return np.divide(cold, totals, out=np.zeros_like(cold), where=totals > 0)


class _Heights:
    """When memory last stood at least at some height: a stack of falling heights."""

    def __init__(self) -> None:
        self._falling: list[tuple[int, float]] = []

    def reached(self, height: int, when: float) -> None:
        while self._falling and self._falling[-1][0] <= height:
            self._falling.pop()
        self._falling.append((height, when))

    def last_above(self, height: int) -> float:
        low, high = 0, len(self._falling)
        while low < high:
            middle = (low + high) // 2
            if self._falling[middle][0] > height:
                low = middle + 1
            else:
                high = middle
        return self._falling[low - 1][1] if low else float("-inf")


def _touched(trace: Trace, op: Op) -> dict[int, int]:
    found: dict[int, int] = {}
    if op.view:
        return found
    for ref in (*op.inputs, *op.outputs):
        if ref.storage >= 0:
            n_bytes = item_bytes_of(ref.dtype)
            for size, stride in zip(ref.shape, ref.stride, strict=True):
                n_bytes *= size if stride else 1
            found[ref.storage] = max(found.get(ref.storage, 0), min(n_bytes, trace.storages[ref.storage].bytes))
    return found


def _levels(trace: Trace) -> tuple[list[int], list[int], list[set[int]]]:
    """Memory of the step before each op and while it runs, and the storages that each op makes."""
    made: list[set[int]] = [set() for _ in trace.ops]
    freed: dict[int, int] = defaultdict(int)
    for number, storage in enumerate(trace.storages):
        if storage.alloc_at >= 0:
            made[storage.alloc_at].add(number)
            if storage.free_after >= 0:
                freed[storage.free_after] += storage.bytes
    levels, tops, level = [], [], 0
    for index in range(len(trace.ops)):
        levels.append(level)
        level += sum(trace.storages[number].bytes for number in made[index])
        tops.append(level)
        level -= freed[index]
    return levels, tops, made
