"""Run time: of an op (roofline or benchmark), of a collective, and of a step by module."""

from memfit.cost.benchmark import BENCHMARK, MODES, ROOFLINE, Benchmark, cost_model
from memfit.cost.calibration import Calibration, calibrate
from memfit.cost.collectives import (
    Algorithm,
    Collective,
    CollectiveEstimate,
    CollectiveModel,
    Group,
    collective_ms,
)
from memfit.cost.host import Size, language_step
from memfit.cost.rank_calibration import calibrate_on_ranks, fit_link
from memfit.cost.roofline import Float32Precision, Roofline, item_bytes_of, peak_ms, real_flops
from memfit.cost.runtime import Cost, ModuleTime, Runtime, repeats

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
