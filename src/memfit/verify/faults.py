"""Out of memory: how it is recognised, how much was asked for, and where in the step it happened.

Note [Where it failed]: nothing is written down while steps run. The traceback of the error knows the modules that were
being called, the unit that ran for the second time and the optimizer. A backward runs without any Python of its own;
which gradients are there already says how far it came.
"""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch
from torch import nn

from memfit.capture import Phase
from memfit.engines import RecomputedCall, Tape

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MEMFIT = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")
_AUTOGRAD = os.path.join(_TORCH, "autograd", "")
_SIGNS = (
    "DefaultCPUAllocator",
    "out of memory",
    "bad_alloc",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_ASKED = (
    (re.compile(r"tried to allocate (\d+) bytes"), 1),
    (re.compile(r"Tried to allocate ([\d.]+) bytes"), 1),
    (re.compile(r"Tried to allocate ([\d.]+) KiB"), 1 << 10),
    (re.compile(r"Tried to allocate ([\d.]+) MiB"), 1 << 20),
    (re.compile(r"Tried to allocate ([\d.]+) GiB"), 1 << 30),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAt:
    """Where a step failed. `phase` is None outside a step, `module` where it is not known.

    `second_run_of` is the unit that was recomputed. `source` is the user's line.
    """

    phase: Phase | None
    module: str | None
    second_run_of: str | None
    source: str


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or the one that caused it, is an allocation that failed on the device or on the host."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
            return True
        error = error.__cause__
    return False


def parse_asked_bytes(error: BaseException) -> int | None:
    """Return how much the failed allocation asked for; CUDA's allocator says it with three digits only."""
    for pattern, unit in _ASKED:
        found = pattern.search(str(error))
        if found is not None:
            return int(float(found.group(1)) * unit)
    return None


def locate_failure(error: BaseException, model: nn.Module, *, in_step: bool, in_optimizer: bool) -> FailedAt:
    """Locate the failure by the traceback (Note [Where it failed])."""
    paths = {id(module): path for path, module in model.named_modules()}
    phase = Phase.LOSS if in_step else None
    module = unit = None
    source = ""
    for frame, line in _frames(error.__traceback__):
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if name.startswith(_OPTIMIZERS):
            phase = Phase.OPTIMIZER
        elif name.startswith(_AUTOGRAD) and function in ("backward", "grad", "_engine_run_backward"):
            phase, module = Phase.BACKWARD, None
        elif name.startswith(_MEMFIT):
            unit = _second_run(frame, function) or unit
        elif not name.startswith(_TORCH):
            source = _line(name, line)
        owner = frame.f_locals.get("self") if function in ("_call_impl", "forward") else None
        if owner is not None and id(owner) in paths:
            module = paths[id(owner)]
            phase = Phase.FORWARD if phase in (None, Phase.LOSS) else phase
    if in_optimizer:
        phase = Phase.OPTIMIZER
    return FailedAt(phase=phase, module=module, second_run_of=unit, source=source)


def release(error: BaseException | None) -> None:
    """Release the frames of an error, which hold the tensors of the failed step; their lines become a note of it.

    Clearing the frames is not enough: frames whose locals were looked at keep them.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        lines = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        if lines and hasattr(error, "add_note"):
            error.add_note("it was raised at (most recent call last):\n" + "".join(lines.format()).rstrip())
        del lines
        error = error.__cause__ or error.__context__


def _frames(trail: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trail is not None:
        yield trail.tb_frame, trail.tb_lineno
        trail = trail.tb_next


def _second_run(frame: FrameType, function: str) -> str | None:
    """Return the unit that a frame of an engine recomputes.

    Only such frames are looked into: the locals of one that still runs, such as the guard's, would be kept alive.
    """
    if function not in ("recompute", "_replay"):
        return None
    owner = frame.f_locals.get("self")
    if isinstance(owner, RecomputedCall):
        return owner._name
    return owner.policy.unit if isinstance(owner, Tape) else None


def _line(name: str, line: int) -> str:
    try:
        text = linecache.getline(name, line).strip()
    except MemoryError:
        text = ""
    return f"{os.path.basename(name)}:{line}" + (f": {text}" if text else "")
