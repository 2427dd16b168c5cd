"""Frames of the Python stack: `sys._getframe`, which `inspect.currentframe` has no depth for."""

from __future__ import annotations

import sys
from types import FrameType


def frame_above(depth: int) -> FrameType:
    """Return the frame so many calls above the caller's own; `ValueError` where the stack is not that deep."""
    return sys._getframe(depth + 1)
