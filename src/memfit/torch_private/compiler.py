"""torch.compile and TorchScript: keep out of graphs, and know their frames and functions."""

from __future__ import annotations

from typing import Any

import torch

from memfit.torch_private.frames import frame_above

disable_dynamo: Any = torch._disable_dynamo
"""Keep a function out of compiled graphs without importing dynamo (torch/_compile.py and torch/__init__.py)."""

function_from_graph: Any = torch._C._create_function_from_graph
"""A TorchScript function made anew from its graph (torch/csrc/jit/python/script_init.cpp),
without its optimised plan."""

COMPILE_WRAPPER = ("torch._dynamo.eval_frame", "compile_wrapper")
"""Module and name of the function that a compiled call goes through (torch/_dynamo/eval_frame.py)."""


def called_by_compiler(*likewise: tuple[str, str]) -> bool:
    """Return whether this runs in a call of what torch.compile returned, or of another function named here."""
    frame: Any = frame_above(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in (COMPILE_WRAPPER, *likewise):
            return True
        frame = frame.f_back
    return False
