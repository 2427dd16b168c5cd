"""Whole training steps with published memory figures, and what memfit says of each.

`memory_steps.csv` has the figures and how each step was run: `units` are FSDP2's, the blocks, and with `apart` also the
embedding and the head, which stay in the root unit with `root`; the last that runs is kept after its forward. `logits`
are what the model returns and how the loop treats them: `held` are float32 logits that stay alive through the backward.
`before_june_2024` is FSDP2 with the reduce-scatter's input on the reduce stream (pytorch PR 129721). These are options
of the emulation, not of memfit.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import memfit
from memfit import Step
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Reserved, Room, Stream, Timeline, judge_room, reserved
from memfit.sharding import ShardOptions, shard
from memfit.sharding.fsdp2_schedule import FSDP2Scheduler
from memfit.sharding.schedule import Role
from tests.evidence import litgpt_models
from tests.evidence.step_models import SHAPES, Checkpointing
from tests.evidence.titan_models import chunked_cross_entropy_loss, cross_entropy_loss, titan_step

HERE = Path(__file__).parent
RUNS = HERE / "memory_steps.csv"
GIB = 1 << 30
_APART = ("tok_embeddings", "output")


def device_of(gpu: str) -> str:
    """The name of a device, or its file here."""
    own = HERE / f"{gpu}.toml"
    return str(own) if own.exists() else gpu


@dataclass(frozen=True)
class PublishedMemory:
    """One published run: the step, and peaks in GiB where they were published; `fits` where it ran or did not."""

    name: str
    source: str
    gpu: str
    ranks: int
    model: str
    batch: int
    length: int
    checkpointing: Checkpointing
    norm: str
    logits: str
    units: str
    before_june_2024: bool
    optimizer: str
    allocated_gib: float | None
    reserved_gib: float | None
    first_reserved_gib: float | None
    fits: bool | None

    @property
    def published_gib(self) -> dict[str, float | None]:
        """The published figures by kind."""
        return {
            "allocated": self.allocated_gib,
            "reserved": self.reserved_gib,
            "reserved, step 1": self.first_reserved_gib,
        }

    @property
    def device(self) -> str:
        """The device's name, or its file here."""
        return device_of(self.gpu)

    @property
    def target(self) -> Target:
        """The device and its ranks."""
        return Target.parse(self.device, ranks=self.ranks)

    def step(self) -> Step:
        """The step as its source runs it."""
        if self.model.partition(" ")[0] in litgpt_models.SHAPES:
            wide = self.logits == "float32"
            return litgpt_models.litgpt_step(self.model, batch=self.batch, length=self.length, wide_logits=wide)
        fused = self.optimizer == "fused"
        return titan_step(
            replace(SHAPES[self.model], fused_norm=self.norm == "fused"),
            batch=self.batch,
            length=self.length,
            checkpointing=self.checkpointing,
            optimizer=partial(torch.optim.AdamW, lr=1e-4, fused=fused, foreach=not fused),
            loss=chunked_cross_entropy_loss if self.logits == "chunked" else cross_entropy_loss,
            float_output=self.logits in ("float32", "held"),
            keep_output=self.logits == "held",
        )

    def timeline(self) -> Timeline:
        """Capture the step as a rank runs it; those of large models are not kept."""
        timeline = Timeline.of(memfit.trace(self.step(), target=self.device))
        return timeline if self.ranks == 1 else self._sharded(timeline)

    @cached_property
    def predicted(self) -> Reserved:
        """What the allocator of a rank does."""
        return reserved(self.timeline().allocations, self.target.device)

    @cached_property
    def room(self) -> Room:
        """Whether a rank has room."""
        return judge_room(self.target, self.timeline()).room

    def errors(self) -> dict[str, float]:
        """How much more than each published figure is predicted."""
        known = {name: gib for name, gib in self.published_gib.items() if gib is not None}
        if not known:
            return {}
        found = {
            "allocated": self.predicted.peak_allocated_bytes,
            "reserved": self.predicted.peak_reserved_bytes,
            "reserved, step 1": self.predicted.first_step_reserved_bytes,
        }
        return {name: found[name] / GIB / gib - 1.0 for name, gib in known.items()}

    def in_root(self) -> PublishedMemory:
        """The same run with embedding and head in the root unit."""
        return replace(self, units="root")

    def _sharded(self, timeline: Timeline) -> Timeline:
        blocks = tuple(f"layers.{number}" for number in range(SHAPES[self.model].layers))
        options = ShardOptions(
            shard_dtype="float32",
            param_dtype="bfloat16",
            reduce_dtype="float32",
            keep_last=True,
            units=blocks if self.units == "root" else (*blocks, *_APART),
        )
        with _reduce_input_on(Stream.REDUCE if self.before_june_2024 else Stream.COMPUTE):
            sharding = shard(timeline, Runtime.of(timeline.trace, Roofline()), self.target, options)
        return timeline.under_plan(intervals=sharding.allocations, removed=sharding.removed)


@contextmanager
def _reduce_input_on(stream: Stream) -> Iterator[None]:
    """Let FSDP2 allocate the inputs of reductions on a stream; it was the reduce stream before PR 129721."""
    streams = FSDP2Scheduler.streams
    FSDP2Scheduler.streams = {**streams, Role.REDUCE_INPUT: stream}
    try:
        yield
    finally:
        FSDP2Scheduler.streams = streams


def read_runs() -> list[PublishedMemory]:
    """Every run of the file."""
    with RUNS.open() as file:
        return [_parsed(row) for row in csv.DictReader(file)]


def _parsed(row: dict[str, Any]) -> PublishedMemory:
    numbers = {name: int(row[name]) for name in ("ranks", "batch", "length")}
    figures = ("allocated_gib", "reserved_gib", "first_reserved_gib")
    peaks = {name: float(row[name]) if row[name] else None for name in figures}
    rest = {
        name: row[name]
        for name in ("name", "source", "gpu", "model", "checkpointing", "norm", "logits", "units", "optimizer")
    }
    fits = {"yes": True, "no": False}.get(row["fits"])
    return PublishedMemory(**rest, **numbers, **peaks, before_june_2024=row["before_june_2024"] == "1", fits=fits)
