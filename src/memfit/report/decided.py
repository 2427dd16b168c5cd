"""The kinds of decisions that a plan took together, with what each saves, costs and asks for a GiB."""

from __future__ import annotations

from msgspec import UNSET

from memfit.plans import Decision, Plan
from memfit.units import display_bytes, display_ms

DECIDED_COLUMNS = ("decided", "setting", "saves", "costs a step", "for a GiB", "the step without it")
_WORDS = {"checkpoint": "recompute", "loss": "loss in chunks", "optimizer": "optimizer step"}


def decisions_of(plan: Plan | None) -> tuple[Decision, ...]:
    """Return the decisions of a plan that says them; none for a plan of checkpointing alone."""
    return (plan.decisions or ()) if plan is not None else ()


def decision_cells(decision: Decision) -> tuple[str, ...]:
    """Return a decision in words, under `DECIDED_COLUMNS`."""
    saves, costs = decision.saves_bytes, decision.costs_ms
    return (
        _WORDS.get(decision.kind, decision.kind),
        decision.setting,
        display_bytes(saves) if saves >= 0 else f"{display_bytes(-saves)} more",
        display_ms(costs) if costs > 0 else f"{display_ms(-costs)} less" if costs < 0 else "nothing",
        display_ms(decision.ms_per_gib) if decision.ms_per_gib else "nothing" if decision.ms_per_gib == 0 else "",
        _without(decision),
    )


def _without(decision: Decision) -> str:
    """Return the time of the best plan without a decision, and with all others."""
    if decision.without_ms is None:
        return "does not fit"
    return "" if decision.without_ms is UNSET else display_ms(decision.without_ms)


def describe_price(plan: Plan) -> str:
    """Say what a GiB less of budget would cost; empty where a plan does not know."""
    price = plan.price_ms_per_gib
    return f"a GiB less of budget would cost about {display_ms(price)} a step" if price else ""
