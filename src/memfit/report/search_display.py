"""A search for people: the answer first, how exact it is, then every value that was tried."""

from __future__ import annotations

import math
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.plans import EXPANDABLE, Over, Search, SearchPoint
from memfit.report.frontier_plot import Mark, draw_marks
from memfit.text import counted, number_table
from memfit.units import display_budget, display_bytes, display_ms

_WHAT: dict[Over, str] = {"batch": "batch size of a rank", "seq": "sequence length", "ranks": "number of ranks"}
_DRAWN = 4
"""So many values that fit are drawn."""
_LARGEST: dict[Over, str] = {"batch": "largest that fits", "seq": "longest that fits", "ranks": ""}


def search_report(search: Search) -> Group:
    """Show everything that fits a screen of 80 columns."""
    parts: list[RenderableType] = [search_headline(search), Text(), _points(search)]
    picture = _picture(search)
    parts += [] if picture is None else [Text(), picture]
    parts += [Text(), Text(_legend(search), style="dim")]
    parts += [Text(f"note: {note}", style="dim") for note in search.notes]
    return Group(*parts)


def search_headline(search: Search) -> Text:
    """Say the answer and how exact it is."""
    where = search.target if search.ranks is None else f"{search.ranks} x {search.target}"
    text = Text(f"{_WHAT[search.over]} for {where}, budget {_budget(search)} a rank: ")
    best, largest, smallest = search.best, search.largest, search.smallest
    if not search.complete:
        text.append("interrupted, up to here ", style="bold yellow")
    if largest is None or smallest is None:
        text.append("nothing fits", style="bold red")
        text.append(_what_is_missing(search))
        return text
    if search.over == "batch" and best is not None:
        text.append(*_answer(best, f"{best.value} is best"))
    elif search.over == "ranks":
        text.append(*_answer(smallest, f"{smallest.value} or more"))
    else:
        text.append(*_answer(largest, f"up to {largest.value}"))
    if best is not None and search.over != "seq":
        of_each = " a rank" if search.over == "ranks" else ""
        text.append(f"\nfastest: {best.value}, {display_rate(search.rate(best))} {search.counts}/s{of_each} predicted")
        text.append("" if best.recompute_ms else ", nothing recomputed")
        if search.over == "batch" and search.grid and not search.tried_all:
            tried = sum(point.fits for point in search.points)
            text.append(f" (of {tried} tried among {largest.value} that fit)")
    if search.over != "ranks":
        text.append(f"\n{_LARGEST[search.over]}: {largest.value}{_exactness(search)}")
        text.append(_care(search, largest))
    return text


def _budget(search: Search) -> str:
    """Return the budget; over ranks from the least to the most, since NCCL takes more of a rank among many."""
    allowed = sorted({point.allowed_bytes for point in search.points}) or [search.budget_bytes]
    return " to ".join(dict.fromkeys(display_bytes(each) for each in (allowed[0], allowed[-1])))


def _answer(point: SearchPoint, words: str) -> tuple[str, str]:
    """Return the answer in words, and their style."""
    return (f"{words}, with care", "bold yellow") if point.with_care else (words, "bold green")


def _care(search: Search, largest: SearchPoint) -> str:
    """Say up to where the caching allocator has room, when that is less."""
    if not largest.with_care:
        return ""
    safe = search.largest_without_care
    if safe is None:
        return "\nwith room for the caching allocator: none of those tried (!)"
    beside = search.grid > 0 and any(point.value == safe.value + search.grid for point in search.points)
    how = "more need care" if beside else "of those tried; more need care"
    return f"\nwith room for the caching allocator: up to {safe.value} ({how}, !)"


def _what_is_missing(search: Search) -> str:
    """Say what the value that comes nearest to fitting needs."""
    needs = [point for point in search.points if point.minimum_budget_bytes is not None]
    if not needs:
        return "\nno smallest budget was found in the time limit"
    least = min(needs, key=lambda point: point.minimum_budget_bytes or 0)
    return (
        f"\nthe smallest budget that works is {display_bytes(least.minimum_budget_bytes or 0)}, at "
        f"{search.over} {least.value}; {_instead(search.over, least.value)}"
    )


def _instead(over: Over, value: int) -> str:
    """Say what to try when nothing fits."""
    if over == "ranks":
        return "give a larger budget, more ranks or a smaller batch"
    smaller = "a smaller batch" if over == "batch" else "a shorter sequence"
    least = 1 if over == "batch" else 128
    return f"give {f'{smaller}, ' if value > least else ''}a larger budget, more ranks or a smaller model"


