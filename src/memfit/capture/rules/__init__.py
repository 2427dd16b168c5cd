"""Rules: where the target runs something else than meta tensors do, one small function each.

A module of rules has up to three tables, each by device type and then by name:

`FUNCTIONS`   torch functions whose composition differs. Called with the context and the function's arguments, a rule
              makes the calls that the target would make, or returns `NotImplemented` to let the function run as it is.
`KERNELS`     aten ops whose results have other sizes on the target than their meta kernel says. Called with the
              context, the op and its arguments, a rule returns the results as meta tensors.
`WORKSPACES`  aten ops that allocate and free memory inside themselves. Called with the context, the op, its arguments
              and its results, a rule returns the bytes held at the highest point beyond the results.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Rule = Callable[..., Any]
Table = dict[str, dict[str, Rule]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """What a rule may know of the target, workspaces measured for it, and notes of what is estimated."""

    device_type: str
    compute_capability: tuple[int, int] | None
    threads: int
    multiprocessors: int = 0
    vendor: str = "NVIDIA"
    notes: dict[str, None] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Say once, in the trace's notes, what is not exact."""
        self.notes[text] = None


_DECOMPOSITIONS = ("aten.linalg_", "aten._linalg_", "aten._fft", "aten.cholesky", "aten.triangular_solve", "aten.geqrf")
_SIMPLE = ("aten.linalg_vector_norm", "aten._linalg_check_errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one device type."""

    functions: dict[str, Rule]
    kernels: dict[str, Rule]
    workspaces: dict[str, Rule]
    decomposition: Rule

    def unlisted(self, name: str) -> Rule | None:
        """The rule of an op without one: decompositions and transforms take memory as their library likes."""
        return self.decomposition if name.startswith(_DECOMPOSITIONS) and not name.startswith(_SIMPLE) else None


_MODULES = """activations attention bags elementwise extremes flex_attention fused_optimizers grouped
images layout normalization products recurrent running_products sequence strides vendor cuda_attention
cuda_copies cuda_indexing cuda_normalization cuda_pointwise cuda_recurrent"""
"""Where two have a rule for the same name, the later one holds."""


def rules_for(device_type: str) -> Rules:
    """Every rule of a device type."""
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in _MODULES.split()}
    tables: tuple[dict[str, Rule], ...] = ({}, {}, {})
    for module in modules.values():
        for table, name in zip(tables, ("FUNCTIONS", "KERNELS", "WORKSPACES"), strict=True):
            table.update(getattr(module, name, {}).get(device_type, {}))
    functions, kernels, workspaces = tables
    return Rules(
        functions=functions,
        kernels=kernels,
        workspaces=workspaces,
        decomposition=modules["vendor"].DECOMPOSITIONS[device_type],
    )
