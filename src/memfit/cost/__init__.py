"""Run time: of an op (roofline or benchmark), of a collective, and of a step by module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.cost.benchmark import BENCHMARK, MODES, ROOFLINE, Benchmark, cost_model
from memfit.cost.collectives import (
    Algorithm,
    Collective,
    CollectiveEstimate,
    CollectiveModel,
    Group,
    collective_ms,
)
from memfit.cost.roofline import Float32Precision, Roofline, item_bytes_of, peak_ms, real_flops
from memfit.cost.runtime import Cost, ModuleTime, Runtime, repeats
from memfit.lazy_names import lazy_names

if TYPE_CHECKING:
    from memfit.cost.calibration import Calibration, calibrate
    from memfit.cost.host import Size, language_step
    from memfit.cost.rank_calibration import calibrate_on_ranks, fit_link

__all__ = [
    "BENCHMARK",
    "MODES",
    "ROOFLINE",
    "Algorithm",
    "Benchmark",
    "Calibration",
    "Collective",
    "CollectiveEstimate",
    "CollectiveModel",
    "Cost",
    "Float32Precision",
    "Group",
    "ModuleTime",
    "Roofline",
    "Runtime",
    "Size",
    "calibrate",
    "calibrate_on_ranks",
    "collective_ms",
    "cost_model",
    "fit_link",
    "item_bytes_of",
    "language_step",
    "peak_ms",
    "real_flops",
    "repeats",
]

# A plan needs none of these.
__getattr__ = lazy_names(
    __name__,
    {
        "memfit.cost.calibration": ("Calibration", "calibrate"),
        "memfit.cost.host": ("Size", "language_step"),
        "memfit.cost.rank_calibration": ("calibrate_on_ranks", "fit_link"),
    },
)
