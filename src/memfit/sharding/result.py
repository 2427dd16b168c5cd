"""A step of one rank among many."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memfit.capture import Trace
from memfit.cost import Runtime
from memfit.memory import Bytes, Interval
from memfit.sharding.bubbles import StageTimes
from memfit.sharding.schedule import ShardSchedule, Transfer
from memfit.sharding.units import ShardUnit


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A step of one rank among many: its levels, its units and its communication.

    `runtime` has the times and, as its `trace`, the step without casts of parameters that are gathered in their dtype:
    it is the one to checkpoint units of, since such a cast makes nothing that could be dropped or made again. `removed`
    are the storages that a rank does not have and `allocations` what it has instead; `schedule` has the events that
    these come from. The dtypes are those that were used; None is the parameter's own. `exposed_ms` is what the
    communication adds to the step: waits, and `beside_ms`, which is copies in and out of its buffers and what kernels
    lose to collectives that run beside them. `buckets` are the bytes of DDP's gradient buckets, where the step is
    replicated and not sharded.
    """

    runtime: Runtime
    before_by_row: Bytes
    during_by_row: Bytes
    units: tuple[ShardUnit, ...]
    removed: frozenset[int]
    allocations: tuple[Interval, ...]
    schedule: ShardSchedule
    communication_ms: float
    exposed_ms: float
    shard_dtype: str | None
    param_dtype: str | None
    reduce_dtype: str | None
    buckets: tuple[int, ...] = ()
    beside_ms: float = 0.0
    bubble_ms: float = 0.0
    """Of `exposed_ms`, what a stage of a pipeline waits for the others (`bubbles.py`)."""
    pipelines: tuple[StageTimes, ...] = ()
    """What this rank's stages compute in each pipeline, for the bubble beside other ranks that were captured."""

    @property
    def trace(self) -> Trace:
        """The step without casts of parameters."""
        return self.runtime.trace

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The collectives in the order in which they are begun."""
        return self.schedule.transfers

    @cached_property
    def before(self) -> Bytes:
        """Bytes alive just before each op."""
        return self.before_by_row.sum(axis=0)

    @cached_property
    def during(self) -> Bytes:
        """Bytes alive while each op runs, and between it and the next."""
        return self.during_by_row.sum(axis=0)

    @property
    def peak_bytes(self) -> int:
        """The highest point of the step when nothing is checkpointed."""
        return int(self.during.max())
