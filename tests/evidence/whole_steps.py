"""Published speeds of whole training steps, and what memfit predicts for the same steps.

`whole_steps.csv` has the eager runs of the evidence's `figures.json` whose steps are fully known: llm-foundry's table
of MPT models on FSDP, torchtitan's and torchtune's figures. A model is captured with two and with more of its layers,
and the rest is added.
"""

from __future__ import annotations

import csv
import zlib
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

import memfit
from memfit.capture import Phase, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory.timeline import Timeline
from memfit.sharding import ShardOptions, shard
from tests.evidence.step_models import SHAPES, Checkpointing, training_step

HERE = Path(__file__).parent
RUNS = HERE / "whole_steps.csv"
_FEW = 2
_SAMPLED = 8
_YES = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One published speed, and the step it is of."""

    name: str
    gpu: str
    ranks: int
    model: str
    batch: int
    length: int
    accumulation: int
    checkpointing: Checkpointing
    fused: bool
    pure: bool
    wide_logits: bool
    tokens_per_s: float

    @property
    def source(self) -> str:
        """Who published it."""
        return {"foundry": "llm-foundry", "titan": "torchtitan", "tune": "torchtune"}[self.name.split("-")[0]]

    @property
    def family(self) -> str:
        """A100 or H100."""
        return self.gpu.split("-")[0].upper()

    @property
    def fitted(self) -> bool:
        """Whether constants were fitted to it: all runs of a model and length, or none."""
        return zlib.crc32(f"{self.model}{self.length}".encode()) % 2 == 0

    @property
    def sampled(self) -> bool:
        """Whether it is among the few that are enough for a quick look."""
        return self.source != "llm-foundry" or zlib.crc32(self.name.encode()) % _SAMPLED == 0

    def predicted_tokens_per_s(self) -> float:
        """Tokens each second for each GPU, as memfit says."""
        more = _FEW + (2 if self.checkpointing == "every second" else 1)
        (few_ms, few_optimizer_ms), (more_ms, more_optimizer_ms) = self._step_ms(_FEW), self._step_ms(more)
        times = (SHAPES[self.model].layers - _FEW) / (more - _FEW)
        step_ms = few_ms + (more_ms - few_ms) * times
        optimizer_ms = few_optimizer_ms + (more_optimizer_ms - few_optimizer_ms) * times
        whole_ms = self.accumulation * (step_ms - optimizer_ms) + optimizer_ms
        return self.accumulation * self.batch * self.length / whole_ms * 1e3

    def error(self) -> float:
        """How much faster than measured the prediction is."""
        return self.predicted_tokens_per_s() / self.tokens_per_s - 1.0

    def _step_ms(self, layers: int) -> tuple[float, float]:
        """Milliseconds of a step of so many layers, and of the optimizer in it."""
        trace = _captured(
            self.model, layers, self.batch, self.length, self.checkpointing, self.wide_logits, self.fused, self.gpu
        )
        runtime = Runtime.of(trace, Roofline())
        if self.ranks == 1:
            return runtime.total_ms, runtime.by_phase_ms[Phase.OPTIMIZER]
        reduce_dtype: Any = "bfloat16" if self.pure else "float32"
        options = ShardOptions(shard_dtype="float32", param_dtype="bfloat16", reduce_dtype=reduce_dtype)
        target = Target.parse(_device(self.gpu), ranks=self.ranks)
        sharding = shard(Timeline.of(trace), runtime, target, options)
        optimizer_ms = sharding.runtime.by_phase_ms[Phase.OPTIMIZER]
        return sharding.runtime.total_ms + sharding.exposed_ms, optimizer_ms


def read_runs() -> list[PublishedRun]:
    """Every run, those that share a capture beside one another."""
    with RUNS.open() as file:
        runs = [_parsed(row) for row in csv.DictReader(file)]
    return sorted(runs, key=lambda run: (run.model, run.batch, run.length, run.checkpointing, run.gpu))


def _parsed(row: dict[str, Any]) -> PublishedRun:
    numbers = {name: int(row[name]) for name in ("ranks", "batch", "length", "accumulation")}
    switches = {name: row[name] == _YES for name in ("fused", "pure", "wide_logits")}
    rest = {name: row[name] for name in ("name", "gpu", "model", "checkpointing")}
    return PublishedRun(**rest, **numbers, **switches, tokens_per_s=float(row["tokens_per_s"]))


def _device(name: str) -> str:
    own = HERE / f"{name}.toml"
    return str(own) if own.exists() else name


@lru_cache(maxsize=8)
def _captured(
    model: str, layers: int, batch: int, length: int, checkpointing: Checkpointing, wide: bool, fused: bool, gpu: str
) -> Trace:
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=fused, foreach=not fused)
    step = training_step(
        SHAPES[model], layers=layers, batch=batch, length=length, checkpointing=checkpointing, wide_logits=wide,
        optimizer=optimizer,
    )  # fmt: skip
    return memfit.trace(step, target=_device(gpu))
