"""Levers: what would lower the peak of a step, each with its effect worked out, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memfit.analysis.levers.case import Basis, Case, Lever, describe_shortfall, sort_levers
from memfit.analysis.levers.changed_steps import loss, micro_batch, optimizer, precision
from memfit.analysis.levers.lifetimes import gradients, holding
from memfit.analysis.levers.offload import offload
from memfit.analysis.levers.replanned import checkpointing, sharding
from memfit.analysis.levers.segments import segments

__all__ = ["LEVERS", "Basis", "Case", "Lever", "describe_shortfall", "find_levers"]

LEVERS: dict[str, Callable[[Case], Iterator[Lever]]] = {
    "results that are held": holding,
    "gradients between steps": gradients,
    "the optimizer's step": optimizer,
    "a chunked loss": loss,
    "checkpointing": checkpointing,
    "a smaller micro-batch": micro_batch,
    "bfloat16": precision,
    "more ranks": sharding,
    "offloading": offload,
    "expandable segments": segments,
}
"""Every family of levers, by what it tries."""


def find_levers(case: Case, watch: Callable[[str], None] | None = None) -> tuple[Lever, ...]:
    """Return all levers that save enough, by bytes saved per millisecond lost; `watch` is told what is tried."""
    found: list[Lever] = []
    for what, family in LEVERS.items():
        if watch is not None:
            watch(what)
        found += [lever for lever in family(case) if case.matters(lever.saves_bytes)]
    return sort_levers(found)