def _exactness(search: Search) -> str:
    above = search.first_above
    if above is None and search.exact:
        return f", the last that there is a step for: {search.refused} has none"
    if above is None:
        return ", the last value that was tried"
    missing = (above.minimum_budget_bytes or 0) - search.budget_bytes
    needs = f", it needs {display_bytes(missing)} more" if missing > 0 else ""
    if search.exact:
        return f" (exact: {above.value} does not{needs})"
    return f" (of those tried; {above.value} does not{needs})"


def _points(search: Search) -> Table:
    care = any(point.with_care for point in search.points)
    names = [search.over, "step", "recomputing", f"{search.counts}/s", "peak", "without a plan", "least budget"]
    if care:
        names.insert(5, "reserved")
    table = number_table(*names, left=0)
    answer = search.largest if search.over == "seq" else search.best
    for point in search.points:
        cells = _cells(point)
        if care:
            reserved = "" if point.peak_reserved_bytes is None else display_bytes(point.peak_reserved_bytes)
            cells.insert(5, f"{reserved} !" if point.with_care else reserved)
        table.add_row(*cells, style="bold green" if point is answer else None if point.fits else "dim")
    return table


def _picture(search: Search) -> Text | None:
    """Draw throughput over the values; None where there are too few to say more than the table does."""
    rates = {point.value: search.rate(point) for point in search.points if point.throughput_per_s is not None}
    if len(rates) < _DRAWN:
        return None
    marks = []
    for point in search.points:
        if point.status == "slower":
            marks.append(Mark(x=point.value, y=point.most_per_s or 0.0, sign="▽"))
        elif point.value not in rates:
            marks.append(Mark(x=point.value, y=0.0, sign="x", style="red"))
        elif point.with_care:
            marks.append(Mark(x=point.value, y=rates[point.value], sign="!", style="yellow"))
        else:
            marks.append(Mark(x=point.value, y=rates[point.value], sign="○" if point.recompute_ms else "●"))
    marks.sort(key=lambda mark: search.best is not None and mark.x == search.best.value)
    if search.best is not None:
        marks[-1] = replace(marks[-1], style="bold green")
    each = " a rank" if search.over == "ranks" else ""
    slower = "▽ at most, " if any(point.status == "slower" for point in search.points) else ""
    return draw_marks(
        marks,
        title=f"{search.counts}/s{each} over {search.over}: ● nothing recomputed, ○ recomputing, {slower}x no plan",
        top=display_rate(max(rates.values())),
        left=str(search.points[0].value),
        right=str(search.points[-1].value),
    )


def _cells(point: SearchPoint) -> list[str]:
    least = "" if point.minimum_budget_bytes is None else display_budget(point.minimum_budget_bytes)
    baseline = display_bytes(point.baseline_peak_bytes)
    if point.least_step_ms is not None and point.most_per_s is not None:
        step, rate = f">= {display_ms(point.least_step_ms)}", f"<= {display_rate(point.most_per_s)}"
        return [str(point.value), step, "", rate, "", baseline, least]
    if point.step_ms is None or point.peak_bytes is None:
        why = "no time" if point.status == "unknown" else "no plan"
        return [str(point.value), why, "", "", "", baseline, least]
    rate = "" if point.throughput_per_s is None else display_rate(point.throughput_per_s)
    again = display_ms(point.recompute_ms) if point.recompute_ms else ""
    return [str(point.value), display_ms(point.step_ms), again, rate, display_bytes(point.peak_bytes), baseline, least]


def _legend(search: Search) -> str:
    ranks = " of all ranks together" if search.ranks != 1 else ""
    lines = f"{search.counts}/s: predicted{ranks}; least budget: the smallest that any plan works with"
    if 0 < search.captured < len(search.points) and search.over != "ranks":
        lines += f"; {counted(search.captured, 'value')} captured, the traces of the others follow from theirs"
    if any(point.status == "slower" for point in search.points):
        lines += "; >=, <=: bounds of values that cannot be the best and got no plan"
    if any(point.gap for point in search.points):
        most = max(point.gap or 0.0 for point in search.points)
        lines += f"; recomputing may be up to {most:.1%} above the least where a plan is not proven to be the fastest"
    lowered = [point for point in search.points if point.fits and point.budget_bytes < point.allowed_bytes]
    if lowered:
        least = display_bytes(min(point.budget_bytes for point in lowered))
        lines += f"\nthe budget was lowered, to {least} at the lowest, where the caching allocator needs the room"
    if any(point.with_care for point in search.points):
        lines += (
            "\n!: with care, the caching allocator would reserve more than the device has for tensors; "
            f"memfit plan says what helps, or run with {EXPANDABLE}"
        )
    return lines


def display_rate(rate: float) -> str:
    """Display a rate with three digits, or all before the point."""
    return "0" if rate == 0 else f"{rate:,.{max(0, 2 - math.floor(math.log10(rate)))}f}"
