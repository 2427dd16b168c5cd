"""A plan for people: what is checkpointed and why, memory and time before and after, how tight it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.capture import Category, short
from memfit.paths import alike, folded, module_label, ranges
from memfit.plans import Blocker, Checkpoint, DdpPlan, Engine, Estimate, Plan, ShardPlan, describe_peak
from memfit.report.decided import DECIDED_COLUMNS, decision_cells, decisions_of, describe_price
from memfit.report.headline import STEP_WAYS, Tone, changes_nothing, rank_memory_of, verdict_of, without_plan
from memfit.text import counted, number_table
from memfit.units import display_budget, display_bytes, display_ms

_NAMES = 4
_STYLE: dict[Tone, str] = {"good": "green", "care": "yellow", "bad": "red"}


def plan_report(plan: Plan, *, next_step: bool = True) -> Group:
    """Show what fits a screen of 80 columns about a plan; `next_step` says what to ask when nothing fits."""
    parts: list[RenderableType] = [_headline(plan), Text(), _before_and_after(plan), Text(), _highest(plan)]
    if plan.blocker is not None and next_step:
        parts += [Text("memfit.explain(plan, step) works out what would help", style="dim")]
    if decisions_of(plan):
        parts += [Text(), _title("decided together"), _decided(plan)]
        parts += [Text(describe_price(plan), style="dim")] if describe_price(plan) else []
    if plan.checkpoint:
        groups = _groups(plan.checkpoint)
        parts += [Text(), _title(_counts(plan)), _checkpoint(groups)]
        if any("#" in units_label(members) for members in groups):
            legend = "#1-3: these runs of the module, from 0; each micro-batch of an accumulated step is a run"
            parts += [Text(legend, style="dim")]
        parts += [Text(), _title("what each of them keeps"), _kept(plan.checkpoint)]
        if any(entry.is_loss and entry.after is None for entry in plan.checkpoint):
            parts += [
                Text(),
                Text("the loss is recomputed and is not in the model: loss = plan.loss(loss), then call that"),
            ]
    if plan.chunked_loss:
        chunked = f"the loss is computed in {plan.chunked_loss.chunks} chunks, equal up to the order of sums"
        outside = "" if plan.chunked_loss.inside else "; it is not in the model: loss = plan.loss(loss), then call that"
        parts += [Text(), Text(chunked + outside)]
    if plan.optimizer is not None:
        parts += [Text(), Text(f"optimizer: its step is done {STEP_WAYS[plan.optimizer]}, which needs less at once")]
    if plan.shard is not None:
        parts += [Text(), _shard(plan.shard, plan.engine)]
    if plan.ddp is not None:
        parts += [Text(), _ddp(plan.ddp)]
    if plan.notes:
        parts += [Text(), *(Text(f"note: {note}", style="dim") for note in plan.notes)]
    return Group(*parts)


def _without(plan: Plan) -> str:
    return without_plan(plan.ranks, ddp=plan.ddp is not None)


def _headline(plan: Plan) -> Text:
    """Write the verdict in the words of the page, for what it is, and how tight it is."""
    verdict = verdict_of(plan)
    text = Text(verdict.words.lower(), style=f"bold {_STYLE[verdict.tone]}")
    text = Text.assemble(text, f": {verdict.figures}")
    for reason in verdict.reasons:
        text.append(f"\n{reason[:1].lower()}{reason[1:].removesuffix('.')}")
    budget = display_bytes(plan.budget_bytes)
    text.append(f"\nplan for {plan.target.title}, {counted(plan.ranks, 'rank')}, budget {budget}: {plan.status}")
    has = rank_memory_of(plan.target)
    text.append(f"\n{has}" if has else "")
    if changes_nothing(plan):
        spare = display_bytes(plan.budget_bytes - plan.baseline.peak_bytes)
        as_it_is = "as it is" if plan.ranks == 1 else f"when it is {_without(plan)}"
        text.append(f"\nnothing needs to be checkpointed: {as_it_is}, the step leaves {spare} to spare")
        return text
    over = plan.baseline.peak_bytes - plan.budget_bytes
    text.append("\nwithout a plan the step " if plan.ranks == 1 else f"\n{_without(plan)}, the step ")
    text.append(f"is {display_bytes(over)} above the budget" if over > 0 else "fits the budget")
    least = plan.minimum_budget_bytes
    if plan.predicted is None or plan.gap is None or plan.bound_ms is None:
        text.append("\nno plan fits this budget")
        if least is not None:
            missing = display_bytes(least - plan.budget_bytes)
            text.append(f"; the smallest that works is {display_budget(least)}, {missing} more")
        return text
    if least is not None:
        text.append(f"; the smallest budget that works is {display_budget(least)}")
    spare = plan.budget_bytes - plan.predicted.peak_bytes
    text.append(f"\nthe plan leaves {display_bytes(spare)} to spare; ")
    if plan.status == "optimal" and plan.gap == 0:
        text.append("no plan under this budget is faster (proven)")
    else:
        text.append(f"no plan has a step below {display_ms(plan.bound_ms)} (proven)")
        text.append(f", gap {plan.gap:.2%} of the time that the plan adds")
    return text


def _before_and_after(plan: Plan) -> Table:
    """Show memory and time without the plan and with it.

    When nothing fits, the lowest peak stands beside; when nothing is changed, the step stands alone. On several ranks
    the step is sharded also without the plan.
    """
    same = changes_nothing(plan)
    by_name: list[tuple[str, Estimate | Blocker]] = []
    if not same:
        by_name.append((_without(plan), plan.baseline))
    if plan.predicted is not None:
        name = "with the plan" if not same else "as it is" if plan.ranks == 1 else _without(plan)
        by_name.append((name, plan.predicted))
    elif plan.blocker is not None:
        by_name.append(("the lowest there is", plan.blocker))
    table = number_table("", *(name for name, _ in by_name))
    columns = [column for _, column in by_name]
    estimates = [each for each in columns if isinstance(each, Estimate)]
    table.add_row("peak", *(display_bytes(each.peak_bytes) for each in columns))
    if any(each.peak_reserved_bytes != each.peak_bytes for each in estimates):
        table.add_row("reserved by the allocator", *(each.reserved for each in estimates))
    table.add_row("step", *(display_ms(each.step_ms) for each in estimates))
    if plan.predicted is not None:
        beside = [] if same else [""]
        if not same:
            table.add_row("  recomputing", "", display_ms(plan.predicted.recompute_ms))
        if plan.ranks > 1 or plan.predicted.exposed_communication_ms:
            waits = display_ms(plan.predicted.exposed_communication_ms)
            table.add_row("  waiting for communication", *beside, waits)
        if any(entry.offloaded_bytes for entry in plan.checkpoint):
            table.add_row("  waiting for offload", *beside, display_ms(plan.predicted.exposed_offload_ms or 0.0))
    table.add_section()
    by_category = [each.peak_by_category for each in columns]
    for category in sorted(Category, key=lambda category: -max(each.get(category, 0) for each in by_category)):
        if any(category in each for each in by_category):
            cells = (display_bytes(each.get(category, 0)) if each else "" for each in by_category)
            table.add_row(category.value, *cells)
    return table


def _highest(plan: Plan) -> Text:
    """Say where the peaks are."""
    if changes_nothing(plan):
        return Text(f"highest: {describe_peak(plan.baseline.peak_at)}")
    text = Text("highest without a plan: " if plan.ranks == 1 else f"highest when {_without(plan)}: ")
    text.append(describe_peak(plan.baseline.peak_at))
    if plan.predicted is not None:
        text.append(f"\nhighest with the plan: {describe_peak(plan.predicted.peak_at)}")
    if plan.blocker is not None:
        lowest = display_bytes(plan.blocker.peak_bytes)
        text.append(f"\nnothing gets below {lowest} here: {describe_peak(plan.blocker.peak_at)}")
    return text


def _decided(plan: Plan) -> Table:
    """Show each kind of decision, what it saves, what it costs, and the price of a GiB there."""
    table = number_table(*DECIDED_COLUMNS, words=DECIDED_COLUMNS[:2])
    for decision in decisions_of(plan):
        table.add_row(*decision_cells(decision))
    return table


def _groups(checkpoint: Iterable[Checkpoint]) -> list[list[Checkpoint]]:
    """Group units whose paths differ in numbers only and that have the same policy."""
    groups: dict[tuple[object, ...], list[Checkpoint]] = {}
    for entry in checkpoint:
        groups.setdefault(same_policy(entry), []).append(entry)
    return list(groups.values())


def _title(words: str) -> Text:
    """Return a title of its own; that of a table would be folded to the table's width."""
    return Text(words, style="italic")


