"""memfit makes PyTorch training fit in memory."""

from memfit import hardware, memory, report
from memfit._version import __version__
from memfit.trace import CaptureError, Step, Trace, load_trace, save_trace, spec, trace

__all__ = [
    "CaptureError",
    "Step",
    "Trace",
    "__version__",
    "hardware",
    "load_trace",
    "memory",
    "report",
    "save_trace",
    "spec",
    "trace",
]
