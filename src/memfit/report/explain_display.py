"""An explanation for people: the verdict, what fills the peak, what holds it, and the levers."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.analysis import (
    Checkpointing,
    HeldStorage,
    Lever,
    ModuleAtPeak,
    StepExplanation,
    StillHeld,
    describe_shortfall,
)
from memfit.capture import Category, short
from memfit.paths import alike, folded, module_label
from memfit.plans import Plan, display_mesh
from memfit.report.mesh_display import dimension_table
from memfit.text import caption_more, counted, number_table
from memfit.units import display_bytes, display_ms

_SHOWN = 5
_SHOWN_HOPELESS = 8
"""How many levers a plan shows; more where nothing fits."""
_ROWS = 8
_LINES = 5
_UNITS = 4
_STATES = (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE)


def explanation_report(found: StepExplanation) -> Group:
    """Show everything that fits a screen of 100 columns."""
    parts: list[RenderableType] = [_headline(found)]
    for make in (_categories, _modules, _lines, _largest, _activations, _gathered, _dimensions):
        table = make(found)
        if table is not None:
            parts += [Text(), *_titled(table)]
    if found.checkpointing is not None:
        parts += [Text(), *_checkpointing(found.checkpointing)]
    if found.levers:
        parts += [Text(), *_levers(found)]
    if found.least_bytes is not None:
        parts += [Text(), Text(_least(found))]
    parts += [Text(f"no lever: {reason}", style="dim") for reason in found.left_out]
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


def _headline(found: StepExplanation) -> Text:
    what = "one step under the plan" if found.planned else "one step"
    ranks = counted(found.ranks, "rank") + (f" ({display_mesh(found.mesh)})" if found.mesh else "")
    text = Text(f"{what} on {found.device_title}, {ranks}: ")
    text.append(f"{display_bytes(found.peak_bytes)} at the peak", style="bold").append(
        f", {display_ms(found.step_ms)}\n"
    )
    over = found.peak_bytes - found.budget_bytes
    budget = display_bytes(found.budget_bytes)
    if over > 0:
        text.append(f"does not fit: {display_bytes(over)} above the budget of {budget}", style="red")
    elif not found.has_room and found.reserved_bytes is not None:
        reserved = display_bytes(found.reserved_bytes)
        text.append(
            f"fits the budget of {budget}, with care: the caching allocator reserves {reserved}", style="yellow"
        )
    else:
        text.append(f"fits: {display_bytes(-over)} below the budget of {budget}", style="green")
    at = found.at
    if at.second_run_of is not None:
        text.append(f"\nhighest in the second run of {module_label(at.second_run_of)}, at {short(at.name)}")
    elif at.name:
        where = "outside any module" if at.module is None else f"in {module_label(at.module)}"
        text.append(f"\nhighest in {at.phase}, at op {at.op}, {short(at.name)}, {where}")
    else:
        text.append(f"\nhighest {at.phase}")
    if at.source:
        text.append(f"\n  {at.source}", style="dim")
    return text


def _titled(table: Table) -> Iterable[RenderableType]:
    """Yield the table below its title, which a table would fold to its own width."""
    title, table.title = table.title, None
    yield Text(str(title), style="italic")
    yield table


def _categories(found: StepExplanation) -> Table:
    table = number_table("category", "bytes", "share", title="what fills the peak")
    for category, n_bytes in found.by_category.items():
        table.add_row(category.value, display_bytes(n_bytes), _share(n_bytes, found.peak_bytes))
    return table


def _modules(found: StepExplanation) -> Table | None:
    """Show modules, those whose paths differ in numbers only as one row."""
    if not found.by_module:
        return None
    groups: dict[str, list[ModuleAtPeak]] = defaultdict(list)
    for each in found.by_module:
        groups[alike(each.module)].append(each)
    rows = sorted(groups.values(), key=lambda members: -sum(each.size_bytes for each in members))
    title = "by module, each without the modules inside it"
    table = number_table("module", "bytes", "state", "activations", "other", title=title)
    table.add_column("most by line", overflow="fold")
    for members in rows[:_ROWS]:
        whole = sum(each.size_bytes for each in members)
        state = sum(each.by_category.get(category, 0) for each in members for category in _STATES)
        held = sum(each.by_category.get(Category.ACTIVATION, 0) for each in members)
        table.add_row(
            _label(each.module for each in members),
            display_bytes(whole),
            *(display_bytes(n_bytes) if n_bytes else "" for n_bytes in (state, held, whole - state - held)),
            _line(max(members, key=lambda each: each.size_bytes).source),
        )
    caption_more(table, len(rows), _ROWS)
    return table


def _lines(found: StepExplanation) -> Table | None:
    if not found.by_line:
        return None
    table = number_table("line", "allocations", "bytes", "share", title="by line of code")
    for each in found.by_line[:_LINES]:
        share = _share(each.size_bytes, found.peak_bytes)
        table.add_row(Text(each.source), str(each.allocations), display_bytes(each.size_bytes), share)
    caption_more(table, len(found.by_line), _LINES)
    return table


def _largest(found: StepExplanation) -> Table | None:
    if not found.largest:
        return None
    title = f"the {len(found.largest)} largest storages at the peak"
    words = ("made by", "held by", "ops", "line")
    table = number_table("bytes", *words, title=title, left=0, words=words)
    for each in found.largest:
        table.add_row(
            display_bytes(each.size_bytes), _tensor(each), Text(each.held_by), _life(each), _line(each.source)
        )
    return table


def _tensor(held: HeldStorage) -> Text:
    made = held.alloc_at is not None and held.holder != "sharding"
    text = Text(held.born_by if made else held.category.value)
    if held.module and made:
        text.append(f" in {held.module}")
    if held.shape is not None:
        text.append(f" {'x'.join(map(str, held.shape)) or 'scalar'} {held.dtype}", style="dim")
    return text


def _life(held: HeldStorage) -> str:
    """Return the ops between which a storage is alive."""
    begin = "start" if held.alloc_at is None else str(held.alloc_at)
    return f"{begin} to {'end' if held.free_after is None else held.free_after}"


def _activations(found: StepExplanation) -> Table | None:
    rows: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for each in found.activations:
        if each.module:
            rows[alike(each.module)].append((each.module, each.size_bytes, each.own_bytes))
    if not rows:
        return None
    title = "what modules and those inside them hold for the backward, when most is held"
    table = number_table("module", "modules", "each at most", "all", "their own", title=title)
    ordered = sorted(rows.values(), key=lambda members: -sum(size for _, size, _ in members))
    for members in ordered[:_ROWS]:
        table.add_row(
            _label(module for module, _, _ in members),
            str(len(members)),
            display_bytes(max(size for _, size, _ in members)),
            display_bytes(sum(size for _, size, _ in members)),
            display_bytes(sum(own for _, _, own in members)),
        )
    caption_more(table, len(ordered), _ROWS)
    return table


def _gathered(found: StepExplanation) -> Table | None:
    if not found.gathered:
        return None
    groups: dict[tuple[str, int], list] = defaultdict(list)
    for each in found.gathered:
        groups[alike(each.module), each.gathered_bytes].append(each)
    title = "sharded units: what is whole when one is gathered, and what is gathered at the peak"
    table = number_table(
        "unit", "units", "gathered", "whole gradient", "kept by a rank", "gathered at the peak", title=title
    )
    for members in list(groups.values())[:_ROWS]:
        first = members[0]
        table.add_row(
            _label(each.module for each in members),
            str(len(members)),
            display_bytes(first.gathered_bytes),
            display_bytes(first.gradient_bytes),
            display_bytes(first.shard_bytes),
            display_bytes(sum(each.at_peak_bytes for each in members)),
        )
    caption_more(table, len(groups), _ROWS)
    return table


def _dimensions(found: StepExplanation) -> Table | None:
    return dimension_table(found.dimensions)


def _checkpointing(found: Checkpointing) -> Iterable[RenderableType]:
    whose = "by the model itself" if found.by_the_model else "by the plan"
    text = Text(f"checkpointed {whose}: {counted(len(found.units), 'unit')}, {_names(found.units)}")
    if found.dropped_bytes is not None and found.peak_without_bytes is not None:
        lower = found.peak_without_bytes - found.peak_bytes
        text.append(f"\n  {display_bytes(found.dropped_bytes)} dropped, the peak {display_bytes(lower)} lower")
    for finding in found.findings:
        text.append(f"\n  - {finding}")
    yield text
    if not found.still_held:
        return
    groups: dict[tuple[str, str, str], list[StillHeld]] = defaultdict(list)
    for each in found.still_held:
        groups[alike(each.unit), each.name, each.reason].append(each)
    rows = sorted(groups.values(), key=lambda members: -sum(each.size_bytes for each in members))
    table = number_table("unit", "storages", "bytes", title="what checkpointed units hold at the peak all the same")
    table.add_column("made by", overflow="fold")
    table.add_column("why it stays", overflow="fold")
    for members in rows[:_ROWS]:
        first = members[0]
        table.add_row(
            _label(each.unit for each in members),
            str(len(members)),
            display_bytes(sum(each.size_bytes for each in members)),
            Text(first.name),
            Text(f"{first.reason}: {_alike_words(first.why) if len(members) > 1 else first.why}"),
        )
    yield Text()
    caption_more(table, len(rows), _ROWS)
    yield from _titled(table)


def _alike_words(text: str) -> str:
    """Replace numbers in module paths inside a sentence by stars."""
    return " ".join(alike(word) if "." in word and word[:1].isalpha() else word for word in text.split(" "))


def _levers(found: StepExplanation) -> Iterable[RenderableType]:
    """Yield what each lever does, then how."""
    title = "levers: free ones first, then by bytes saved for each millisecond lost, small ones last"
    table = number_table("", "saves", "peak then", "step", title=title)
    table.columns[0].justify = "right"
    table.add_column("lever", overflow="fold")
    for number, lever in enumerate(found.levers, 1):
        about = "~" if lever.basis == "estimated" else ""
        fits = lever.peak_bytes <= found.budget_bytes
        table.add_row(
            str(number),
            f"{about}{display_bytes(lever.saves_bytes)}",
            Text(f"{about}{display_bytes(lever.peak_bytes)}", style="green" if fits else ""),
            _time(lever),
            Text(lever.name + ("" if lever.same_numbers else " *") + (", fits" if fits and not found.fits else "")),
        )
    yield from _titled(table)
    yield Text(_legend(found), style="dim")
    how = Table.grid(padding=(0, 1))
    how.title = "how"
    how.add_column(justify="right", no_wrap=True)
    how.add_column(overflow="fold")
    for number, lever in enumerate(found.levers, 1):
        how.add_row(str(number), _how(lever))
    yield Text()
    yield from _titled(how)


def _time(lever: Lever) -> str:
    if lever.costs_ms is None:
        return "not known"
    if lever.costs_ms == 0:
        return "as long"
    return f"{'+' if lever.costs_ms > 0 else '-'}{display_ms(abs(lever.costs_ms))}"


def _how(lever: Lever) -> Group:
    """Put each text on a line of its own: a newline inside of one can only be part of a name."""
    lines = [Text(lever.how)]
    if lever.option:
        lines.append(Text(f"with memfit plan: {lever.option}"))
    if lever.units:
        lines.append(Text(f"{counted(len(lever.units), 'module')}: {_names(lever.units)}"))
    if lever.assumes:
        lines.append(Text(f"assumes {lever.assumes}", style="dim"))
    return Group(*lines)


def _legend(found: StepExplanation) -> str:
    says = ["predicted, not measured: the changed step was captured or solved, and replayed"]
    if any(lever.basis == "estimated" for lever in found.levers):
        says.append("~: estimated by arithmetic on the trace")
    if not all(lever.same_numbers for lever in found.levers):
        says.append("*: computes other numbers")
    return "; ".join(says)


def _least(found: StepExplanation) -> str:
    assert found.least_bytes is not None
    if found.least_bytes >= found.peak_bytes:
        return "checkpointing cannot lower the peak"
    return f"checkpointing alone reaches {display_bytes(found.least_bytes)} at the lowest"


def _names(names: Sequence[str]) -> str:
    """Name the first few units, those whose paths differ in numbers only as one."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[alike(name)].append(name)
    shown = [module_label(folded(members)) for members in groups.values()]
    more = len(shown) - _UNITS
    return ", ".join(shown[:_UNITS]) + (f" and {more} more" if more > 0 else "")


