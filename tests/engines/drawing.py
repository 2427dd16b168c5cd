"""A file that no module is written in, with a generator of its own."""

from __future__ import annotations

import numpy as np

RNG = np.random.default_rng(7)


def scale() -> float:
    return float(RNG.random())
