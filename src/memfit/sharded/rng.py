"""The state of random number generators, as bytes, so that dropout goes on as it would have."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec
import numpy as np
import torch


def rng_state() -> dict[str, torch.Tensor]:
    """The generators of torch, of its current CUDA device, of Python and of numpy."""
    state = {
        "torch": torch.get_rng_state(),
        "python": _bytes(random.getstate()),
        "numpy": _bytes([each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state()]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set those generators that the state has."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        version, numbers, gauss = msgspec.json.decode(state["python"].numpy().tobytes())
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state:
        name, keys, *rest = msgspec.json.decode(state["numpy"].numpy().tobytes())
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
