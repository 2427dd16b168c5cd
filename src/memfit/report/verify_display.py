"""A verification for people: what does not hold first, then predicted beside measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.paths import alike, folded, module_label
from memfit.text import caption_more, number_table
from memfit.units import display_bytes, display_ms

if TYPE_CHECKING:
    from memfit.verify import BytesCheck, MsCheck, Verification

_ROWS = 8


def verification_report(found: Verification) -> Group:
    """Show everything that fits a screen of 80 columns."""
    parts: list[RenderableType] = [_headline(found), Text(), _beside(found)]
    if found.ranks:
        parts += [Text(), _ranks(found)]
    if found.by_module:
        parts += [Text(), _modules(found)]
    if found.forward_by_module and not found.time_agrees:
        parts += [Text(), _forwards(found)]
    return Group(*parts)


def _headline(found: Verification) -> Text:
    text = Text("the plan ")
    if found.ok:
        text.append("holds", style="bold green")
    elif found.only_time_differs:
        text.append("holds, but for its time,", style="bold yellow")
    else:
        text.append("does not hold", style="bold red")
    text.append(f" on {found.device}")
    if found.engine is not None:
        text.append(f", {len(found.ranks)} ranks on engine {found.engine}")
    for finding in found.findings:
        text.append(f"\n  - {finding}")
    if found.on_smaller_path:
        text.append(
            f"\nthe step takes one of several paths at random: the plan is for the largest, and the one that was "
            f"measured needs {-found.peak.error:.1%} less"
        )
    other = "fsdp2" if found.engine == "sharded" else "sharded"
    planned, here = (None if each is None else display_bytes(each) for each in _predictions(found))
    if planned not in (None, here):
        text.append(
            f"\nthe plan predicts {planned}, which is for {other}; its decisions are predicted to take {here} on "
            f"engine {found.engine}"
        )
    exactness = found.exactness
    if found.skipped is not None:
        text.append(f"\nthe step without the plan was not run: {found.skipped}", style="yellow")
    elif exactness is not None and exactness.equal and exactness.tolerance is not None:
        text.append(
            f"\nlosses and {exactness.gradients} gradients are the same with and without the plan up to the order of "
            f"sums (within {exactness.tolerance:.2g} of their largest value): the plan computes the loss in chunks"
        )
    elif exactness is not None and exactness.equal:
        text.append(
            f"\nlosses, {exactness.gradients} gradients, parameters and buffers of {exactness.steps} steps are the "
            "same bit for bit with and without the plan"
        )
        if exactness.chunked_in_both:
            text.append(", whose chunks of the loss are in both")
    return text


def _predictions(found: Verification) -> tuple[int | None, int]:
    """Return the peak in the plan's document, where ranks are sharded by other means, and the one for what ran."""
    return found.planned_peak_bytes, found.peak.predicted_bytes


def _beside(found: Verification) -> Table:
    table = number_table("", "predicted", "measured", "difference")
    if found.baseline_peak is not None:
        _bytes_row(table, "peak without the plan", found.baseline_peak, percent=True)
    _bytes_row(table, "peak with the plan", found.peak, percent=True)
    if found.baseline_step is not None:
        _ms_row(table, "step without the plan", found.baseline_step)
    _ms_row(table, "step with the plan", found.step)
    if found.by_category:
        table.add_section()
    for each in found.by_category:
        _bytes_row(table, each.name, each)
    return table


def _ranks(found: Verification) -> Table:
    """Show every rank; those in the middle of many are left out, the largest and the slowest never."""
    title = "by rank"
    largest, slowest = found.largest_rank, found.slowest_rank
    if largest is not None and slowest is not None:
        title += f": rank {largest.rank} is the largest, rank {slowest.rank} the slowest"
    table = number_table("rank", "predicted", "peak", "difference", "step", "without", "step without", title=title)
    rows = [each for each in found.ranks if each.rank < _ROWS or each in (largest, slowest)]
    for each in rows:
        plain, plain_step = each.baseline_peak, each.baseline_step
        table.add_row(
            str(each.rank),
            display_bytes(each.peak.predicted_bytes),
            display_bytes(each.peak.measured_bytes),
            f"{each.peak.error:+.2%}" if each.peak.difference_bytes else "none",
            display_ms(each.step.measured_ms),
            "" if plain is None else display_bytes(plain.measured_bytes),
            "" if plain_step is None else display_ms(plain_step.measured_ms),
        )
    caption_more(table, len(found.ranks), len(rows))
    return table


def _modules(found: Verification) -> Table:
    """Show modules that differ first, each by itself, then those that hold most."""
    table = number_table("module", "predicted", "measured", "difference", title="at the peak, by module")
    others = sorted(
        (each for each in found.by_module if each.difference_bytes), key=lambda each: -abs(each.difference_bytes)
    )
    rows = [(module_label(each.name), each.predicted_bytes, each.measured_bytes) for each in others]
    groups = _groups(each for each in found.by_module if not each.difference_bytes)
    same = [(name, sum(each.measured_bytes for each in members)) for name, members in groups]
    rows += [(name, n_bytes, n_bytes) for name, n_bytes in sorted(same, key=lambda row: -row[1])]
    for name, predicted, measured in rows[:_ROWS]:
        table.add_row(Text(name), display_bytes(predicted), display_bytes(measured), _signed(measured - predicted))
    caption_more(table, len(rows), _ROWS)
    return table


def _forwards(found: Verification) -> Table:
    table = number_table("module", "predicted", "measured", "difference", title="own forward, by module")
    rows = sorted(found.forward_by_module, key=lambda each: -abs(each.difference_ms))
    for each in rows[:_ROWS]:
        table.add_row(
            Text(module_label(each.name)),
            display_ms(each.predicted_ms),
            display_ms(each.measured_ms),
            display_ms(each.difference_ms),
        )
    caption_more(table, len(rows), _ROWS)
    return table


def _groups(rows: Iterable[BytesCheck]) -> list[tuple[str, list[BytesCheck]]]:
    """Group modules whose paths differ in numbers only under one name."""
    found: dict[str, list[BytesCheck]] = defaultdict(list)
    for each in rows:
        found[alike(each.name)].append(each)
    return [(module_label(folded(each.name for each in members)), members) for members in found.values()]


def _bytes_row(table: Table, name: str, each: BytesCheck, *, percent: bool = False) -> None:
    difference = f"{each.error:+.2%}" if percent and each.difference_bytes else _signed(each.difference_bytes)
    table.add_row(name, display_bytes(each.predicted_bytes), display_bytes(each.measured_bytes), difference)


def _ms_row(table: Table, name: str, each: MsCheck) -> None:
    table.add_row(name, display_ms(each.predicted_ms), display_ms(each.measured_ms), f"{each.error:+.1%}")


def _signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else ''}{display_bytes(n_bytes)}" if n_bytes else "none"
