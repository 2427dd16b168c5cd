"""A search over devices for people: the fastest, the cheapest, the smallest that fits; then every device."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.plans import EXPANDABLE, DevicePoint, DeviceSearch
from memfit.report.search_display import display_rate
from memfit.text import number_table
from memfit.units import display_bytes, display_ms


def device_search_report(search: DeviceSearch) -> Group:
    """Show everything that fits a screen of 100 columns."""
    planned = [point for point in search.points if point.status != "impossible"]
    parts: list[RenderableType] = [device_headline(search)]
    if planned:
        parts += [Text(), _devices(search, planned), Text(), Text(_legend(search, planned), style="dim")]
    for point in search.points:
        if point.status == "impossible":
            parts.append(Text(f"{point.device} cannot be: {point.reason}", style="dim"))
    parts += [Text(f"note: {note}", style="dim") for note in search.notes]
    return Group(*parts)


def device_headline(search: DeviceSearch) -> Text:
    """Say which device is fastest, cheapest and smallest."""
    each = f"{search.ranks} of each" if search.ranks > 1 else "one of each"
    text = Text(f"devices, {each}: ")
    if not search.complete:
        text.append("interrupted, up to here ", style="bold yellow")
    fastest, cheapest, smallest = search.fastest, search.cheapest, search.smallest
    if fastest is None or smallest is None:
        needs = [point.minimum_budget_bytes for point in search.points if point.minimum_budget_bytes is not None]
        text.append("nothing fits", style="bold red")
        text.append(f"\nthe smallest budget that works is {display_bytes(min(needs))} a rank" if needs else "")
        return text
    shared = list(dict.fromkeys(point.device for point in (fastest, cheapest, smallest) if point is not None))
    text.append(f"{shared[0]} is best in all" if len(shared) == 1 and cheapest else " or ".join(shared), "bold green")
    text.append(f"\nfastest: {fastest.device}, {display_ms(fastest.step_ms or 0.0)} a step predicted")
    if cheapest is not None:
        text.append(f"\ncheapest: {cheapest.device}, {_cost(search, cheapest)}")
    text.append(f"\nthe smallest that fits: {smallest.device}, {display_bytes(smallest.memory_bytes)}")
    return text


def _cost(search: DeviceSearch, point: DevicePoint) -> str:
    if point.usd_per_million is not None:
        return f"{display_usd(point.usd_per_million)} for a million {search.counts}"
    return f"{display_usd(point.usd_per_step or 0.0)} a step"


def _devices(search: DeviceSearch, planned: list[DevicePoint]) -> Table:
    rate, cost = f"{search.counts}/s", f"$/M {search.counts}"
    table = number_table("device", "memory", "step", rate, "peak", "$/h", cost, "of", left=1)
    answers = (search.fastest, search.cheapest, search.smallest)
    for point in planned:
        style = "bold green" if any(point is each for each in answers) else None if point.fits else "dim"
        table.add_row(*_cells(point), style=style)
    return table


def _cells(point: DevicePoint) -> list[str]:
    price = "" if point.price is None else f"{point.price.usd_per_hour * point.ranks:.2f}"
    provider = "" if point.price is None else point.price.provider
    memory = display_bytes(point.memory_bytes)
    if point.step_ms is None or point.peak_bytes is None:
        least = point.minimum_budget_bytes
        needs = "" if least is None else f"({display_bytes(least)})"
        return [point.device, memory, "no plan", "", needs, price, "", provider]
    rate = "" if point.throughput_per_s is None else display_rate(point.throughput_per_s)
    cost = "" if point.usd_per_million is None else display_usd(point.usd_per_million).removeprefix("$")
    peak = f"{display_bytes(point.peak_bytes)}{' !' if point.with_care else ''}"
    step = f"{display_ms(point.step_ms)}{'*' if point.recompute_ms else ''}"
    return [point.device, memory, step, rate, peak, price, cost, provider]


def _legend(search: DeviceSearch, planned: list[DevicePoint]) -> str:
    all_ranks = " of all ranks together" if search.ranks > 1 else ""
    lines = f"{search.counts}/s, $/h: predicted rate and price{all_ranks}"
    if any(point.recompute_ms for point in planned):
        lines += "; *: recomputing"
    if any(not point.fits for point in planned):
        lines += "; (in brackets): the smallest budget that would do"
    dates = sorted(point.price.date for point in planned if point.price is not None and point.price.date)
    if dates:
        when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        lines += f"; $: on demand, the cheapest list price that is known, of {when}; yours: --price DEVICE=DOLLARS"
    if any(point.with_care for point in planned):
        lines += f"\n!: the caching allocator would reserve more than there is; run with {EXPANDABLE}"
    return lines


def display_usd(amount: float) -> str:
    """Display dollars with three digits, or all before the point."""
    return f"${display_rate(amount)}"