def _label(modules: Iterable[str]) -> Text:
    return Text(module_label(folded(modules)))


def _line(source: str) -> str:
    """Shorten to `file:line`, without folders and the function's name."""
    return os.path.basename(source.partition(" ")[0])


def _share(n_bytes: int, whole: int) -> str:
    return f"{n_bytes / whole:.1%}" if whole else ""


def levers_in_short(levers: Sequence[Lever], plan: Plan, explain: str) -> RenderableType:
    """Show the first few levers and the command that has the rest; where nothing fits, all that would make it fit."""
    hopeless = plan.predicted is None
    if not levers:
        return Text(f"\nno lever that memfit knows would lower this peak {'' if hopeless else 'further'}".rstrip())
    title = "what would lower this peak further: free ones first, then by bytes saved for each millisecond"
    if hopeless:
        title = "what would help, on top of the plan that needs least: what is enough by itself comes first"
    table = number_table("lever", "saves", "peak then", "a step takes", *(["for the budget"] if hopeless else []))
    shown = sorted(levers, key=lambda lever: hopeless and lever.peak_bytes > plan.budget_bytes)
    shown = shown[: _SHOWN_HOPELESS if hopeless else _SHOWN]
    for lever in shown:
        name = Text(lever.name if lever.same_numbers else f"{lever.name} *")
        if lever.option:
            name.append(f" ({lever.option})", style="dim")
        cells = [display_bytes(lever.saves_bytes), display_bytes(lever.peak_bytes), _longer(lever.costs_ms)]
        table.add_row(name, *cells, *([describe_shortfall(lever, plan.budget_bytes)] if hopeless else []))
    more = len(levers) - len(shown)
    rest = f"{more} more, and how each is done" if more > 0 else "how each is done"
    other = "" if all(lever.same_numbers for lever in shown) else "*: computes other numbers\n"
    return Group(Text(), Text(title, style="italic"), table, Text(f"{other}{rest}: {explain}", style="dim"))


def _longer(costs_ms: float | None) -> str:
    if costs_ms is None:
        return "unknown"
    if costs_ms == 0:
        return "as long"
    return f"{display_ms(abs(costs_ms))} {'longer' if costs_ms > 0 else 'less'}"
