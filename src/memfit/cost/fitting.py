"""Fits a family's efficiency to measured times: part of the peak, part of the bandwidth, and a fixed time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.cost.runtime import Times
from memfit.hardware import Family, FamilyEfficiency

_STEPS = (2.0, 1.3, 1.1, 1.03, 1.01)
_PASSES = 40
_LEAST_MS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured op: its time, and what its FLOPs and bytes would take at the device's peaks."""

    family: Family
    measured_ms: float
    compute_ms: float
    memory_ms: float


def fit_family(family: Family, samples: Sequence[Sample], start: FamilyEfficiency) -> FamilyEfficiency:
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

    best = np.array([start.compute, start.bandwidth, max(_LEAST_MS, float(measured.min()) / 2)])
    least = loss(best)
    for step in _STEPS:
        for _ in range(_PASSES):
            improved = False
            for place in range(len(best)):
                for factor in (step, 1 / step):
                    candidate = best.copy()
                    candidate[place] *= factor
                    found = loss(candidate)
                    if found < least:
                        best, least, improved = candidate, found, True
            if not improved:
                break
    rate, bandwidth, overhead = best.tolist()
    return FamilyEfficiency(
        family=family,
        compute=rate if (compute / rate > memory / bandwidth).any() else start.compute,
        bandwidth=bandwidth if (memory / bandwidth >= compute / rate).any() else start.bandwidth,
        overhead_ms=max(_LEAST_MS, overhead),
    )
