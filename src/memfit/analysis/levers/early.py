"""Captures of changed steps that begin before it is known whether their levers are worth it.

Captures take most of the time that levers take, and one core of two is idle while the step itself is captured, and
while its plan is solved for. Meanwhile it is captured in bfloat16, and with a chunked loss (`memfit.processes`).
"""

from __future__ import annotations

from types import TracebackType

from memfit.analysis.levers.case import Attempt, attempt
from memfit.analysis.levers.changed_steps import (
    capture_in_bfloat16,
    capture_with_chunked_loss,
    has_float32_parameters,
)
from memfit.capture import CHUNKS, ChunkedLoss, Step, Trace, find_logits
from memfit.hardware import Target
from memfit.processes import ForkedCall, can_fork


class _Known:
    """The result of a `ForkedCall` that somebody has asked for."""

    def __init__(self, found: Attempt) -> None:
        self._found = found

    def result(self) -> Attempt:
        return self._found

    def stop(self) -> None:
        """Nothing runs any more."""


class EarlyCaptures:
    """Captures of a step that began early; None of each that did not. Those that still run end with the block.

    There are none without a step. One with a loop of its own (`Step.run`) is not run more often than its levers need.
    """

    def __init__(self, step: Step | None, target: Target) -> None:
        self._step = step if step is not None and step.run is None and can_fork() else None
        self._target = target
        self.chunks = CHUNKS
        self.with_chunked_loss: ForkedCall[Attempt] | _Known | None = None
        self.in_bfloat16: ForkedCall[Attempt] | None = None
        if self._step is not None:
            step = self._step
            self.in_bfloat16 = ForkedCall(lambda: attempt(lambda: capture_in_bfloat16(step, target)))

    def drop_useless(self, trace: Trace) -> None:
        """End what the trace of the step shows to be of no use."""
        if self.in_bfloat16 is not None and not has_float32_parameters(trace):
            self.in_bfloat16.stop()
            self.in_bfloat16 = None

    def begin_chunked_loss(self, trace: Trace, chunks: int = CHUNKS) -> None:
        """Begin to capture the step with a chunked loss, for which its trace is needed."""
        step, target, logits = self._step, self._target, find_logits(trace)
        if step is None or logits is None:
            return
        classes = logits.shape[-1]
        where = trace.captured_on
        self.with_chunked_loss = ForkedCall(
            lambda: attempt(lambda: capture_with_chunked_loss(step, target, classes, where, chunks=chunks))
        )
        self.chunks = chunks

    def chunked_trace(self, setting: ChunkedLoss) -> Trace | None:
        """Return the step with its loss in these chunks, where that was captured early; levers may ask again."""
        if self.with_chunked_loss is None or setting.chunks != self.chunks or not setting.casts:
            return None
        found = self.with_chunked_loss.result()
        self.with_chunked_loss = _Known(found)
        return found.trace

    def __enter__(self) -> EarlyCaptures:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each in (self.in_bfloat16, self.with_chunked_loss):
            if each is not None:
                each.stop()
