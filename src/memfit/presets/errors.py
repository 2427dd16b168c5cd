"""What is wrong with a step that was named: that it is not there, what it does not take, what its code raised."""

from __future__ import annotations

import os
from collections.abc import Sequence
from traceback import FrameSummary

from memfit.errors import InputError, MemfitError


class WrongRequest(InputError):
    """What was written is wrong by itself: it names nothing that is there, or asks for what a step cannot be."""


class NotTaken(WrongRequest):
    """A step does not take what it was given; `why` is without the advice, the first of which is to leave it out."""

    def __init__(self, why: str, *advice: str) -> None:
        super().__init__(f"{why}; {', or '.join(advice)}")
        self.why = why
        self.advice = advice


class StepRaised(MemfitError, RuntimeError):
    """The user's own code raised: what, where, and the user's lines that led there, innermost last."""

    def __init__(self, place: str, error: Exception, frames: Sequence[FrameSummary]) -> None:
        what = f"{place} raised {type(error).__name__}"
        said = str(error)
        if frames:
            said = f"{said} ({_at(frames[-1])})" if said else f"at {_at(frames[-1])}"
        lines = [f"  {_at(frame)} in {frame.name}: {frame.line}" for frame in frames]
        super().__init__("\n".join([f"{what}: {said}" if said else what, *lines]))


def _at(frame: FrameSummary) -> str:
    """Return a file and a line; a file in the working folder or below as seen from there."""
    relative = os.path.relpath(frame.filename)
    return f"{frame.filename if relative.startswith('..') else relative}:{frame.lineno}"
