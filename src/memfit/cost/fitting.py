"""Fits a family's efficiency to measured times: part of the peak, part of the bandwidth, and a fixed time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from memfit.cost.runtime import Times
from memfit.hardware import FamilyEfficiency

_STEPS = (2.0, 1.3, 1.1, 1.03, 1.01)
_PASSES = 40
_LEAST_MS = 1e-5
_LEAST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured op: its time, and what its FLOPs and bytes would take at the device's peaks."""

    measured_ms: float
    compute_ms: float
    memory_ms: float


def fit_family(samples: Sequence[Sample], start: FamilyEfficiency) -> FamilyEfficiency:
    """The factors whose roofline is nearest to the samples; `start` where a factor decides none of them.

    Nearest is the least sum of logarithmic errors, each weighed with the root of its time: both the many small ops
    and the few large ones must come out.
    """
    if not samples:
        return start
    measured = np.array([sample.measured_ms for sample in samples])
    compute = np.array([sample.compute_ms for sample in samples])
    memory = np.array([sample.memory_ms for sample in samples])
    weights = np.sqrt(measured)

    def loss(parameters: Times) -> float:
        rate, bandwidth, overhead = parameters
        predicted = np.maximum(compute / rate, memory / bandwidth) + overhead
        return float((weights * np.abs(np.log(predicted / measured))).sum())

    least_ms = max(_LEAST_MS, float(measured.min()))
    beginnings = product(
        {start.compute, max(_LEAST, float((compute / measured).max()))},
        {start.bandwidth, max(_LEAST, float((memory / measured).max()))},
        (least_ms / 2, least_ms),
    )
    best = min((_descended(np.array(each), loss) for each in sorted(beginnings)), key=loss)
    rate, bandwidth, overhead = best.tolist()
    return FamilyEfficiency(
        family=start.family,
        compute=rate if (compute / rate > memory / bandwidth).any() else start.compute,
        bandwidth=bandwidth if (memory / bandwidth >= compute / rate).any() else start.bandwidth,
        overhead_ms=max(_LEAST_MS, overhead),
    )


def _descended(point: Times, loss: Callable[[Times], float]) -> Times:
    """The point reached by multiplying one parameter at a time while that helps, in ever smaller steps."""
    least = loss(point)
    for step in _STEPS:
        for _ in range(_PASSES):
            improved = False
            for place in range(len(point)):
                for factor in (step, 1 / step):
                    candidate = point.copy()
                    candidate[place] *= factor
                    found = loss(candidate)
                    if found < least:
                        point, least, improved = candidate, found, True
            if not improved:
                break
    return point
