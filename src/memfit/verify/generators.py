"""The generators of random numbers that a step may use: torch's on every device, Python's and numpy's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def generators() -> tuple[Any, ...]:
    """The states of all of them."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def set_generators(states: tuple[Any, ...]) -> None:
    """Put them back to these states."""
    cpu, cuda, python, numpy = states
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    np.random.set_state(numpy)


@contextlib.contextmanager
def same_generators() -> Iterator[None]:
    """After the block they are as they were before it."""
    states = generators()
    try:
        yield
    finally:
        set_generators(states)
