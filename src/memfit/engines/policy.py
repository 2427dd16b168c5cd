"""What an engine needs of a checkpointed unit, in the form it asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.plans import Checkpoint

_DETACH = "aten.detach.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """`names` are those of the ops that the plan knows, by offset. `saved` ops up to `stop` are not run again."""

    unit: str
    module: str
    call: int
    kind: str
    ops: int
    names: dict[int, str]
    saved: frozenset[int]
    dropped: frozenset[tuple[int, int]]
    stop: int

    @classmethod
    def of(cls, entry: Checkpoint) -> RunPolicy:
        """The policy of an entry of a plan."""
        return cls(
            unit=entry.unit,
            module=entry.module,
            call=entry.call,
            kind=entry.kind,
            ops=entry.end - entry.begin,
            names={op.offset: op.name for op in (*entry.saved_ops, *entry.recomputed_ops)},
            saved=frozenset(op.offset for op in entry.saved_ops if op.offset <= entry.stop),
            dropped=frozenset(entry.dropped),
            stop=entry.stop,
        )

    @property
    def content(self) -> tuple[object, ...]:
        """What is done, whichever call it is for."""
        return self.ops, tuple(sorted(self.names.items())), self.saved, self.dropped, self.stop


def same_op(name: str, planned: str | None) -> bool:
    """Whether an op is the one that the plan knows, if it knows it.

    Under a dispatch mode torch's own composites avoid writing in place: `add` is then what is `add_` without one.
    """
    return planned is None or name == planned or name == planned.replace("_.", ".")


def not_counted(func: Any, planned: str | None) -> bool:
    """Whether an op is none of the step's: marks of the profiler, and detachments that a capture does not see."""
    return func.namespace == "profiler" or (str(func) == _DETACH and planned is not None and planned != _DETACH)
