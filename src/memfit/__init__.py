"""memfit makes PyTorch training fit in memory."""

from memfit._version import __version__
from memfit.trace import Step, Trace, load_trace, save_trace, spec, trace

__all__ = ["Step", "Trace", "__version__", "load_trace", "save_trace", "spec", "trace"]
