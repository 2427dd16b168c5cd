"""Choosing a cost model by name."""

from __future__ import annotations

from memfit.cost.benchmark import Benchmark
from memfit.cost.roofline import Roofline
from memfit.cost.runtime import Cost
from memfit.errors import MissingFeatureError
from memfit.hardware import Device, Target

MODES = ("operator-level-cost-model", "operator-level-benchmark")
"""What PyTorch's prototypes call the two."""
ROOFLINE = ("roofline", MODES[0])
BENCHMARK = ("benchmark", MODES[1])


def cost_model(mode: str, target: str | Device | Target | None = None) -> Cost:
    """The cost model called 'roofline' or 'benchmark', or by the names that PyTorch's prototypes use.

    The roofline is for the target's device, or for the device of the trace when none is given.
    """
    if mode in ROOFLINE:
        return Roofline() if target is None else Roofline.of(Target.parse(target))
    if mode in BENCHMARK:
        return Benchmark()
    raise MissingFeatureError(f"no cost model is called {mode!r}; write one of {', '.join((*ROOFLINE, *BENCHMARK))}")
