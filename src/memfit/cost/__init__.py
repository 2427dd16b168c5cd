"""Run time: of an op (roofline or benchmark), of a collective, and of a step by module."""

from memfit.cost.benchmark import Benchmark, cost_model
from memfit.cost.calibration import Calibration, calibrate
from memfit.cost.collectives import (
    Algorithm,
    Collective,
    CollectiveEstimate,
    CollectiveModel,
    Group,
    collective_ms,
)
from memfit.cost.roofline import Roofline
from memfit.cost.runtime import Cost, ModuleTime, Runtime

__all__ = [
    "Algorithm",
    "Benchmark",
    "Calibration",
    "Collective",
    "CollectiveEstimate",
    "CollectiveModel",
    "Cost",
    "Group",
    "ModuleTime",
    "Roofline",
    "Runtime",
    "calibrate",
    "collective_ms",
    "cost_model",
]
