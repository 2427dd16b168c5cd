"""memfit makes PyTorch training fit in memory. Torch is loaded with the first name that is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memfit._version import __version__
from memfit.errors import InputError, MemfitError
from memfit.lazy_names import lazy_names

if TYPE_CHECKING:
    from memfit import hardware, memory, presets, report, sharded
    from memfit.analysis import compare, explain
    from memfit.capture import CaptureError, Step, Trace, load_trace, save_trace, spec, trace
    from memfit.plans import Plan, curve, load, plan, search
    from memfit.recovery import guard
    from memfit.sharded import shard

__all__ = [
    "CaptureError",
    "InputError",
    "MemfitError",
    "Plan",
    "Step",
    "Trace",
    "__version__",
    "compare",
    "curve",
    "explain",
    "guard",
    "hardware",
    "load",
    "load_trace",
    "memory",
    "plan",
    "presets",
    "report",
    "save_trace",
    "search",
    "shard",
    "sharded",
    "spec",
    "trace",
]

_NAMES = {
    "memfit.capture": ("CaptureError", "Step", "Trace", "load_trace", "save_trace", "spec", "trace"),
    "memfit.analysis": ("compare", "explain"),
    "memfit.recovery": ("guard",),
    "memfit.plans": ("Plan", "curve", "load", "plan", "search"),
    "memfit.sharded": ("shard",),
}
_find_name = lazy_names(__name__, _NAMES)
_ROOMS = frozenset(
    {"capture", "compat", "cost", "engines", "hardware", "memory", "plans", "presets", "report", "sharded", "sharding"}
    | {"analysis", "compiled", "integrations", "recovery", "solve", "tradeoff", "units", "verify"}
)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"memfit.{name}")
    return _find_name(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
