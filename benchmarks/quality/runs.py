"""One way of training one model: what it is, its measured peak and its measured times."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from memfit import Step
from memfit.verify.measure import measure_rise

from .models import Case

KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_MAX_": "0"}
"""glibc gives no memory back to the kernel, as a caching allocator does, and maps nothing by itself.

A threshold in place of no maps would count up to 32 MiB only, and small models' logits are larger. Without this, 20,000
to 35,000 pages are mapped anew in every step of half a second, as many as the heap's end happens to move: 8 % of its
time, and most of the difference between two runs of the same step.
"""


def keep_memory() -> None:
    """Begin this program again with an allocator that keeps its memory, unless it has one."""
    if any(name not in os.environ for name in KEEPS_MEMORY):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEPS_MEMORY})


@dataclass(slots=True, kw_only=True)
class Run:
    """`budget_bytes` is what the method was asked for, None where it takes no budget."""

    method: str
    budget_bytes: int | None
    step: Callable[[], None]
    resident_bytes: int
    peak_bytes: int = 0
    recomputed_flops: int | None = None
    predicted_ms: float = 0.0
    note: str = ""
    times_ms: list[float] = field(default_factory=list)
    again: list[Run] = field(default_factory=list)
    """The same on models of their own: where one lies in memory changes its time by a few percent."""
    make: Callable[[], Run] | None = None
    """Makes one more."""

    @property
    def ms(self) -> float:
        """The median, over the models where there are several."""
        return statistics.median(self.medians_ms)

    @property
    def medians_ms(self) -> list[float]:
        """The median of each model."""
        return [statistics.median(run.times_ms) for run in (self, *self.again)]

    def measure_peak(self) -> None:
        """Absolute: what is resident when a step begins, and the highest rise above it by the allocator's events."""
        for _ in range(2):
            self.step()
        self.peak_bytes = self.resident_bytes + measure_rise(self.step, torch.device("cpu")).rise_bytes

    def measure_time(self) -> None:
        """One step; cycles are collected before it and not in it."""
        gc.collect()
        gc.disable()
        try:
            began = time.perf_counter()
            self.step()
            self.times_ms.append(1e3 * (time.perf_counter() - began))
        finally:
            gc.enable()


def run_of(
    case: Case,
    method: str,
    prepare: Callable[[nn.Module], Any],
    budget_bytes: int | None = None,
    wrap_loss: Callable[[Any], Any] | None = None,
) -> Run:
    """A model and an optimizer of their own, and a loss outside the model, prepared in the method's way."""
    step = case.step()
    model = step.model
    assert isinstance(model, nn.Module)
    optimizer = step.build_optimizer(model)
    step.execute(model, optimizer, "cpu")  # optimizer state is there from now on
    resident = resident_bytes(step, model, optimizer)
    prepare(model)
    if wrap_loss is not None and step.loss is not None:
        step = replace(step, loss=wrap_loss(step.loss))
    return Run(
        method=method,
        budget_bytes=budget_bytes,
        step=partial(step.execute, model, optimizer, "cpu"),
        resident_bytes=resident,
    )


def resident_bytes(step: Step, model: nn.Module, optimizer: Any) -> int:
    """Parameters, buffers, optimizer state and batch."""
    held = [*model.parameters(), *model.buffers(), *tree_leaves(step.batch)]
    held += tree_leaves([list(state.values()) for state in optimizer.state.values()])
    storages = {
        each.untyped_storage()._cdata: each.untyped_storage() for each in held if isinstance(each, torch.Tensor)
    }
    return sum(storage.nbytes() for storage in storages.values())


def checkpointed(model: nn.Module, blocks: Sequence[str]) -> None:
    """Each of these modules as a person would checkpoint it."""
    for path in blocks:
        module = model.get_submodule(path)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
