"""A plan for people: what is checkpointed and why, memory and time before and after, how tight it is."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.paths import alike, folded
from memfit.plan.record import Checkpoint, Estimate, ShardPlan
from memfit.trace import Category
from memfit.units import display_bytes, display_ms

if TYPE_CHECKING:
    from memfit.plan.document import Plan

_WIDTH = 120
_NAMES = 4
_STYLE = {"optimal": "green", "feasible": "yellow", "infeasible": "red"}


def text_of(report: RenderableType) -> str:
    """A report as plain text, the same on every terminal."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(report)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def plan_report(plan: Plan) -> Group:
    """Everything about a plan that fits a screen."""
    parts: list[RenderableType] = [_headline(plan), Text(), _before_and_after(plan)]
    if plan.checkpoint:
        parts += [Text(), _checkpoint(plan)]
    if plan.shard is not None:
        parts += [Text(), _shard(plan.shard)]
    parts += [Text(f"note: {note}", style="dim") for note in plan.notes]
    return Group(*parts)


def _headline(plan: Plan) -> Text:
    ranks = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    budget = display_bytes(plan.budget_bytes)
    text = Text(f"plan for {plan.target.title}, {ranks}, budget {budget}: ")
    text.append(plan.status, style=f"bold {_STYLE[plan.status]}")
    over = plan.baseline.peak_bytes - plan.budget_bytes
    text.append("\nwithout a plan the step ")
    text.append(f"is {display_bytes(over)} above the budget" if over > 0 else "fits the budget")
    if plan.minimum_budget_bytes is not None:
        text.append(f"; the smallest budget that works is {display_bytes(plan.minimum_budget_bytes)}")
    if plan.predicted is None or plan.gap is None or plan.bound_ms is None:
        return text.append("\nno plan fits this budget")
    spare = plan.budget_bytes - plan.predicted.peak_bytes
    text.append(f"\nthe plan leaves {display_bytes(spare)} to spare; ")
    if plan.status == "optimal" and plan.gap == 0:
        text.append("no plan under this budget is faster (proven)")
    else:
        text.append(f"no plan has a step below {display_ms(plan.bound_ms)} (proven)")
        text.append(f", gap {plan.gap:.2%} of the time that the plan adds")
    return text


def _before_and_after(plan: Plan) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("without", justify="right")
    columns: list[Estimate] = [plan.baseline]
    if plan.predicted is not None:
        table.add_column("with the plan", justify="right")
        columns.append(plan.predicted)
    table.add_row("peak", *(display_bytes(each.peak_bytes) for each in columns))
    table.add_row("reserved by the allocator", *(display_bytes(each.peak_reserved_bytes) for each in columns))
    table.add_row("step", *(display_ms(each.step_ms) for each in columns))
    if plan.predicted is not None:
        table.add_row("  recomputing", "", display_ms(plan.predicted.recompute_ms))
        if plan.shard is not None or plan.predicted.exposed_communication_ms:
            table.add_row("  waiting for others", "", display_ms(plan.predicted.exposed_communication_ms))
    table.add_row("highest in", *(_place(each) for each in columns))
    by_category = [each.peak_by_category for each in columns]
    largest = sorted(Category, key=lambda category: -max(each.get(category, 0) for each in by_category))
    for category in largest:
        if any(category in each for each in by_category):
            cells = (display_bytes(each.get(category, 0)) if each else "" for each in by_category)
            table.add_row(f"  {category.value}", *cells)
    return table


def _place(estimate: Estimate) -> Text:
    at = estimate.peak_at
    if at.second_run_of is not None:
        return Text(f"second run of {at.second_run_of or '(model)'}")
    name = f", {_short(at.name)}" if at.name else ""
    return Text(at.phase + name)


def _checkpoint(plan: Plan) -> Table:
    """Units whose paths differ in numbers only and that have the same policy are one row."""
    groups: dict[tuple[object, ...], list[Checkpoint]] = {}
    for entry in plan.checkpoint:
        groups.setdefault(_policy(entry), []).append(entry)
    units = "1 unit" if len(plan.checkpoint) == 1 else f"{len(plan.checkpoint)} units"
    discarded = display_bytes(sum(entry.discarded_bytes for entry in plan.checkpoint))
    title = f"checkpointed: {units}, {discarded} less to hold for backward"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("unit", overflow="fold")
    table.add_column("kind", overflow="fold")
    for name in ("units", "each drops", "of its bytes", "for"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("keeps", overflow="fold")
    for members in groups.values():
        first = members[0]
        table.add_row(
            Text(_label(members)),
            Text(first.kind),
            str(len(members)),
            display_bytes(first.discarded_bytes),
            f"{first.discard_ratio:.0%}",
            _times(members),
            Text(_kept(first)),
        )
    return table


def _policy(entry: Checkpoint) -> tuple[object, ...]:
    return (
        alike(entry.module),
        entry.call,
        entry.kind,
        entry.stop,
        entry.discarded_bytes,
        entry.cached_bytes,
        entry.saved_ops,
        entry.recomputed_ops,
    )


def _times(members: list[Checkpoint]) -> str:
    """Units alike may differ in time: the first of them finds other things in the cache."""
    times = [entry.recompute_ms for entry in members]
    least, most = display_ms(min(times)), display_ms(max(times))
    return least if least == most else f"{least} to {most}"


def _label(members: list[Checkpoint]) -> str:
    first = members[0]
    if len(members) == 1 or first.is_loss:
        return first.unit or "(model)"
    return folded(entry.module for entry in members) + (f"#{first.call}" if first.call else "")


def _kept(entry: Checkpoint) -> str:
    """The ops whose results are saved, by how often."""
    names = Counter(_short(op.name) for op in entry.saved_ops)
    if not names:
        return "nothing"
    shown = [name if count == 1 else f"{count} {name}" for name, count in names.most_common(_NAMES)]
    more = len(names) - _NAMES
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _shard(shard: ShardPlan) -> Text:
    """Units that keep their parameters between forward and backward are named, the others counted."""
    kept = [unit.module for unit in shard.units if not unit.reshard_after_forward]
    text = Text(f"sharded by {shard.ranks}: {len(shard.units)} units, {shard.prefetch} gathered ahead")
    patterns: dict[str, list[str]] = {}
    for module in kept:
        patterns.setdefault(alike(module), []).append(module)
    if kept:
        names = ", ".join(folded(modules) or "(model)" for modules in patterns.values())
        text.append(f"\n  gathered from forward to backward: {names}")
    for name in ("shard_dtype", "param_dtype", "reduce_dtype"):
        if getattr(shard, name) is not None:
            text.append(f"\n  {name}: {getattr(shard, name)}")
    return text


def _short(name: str) -> str:
    """An op's name without what all of them have."""
    return name.removeprefix("aten.").removesuffix(".default")