def _counts(plan: Plan) -> str:
    discarded = display_bytes(sum(entry.discarded_bytes for entry in plan.checkpoint))
    recomputing = sum(entry.stop >= 0 for entry in plan.checkpoint)
    parts = (
        [f"checkpointed: {counted(recomputing, 'unit')}, {discarded} less to hold for backward"] if recomputing else []
    )
    if offloading := [entry for entry in plan.checkpoint if entry.offloaded_bytes]:
        away = display_bytes(sum(entry.offloaded_bytes or 0 for entry in offloading))
        parts.append(f"offloaded: {counted(len(offloading), 'unit')}, {away} on the host from forward to backward")
    return "; ".join(parts)


def _checkpoint(groups: list[list[Checkpoint]]) -> Table:
    offloads = any(members[0].offloaded_bytes for members in groups)
    table = number_table("unit", "units", "each drops", "share", "recompute", *(["offloads"] if offloads else []))
    for members in groups:
        first = members[0]
        away = [display_bytes(first.offloaded_bytes or 0)] if offloads else []
        table.add_row(
            Text.assemble(units_label(members), " ", (first.kind, "dim")),
            str(len(members)),
            display_bytes(first.discarded_bytes),
            f"{first.discard_ratio:.0%}",
            _times(members),
            *away,
        )
    return table


