"""Capture of one training step on meta tensors, faithful to the target's kernels."""

import memfit.torch_private.version  # noqa: F401  first, so that a torch which does not work is refused with the reason

# isort: split
from memfit.capture.capture import trace
from memfit.capture.errors import CaptureError
from memfit.capture.step import Step, spec
from memfit.capture.trace_file import check_trace, load_trace, save_trace
from memfit.capture.trace_types import (
    AFTER_STEP,
    BEFORE_STEP,
    NEVER,
    NO_INDEX,
    Category,
    Module,
    ModuleCall,
    Op,
    Parameter,
    Phase,
    Storage,
    TensorRef,
    Trace,
)

__all__ = [
    "AFTER_STEP",
    "BEFORE_STEP",
    "NEVER",
    "NO_INDEX",
    "CaptureError",
    "Category",
    "Module",
    "ModuleCall",
    "Op",
    "Parameter",
    "Phase",
    "Step",
    "Storage",
    "TensorRef",
    "Trace",
    "check_trace",
    "load_trace",
    "save_trace",
    "spec",
    "trace",
]
