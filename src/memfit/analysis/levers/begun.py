"""Captures of changed steps that are begun before it is known whether their levers are worth it.

Captures take most of the time that levers take, and one core of two is idle while the step itself is captured, and
while its plan is solved for. Meanwhile it is captured in bfloat16, and with a chunked loss (`memfit.processes`).
"""

from __future__ import annotations

from memfit.analysis.levers.changed_steps import capture_in_bfloat16, capture_with_chunked_loss, find_logits
from memfit.capture import Step, Trace
from memfit.hardware import Target
from memfit.processes import Beside, can_fork


class BegunCaptures:
    """The captures that were begun for a step; None of each that was not."""

    def __init__(self, step: Step, target: Target) -> None:
        self._step, self._target = step, target
        self.in_bfloat16: Beside[Trace] | None = None
        self.with_chunked_loss: Beside[Trace | None] | None = None
        if can_fork() and step.run is None:
            self.in_bfloat16 = Beside(lambda: capture_in_bfloat16(step, target))

    def know(self, trace: Trace) -> None:
        """Begin what needs the trace of the step."""
        logits = find_logits(trace)
        if can_fork() and logits is not None:
            step, target, classes = self._step, self._target, logits.shape[-1]
            self.with_chunked_loss = Beside(lambda: capture_with_chunked_loss(step, target, classes))
