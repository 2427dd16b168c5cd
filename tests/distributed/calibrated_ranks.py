"""What each rank does in the tests of calibration on several ranks."""

from __future__ import annotations

import pytest
import torch

from memfit.cost import Calibration, Size, calibrate_on_ranks, calibration, language_step, rank_calibration
from memfit.verify import calibrate_engines, engine_calibration

SIZE = Size(batch=1, length=16, width=32, layers=2, vocabulary=32)


def calibrated() -> Calibration:
    """Calibrate ops, collectives and engines, on steps and messages that are smaller than usual."""
    steps = [("text", language_step(SIZE, plain=True)), ("bf16", language_step(SIZE, plain=True, dtype=torch.bfloat16))]
    with pytest.MonkeyPatch.context() as smaller:
        smaller.setattr(calibration, "reference_steps", lambda: iter(steps))
        smaller.setattr(calibration, "_COPY_BYTES", 1 << 20)
        smaller.setattr(calibration, "_TELLING_MS", 0.0)
        smaller.setattr(rank_calibration, "_SIZES", (1 << 14, 1 << 16))
        smaller.setattr(engine_calibration, "_SIZES", ((SIZE, False), (SIZE, True)))
        smaller.setattr(engine_calibration, "_ROUNDS", 1)
        return calibrate_engines(calibrate_on_ranks(name="two-ranks", progress=False), progress=False)
