"""Passes whose gradients are not sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from memfit.sharded.sharding import get_runtime


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep the whole gradients of backwards in here on each rank; the first one after it sums them all.

    It saves communication and takes the memory of whole gradients. Without it every pass adds to the gradients of the
    shards, which takes no more memory than one pass does.
    """
    runtime = get_runtime(model)
    before, runtime.communicates = runtime.communicates, False
    try:
        yield
    finally:
        runtime.communicates = before