def _kept(checkpoint: Iterable[Checkpoint]) -> Table:
    """Show what each unit keeps from forward to backward and the ops that make it; equal units share a row."""
    groups: dict[tuple[object, ...], list[Checkpoint]] = {}
    for entry in checkpoint:
        key = (alike(entry.module), entry.kind, _kept_bytes(entry), _kept_ops(entry))
        groups.setdefault(key, []).append(entry)
    ops = "of, largest first"
    table = number_table("unit", "keeps", ops, words=(ops,))
    for members in groups.values():
        first = members[0]
        kept = (display_bytes(_kept_bytes(first)), _kept_ops(first)) if _kept_bytes(first) else ("nothing", "")
        table.add_row(Text(units_label(members)), kept[0], Text(kept[1]))
    return table


def same_policy(entry: Checkpoint) -> tuple[object, ...]:
    """Return a key that is equal for units that are alike and have the same policy.

    The run of the module does not matter: a micro-batch of an accumulated step is one run.
    """
    return (
        alike(entry.module),
        entry.kind,
        entry.stop,
        entry.discarded_bytes,
        entry.cached_bytes,
        entry.saved_ops,
        entry.recomputed_ops,
        entry.offload or (),
    )


def _times(members: list[Checkpoint]) -> str:
    """Write the range of times: of units alike the first finds other data in the cache."""
    times = [entry.recompute_ms for entry in members]
    least, most = display_ms(min(times)), display_ms(max(times))
    return least if least == most else f"{least} to {most}"


def units_label(members: Sequence[Checkpoint]) -> str:
    """Name units that are alike: `layers.0-15.mlp`, and their runs where these are not all of them."""
    first = members[0]
    if len(members) == 1:
        return module_label(first.unit)
    base = first.unit.partition("#")[0] if first.is_loss else folded(entry.module for entry in members)
    return module_label(base) + _runs(members)


def _runs(members: Sequence[Checkpoint]) -> str:
    """Return `, each of 4 runs`, or `#1-3` where only these have this policy; empty for modules that run once."""
    calls = {entry.call for entry in members}
    total = max(entry.calls for entry in members)
    if members[0].is_loss:
        total = max(total, max(calls) + 1)
    if total == 1 or calls == {0} == {entry.calls - 1 for entry in members}:
        return ""
    whole = len(members) == len(calls) * len({entry.module for entry in members})
    if len(calls) == total and whole:
        return f", each of {total} runs"
    return f"#{ranges(calls)}" if whole else f", {len(members)} of their runs"


def _kept_bytes(entry: Checkpoint) -> int:
    """Return what stays on the device from forward to backward."""
    return entry.cached_bytes - (entry.offloaded_bytes or 0)


def _kept_ops(entry: Checkpoint) -> str:
    """Name the ops whose results are saved, those that take most first; those that take nothing are left out."""
    sizes: dict[str, list[int]] = defaultdict(list)
    away = {op.offset for op in entry.offload or ()}
    for op in entry.saved_ops:
        if op.bytes and op.offset not in away:
            sizes[short(op.name)].append(op.bytes)
    largest = sorted(sizes, key=lambda name: -sum(sizes[name]))
    shown = [name if len(sizes[name]) == 1 else f"{len(sizes[name])} {name}" for name in largest[:_NAMES]]
    more = len(sizes) - _NAMES
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _shard(shard: ShardPlan, engine: Engine | None) -> Text:
    """Name units that keep their parameters between forward and backward, and count the others."""
    kept = [unit.module for unit in shard.units if not unit.reshard_after_forward]
    copies = f", {shard.replicas} replicas" if shard.replicas > 1 else ""
    text = Text(
        f"sharded by {shard.ranks}{copies}: {counted(len(shard.units), 'unit')}, {shard.prefetch} gathered ahead"
    )
    if engine is not None:
        text.append(f", on engine {engine}")
    patterns: dict[str, list[str]] = {}
    for module in kept:
        patterns.setdefault(alike(module), []).append(module)
    if kept:
        names = ", ".join(module_label(folded(modules)) for modules in patterns.values())
        text.append(f"\n  gathered from forward to backward: {names}")
    for name in ("shard_dtype", "param_dtype", "reduce_dtype"):
        if getattr(shard, name) is not None:
            text.append(f"\n  {name}: {getattr(shard, name)}")
    return text


def _ddp(ddp: DdpPlan) -> Text:
    """Say where gradients are while they are averaged, and who wraps the model."""
    total = display_bytes(sum(ddp.buckets))
    where = "which gradients are views of" if ddp.gradient_as_bucket_view else "beside the gradients"
    option = ", gradient_as_bucket_view=True" if ddp.gradient_as_bucket_view else ""
    cap = "" if ddp.bucket_cap_bytes == 25 << 20 else f", bucket_cap_mb={ddp.bucket_cap_bytes / (1 << 20):g}"
    return Text(
        f"replicated on {ddp.ranks} ranks: gradients are averaged in {counted(len(ddp.buckets), 'bucket')}, {total}, "
        f"{where}\n  wrap the model yourself, before or after apply: DistributedDataParallel(model{cap}{option})"
    )
