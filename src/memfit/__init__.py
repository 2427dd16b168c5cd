"""memfit makes PyTorch training fit in memory."""

from memfit import engines as _engines  # noqa: F401  (Plan.apply finds its engine)
from memfit import hardware, memory, report
from memfit import verify as _verify  # noqa: F401  (and Plan.verify its own)
from memfit._version import __version__
from memfit.errors import InputError, MemfitError
from memfit.plan import Plan, curve, load, plan
from memfit.trace import CaptureError, Step, Trace, load_trace, save_trace, spec, trace
from memfit.verify import guard

__all__ = [
    "CaptureError",
    "InputError",
    "MemfitError",
    "Plan",
    "Step",
    "Trace",
    "__version__",
    "curve",
    "guard",
    "hardware",
    "load",
    "load_trace",
    "memory",
    "plan",
    "report",
    "save_trace",
    "spec",
    "trace",
]
