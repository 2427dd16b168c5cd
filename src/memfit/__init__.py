"""memfit makes PyTorch training fit in memory. Torch is loaded with the first name that is used."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memfit._version import __version__
from memfit.errors import InputError, MemfitError

if TYPE_CHECKING:
    from memfit import hardware, memory, report, shapes, sharded
    from memfit.plan import Plan, curve, load, plan, search
    from memfit.report.comparison import compare
    from memfit.report.explain import explain
    from memfit.sharded import shard
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
    "compare",
    "curve",
    "explain",
    "guard",
    "hardware",
    "load",
    "load_trace",
    "memory",
    "plan",
    "report",
    "save_trace",
    "search",
    "shapes",
    "shard",
    "sharded",
    "spec",
    "trace",
]

_NAMES = {
    "memfit.plan": ("Plan", "curve", "load", "plan", "search"),
    "memfit.report.comparison": ("compare",),
    "memfit.report.explain": ("explain",),
    "memfit.sharded": ("shard",),
    "memfit.trace": ("CaptureError", "Step", "Trace", "load_trace", "save_trace", "spec", "trace"),
    "memfit.verify": ("guard",),
}
_PLACES = {name: place for place, names in _NAMES.items() for name in names}
_ROOMS = (
    "cost",
    "engines",
    "graph",
    "hardware",
    "memory",
    "report",
    "shapes",
    "sharded",
    "solve",
    "tradeoff",
    "units",
    "verify",
)


class _Package(ModuleType):
    """`plan` and `trace` are functions and rooms. Here they are the functions, also when a room has been imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _PLACES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"memfit.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
