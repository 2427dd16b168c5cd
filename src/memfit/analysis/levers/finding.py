"""`find_levers`: every family of levers tried on a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from memfit.analysis.levers.case import Case, Lever, sort_levers
from memfit.analysis.levers.changed_steps import loss, micro_batch, optimizer, precision
from memfit.analysis.levers.lifetimes import gradients, holding
from memfit.analysis.levers.offload import offload
from memfit.analysis.levers.replanned import checkpointing, sharding
from memfit.analysis.levers.segments import segments
from memfit.processes import both

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
DECIDED: dict[str, frozenset[str]] = {
    "the optimizer's step": frozenset({"optimizer"}),
    "a chunked loss": frozenset({"loss"}),
    "a smaller micro-batch": frozenset({"micro_batch"}),
    "offloading": frozenset({"offload", "cpu_offload"}),
    "expandable segments": frozenset({"segments"}),
}
"""The kinds of decisions that leave nothing to a family of levers, once a plan was asked to take all of them."""
_Tried = dict[str, tuple[list[Lever], list[str]]]
"""By family: its levers, and what could not be worked out."""


def find_levers(case: Case, watch: Callable[[str], None] | None = None) -> tuple[Lever, ...]:
    """Return all levers that save enough, by bytes saved per millisecond lost; `watch` is told what is tried."""
    _ = case.timeline, case.step_ms, case.runtime  # worked out before there are two processes
    # Two halves that take about as long. A capture takes longest, and may have begun early; the second half has none
    # of those, since only the process that began them may ask for them.
    early = case.early is not None and case.early.with_chunked_loss is not None
    second = ("checkpointing", "more ranks") if early else ("a chunked loss",)
    first = sorted(
        (what for what in LEVERS if what not in second), key=lambda what: what == "a chunked loss"
    )  # began last
    tried, beside = both(lambda: _try(case, first, watch), lambda: _try(case, second))
    tried |= beside
    case.left_out.extend(reason for what in LEVERS for reason in tried[what][1])
    return sort_levers([lever for what in LEVERS for lever in tried[what][0]])


def _try(case: Case, families: Iterable[str], watch: Callable[[str], None] | None = None) -> _Tried:
    tried: _Tried = {}
    for what in families:
        if watch is not None:
            watch(what)
        before = len(case.left_out)
        if what in DECIDED and DECIDED[what] <= case.decided:
            tried[what] = [], []
            continue
        levers = [lever for lever in LEVERS[what](case) if case.matters(lever.saves_bytes)]
        tried[what] = levers, case.left_out[before:]
        del case.left_out[before:]
    return tried
