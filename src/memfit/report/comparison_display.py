"""A comparison for people: what changed, what it did, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.capture import short
from memfit.text import caption_more, number_table
from memfit.units import display_bytes, display_ms

if TYPE_CHECKING:
    from memfit.analysis import Comparison

_ROWS = 12
_NOTHING = "-"
_LEAST_PART = 5e-4
"""A smaller part of the whole would be shown as nothing."""


def comparison_report(found: Comparison) -> Group:
    """Show everything that differs, within 100 columns, or that nothing does."""
    text = Text(f"two {found.kind} compared\n  first:  {found.first}\n  second: {found.second}")
    if found.same:
        return Group(text, Text("nothing differs", style="bold green"))
    parts: list[RenderableType] = [text, Text(), _changed(found), Text(), _effects(found), Text(), _places(found)]
    for table in (_decisions(found), _modules(found), _ops(found)):
        if table is not None:
            parts += [Text(), table]
    return Group(*parts)


def _changed(found: Comparison) -> RenderableType:
    if not found.changed:
        return Text(f"what changed: {found.note or 'nothing of what they were made from'}")
    table = number_table("", "first", "second", left=3, title="what changed")
    for each in found.changed[:_ROWS]:
        table.add_row(
            Text(each.name), *(Text(_NOTHING if side is None else side) for side in (each.first, each.second))
        )
    caption_more(table, len(found.changed), _ROWS)
    return table if found.note is None else Group(table, Text(found.note))


def _effects(found: Comparison) -> Table:
    """Show memory and time on both sides; what does not differ has no change."""
    table = number_table("", "first", "second", "change", title="what it did")
    for each in found.memory:
        table.add_row(each.name, *_cells(each.first_bytes, each.second_bytes, display_bytes))
    if found.times:
        table.add_section()
    for each in found.times:
        table.add_row(each.name, *_cells(each.first_ms, each.second_ms, display_ms))
    if found.flops is not None:
        table.add_section()
        table.add_row(found.flops.name, *_cells(found.flops.first, found.flops.second, _flops))
    return table


def _places(found: Comparison) -> Text:
    if found.first_peak_at == found.second_peak_at:
        return Text(f"highest on both sides: {found.first_peak_at}")
    return Text(f"highest in the first:  {found.first_peak_at}\nhighest in the second: {found.second_peak_at}")


def _decisions(found: Comparison) -> Table | None:
    if not found.decisions:
        return None
    names = ("unit", "units", "each drops, first", "second", "recompute all, first", "second")
    table = number_table(*names, title="decisions that differ")
    for each in found.decisions[:_ROWS]:
        table.add_row(
            Text.assemble(each.units, " ", (each.kind, "dim")),
            str(each.count),
            *(_NOTHING if side is None else display_bytes(side) for side in (each.first_bytes, each.second_bytes)),
            *(_NOTHING if side is None else display_ms(side) for side in (each.first_ms, each.second_ms)),
        )
    caption_more(table, len(found.decisions), _ROWS)
    return table


def _modules(found: Comparison) -> Table | None:
    if not found.modules:
        return None
    names = ("module", "modules", "left for backward", "change", "FLOPs", "change")
    table = number_table(*names, title="modules that differ, with those inside them")
    for each in found.modules[:_ROWS]:
        count = str(each.second_modules)
        if each.first_modules != each.second_modules:
            count = f"{each.first_modules} -> {each.second_modules}"
        table.add_row(
            Text(each.module),
            count,
            display_bytes(each.second_activation_bytes),
            _signed(each.second_activation_bytes - each.first_activation_bytes, display_bytes),
            _flops(each.second_flops),
            _signed(each.second_flops - each.first_flops, _flops),
        )
    caption_more(table, len(found.modules), _ROWS)
    return table


def _ops(found: Comparison) -> Table | None:
    if not found.ops:
        return None
    table = number_table("op", "first", "second", "change", title="ops that run another number of times")
    for each in found.ops[:_ROWS]:
        name = short(each.name)
        table.add_row(Text(name), str(each.first), str(each.second), f"{each.second - each.first:+}")
    caption_more(table, len(found.ops), _ROWS)
    return table


def _cells(first: float | None, second: float | None, shown: Callable[[float], str]) -> list[str]:
    """Display both sides and their difference, in their own unit and as a part where there is one."""
    cells = [_NOTHING if side is None else shown(side) for side in (first, second)]
    if first is None or second is None or first == second:
        return [*cells, ""]
    part = (second - first) / first if first else 0.0
    shown_part = f" ({part:+.1%})" if abs(part) >= _LEAST_PART else ""
    return [*cells, _signed(second - first, shown) + shown_part]


def _signed(difference: float, shown: Callable[[float], str]) -> str:
    return f"{'+' if difference > 0 else ''}{shown(difference)}" if difference else ""


def _flops(count: float) -> str:
    """Display FLOPs in the unit that a person would choose."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f}"
