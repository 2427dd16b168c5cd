"""The page about a search: its answer, the frontier as pictures, and every value; one file without a script.

What comes from a step or a device's file is escaped, as on the page about a plan (Note [Safe to open]).
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.files import write_whole
from memfit.plans import DeviceSearch, Search, SearchPoint
from memfit.report.device_search_display import device_headline, display_usd
from memfit.report.frontier_plot import across
from memfit.report.page.writing import load_asset, page_policy
from memfit.report.search_display import display_rate, search_headline
from memfit.units import display_budget, display_bytes, display_ms

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 260, 84, 32, 20
_STYLE = """
.frontier { width: 100%; height: auto; max-width: 60rem; }
.frontier text { fill: var(--soft); font-size: 12px; }
.frontier .axis, .frontier .rule { stroke: var(--line); fill: none; }
.frontier .limit { stroke: var(--limit); stroke-dasharray: 6 4; fill: none; }
.frontier polyline { fill: none; stroke-width: 2; }
.frontier .series-0 { stroke: var(--accent); fill: var(--accent); }
.frontier .series-1 { stroke: var(--care); fill: var(--care); }
.frontier .series-2 { stroke: var(--good); fill: var(--good); }
.frontier polyline.series-0, .frontier polyline.series-1, .frontier polyline.series-2 { fill: none; }
.frontier .best { stroke: var(--ink); stroke-width: 3; }
.frontier-key span { margin-right: 1.5rem; }
.key-0 { color: var(--accent); } .key-1 { color: var(--care); } .key-2 { color: var(--good); }
.values { border-collapse: collapse; width: 100%; }
.values th, .values td { text-align: right; padding: 0.25rem 0.75rem; border-bottom: 1px solid var(--line); }
.values th:first-child, .values td:first-child { text-align: left; }
.values tr.best { font-weight: 650; color: var(--good); } .values tr.out { color: var(--soft); }
.scroll { overflow-x: auto; }
"""


@dataclass(frozen=True, kw_only=True)
class _Series:
    """A line of a picture: its name and its points, each with the words that a pointer shows."""

    name: str
    points: Sequence[tuple[float, float, str]]
    joined: bool = True


def write_search_page(search: Search | DeviceSearch, path: str | os.PathLike[str]) -> Path:
    """Write the page about a search to one file that opens from disk."""
    return write_whole(path, search_page_text(search).encode(), "search.html")


def search_page_text(search: Search | DeviceSearch) -> str:
    """Return the page; the same search gives the same text."""
    if isinstance(search, DeviceSearch):
        title, words, sections = "devices", device_headline(search).plain, _of_devices(search)
    else:
        title, words, sections = search.over, search_headline(search).plain, _of_values(search)
    first, *others = words.splitlines()
    style = load_asset("page.css") + _STYLE
    said = "".join(f"<p>{html.escape(line)}</p>" for line in others)
    notes = "".join(f'<p class="soft">note: {html.escape(note)}</p>' for note in search.notes)
    body = "".join(f"<section><h2>{html.escape(name)}</h2>{markup}</section>" for name, markup in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{page_policy(style)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>memfit: search over {html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<header class="top"><span class="brand">memfit</span></header>\n<main id="main">\n'
        f'<section class="answer"><h1>{html.escape(first)}</h1><div class="why">{said}{notes}</div></section>\n'
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _of_values(search: Search) -> list[tuple[str, str]]:
    best = None if search.best is None else float(search.best.value)
    rates = [
        (float(point.value), search.rate(point), f"{search.over} {point.value}: {display_ms(point.step_ms or 0.0)}")
        for point in search.points
        if point.throughput_per_s is not None
    ]
    unit = f"{search.counts}/s{' a rank' if search.over == 'ranks' else ''}"
    sections = []
    if rates:
        series = [_Series(name=unit, points=rates)]
        sections.append((f"Throughput over {search.over}", _picture(series, display_rate, best=best)))
    memory = [
        _Series(name=name, points=[(x, y, f"{search.over} {x:g}: {display_bytes(int(y))}") for x, y in found])
        for name, found in (
            ("peak of the plan", [(p.value, p.peak_bytes) for p in search.points if p.peak_bytes is not None]),
            ("without a plan", [(p.value, p.baseline_peak_bytes) for p in search.points]),
            (
                "least budget",
                [(p.value, p.minimum_budget_bytes) for p in search.points if p.minimum_budget_bytes is not None],
            ),
        )
    ]
    limit = max((point.allowed_bytes for point in search.points), default=search.budget_bytes)
    drawn = _picture(memory, lambda y: display_bytes(int(y)), best=best, limit=float(limit))
    sections.append((f"Memory of a rank over {search.over}, the budget dashed", drawn))
    names = [search.over, "step", "recomputing", unit, "peak", "reserved", "without a plan", "least budget"]
    rows = [
        [
            str(p.value),
            *_times(search, p),
            _bytes(p.peak_bytes),
            _bytes(p.peak_reserved_bytes) + (" !" if p.with_care else ""),
            _bytes(p.baseline_peak_bytes),
            "" if p.minimum_budget_bytes is None else display_budget(p.minimum_budget_bytes),
        ]
        for p in search.points
    ]
    kinds = ["best" if p is search.best else "" if p.fits else "out" for p in search.points]
    return [*sections, ("Every value that was tried", _table(names, rows, kinds))]


def _times(search: Search, point: SearchPoint) -> list[str]:
    """Return the step, what recomputing takes of it, and the throughput; bounds where a value got no plan."""
    if point.least_step_ms is not None and point.most_per_s is not None:
        return [f"≥ {display_ms(point.least_step_ms)}", "", f"≤ {display_rate(point.most_per_s)}"]
    return [
        "no plan" if point.step_ms is None else display_ms(point.step_ms),
        display_ms(point.recompute_ms) if point.recompute_ms else "",
        "" if point.throughput_per_s is None else display_rate(search.rate(point)),
    ]


def _of_devices(search: DeviceSearch) -> list[tuple[str, str]]:
    priced = [
        (float(p.usd_per_million), float(p.throughput_per_s), f"{p.device}: {display_usd(p.usd_per_million)}")
        for p in search.points
        if p.usd_per_million is not None and p.throughput_per_s is not None
    ]
    sections = []
    if priced:
        series = [_Series(name=f"{search.counts}/s over dollars for a million", points=priced, joined=False)]
        drawn = _picture(series, display_rate, words=True, show_x=display_usd)
        sections.append((f"{search.counts.capitalize()} a second over what a million of them cost", drawn))
    names = ["device", "memory", "step", f"{search.counts}/s", "peak", "$/h", f"$/M {search.counts}", "of", "on"]
    rows = [
        [
            p.device,
            display_bytes(p.memory_bytes),
            "no plan" if p.step_ms is None else display_ms(p.step_ms),
            "" if p.throughput_per_s is None else display_rate(p.throughput_per_s),
            _bytes(p.peak_bytes) + (" !" if p.with_care else ""),
            "" if p.price is None else f"{p.price.usd_per_hour * p.ranks:.2f}",
            "" if p.usd_per_million is None else display_usd(p.usd_per_million),
            "" if p.price is None else p.price.provider,
            "" if p.price is None else p.price.date,
        ]
        for p in search.points
    ]
    answers = (search.fastest, search.cheapest, search.smallest)
    kinds = ["best" if any(p is each for each in answers) else "" if p.fits else "out" for p in search.points]
    return [*sections, ("Every device", _table(names, rows, kinds))]


def _bytes(amount: int | None) -> str:
    return "" if amount is None else display_bytes(amount)


def _picture(
    series: Sequence[_Series],
    show_y: Callable[[float], str],
    *,
    best: float | None = None,
    limit: float | None = None,
    words: bool = False,
    show_x: Callable[[float], str] = "{:g}".format,
) -> str:
    """Draw lines over one axis as SVG; `words` are written beside the points."""
    xs = sorted({x for each in series for x, _, _ in each.points})
    highest = max([y for each in series for _, y, _ in each.points] + ([limit] if limit else [])) or 1.0
    width, height = _WIDTH - _LEFT - 24, _HEIGHT - _BOTTOM - _TOP
    inset = 48 if words else 0
    place = {x: _LEFT + inset + at for x, at in across(xs, width - 2 * inset).items()}

    def up(y: float) -> float:
        return _TOP + height * (1 - y / highest)

    parts = [f'<svg class="frontier" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for share in (0.0, 0.5, 1.0):
        y = up(highest * share)
        parts.append(f'<path class="rule" d="M{_LEFT} {y:.1f}H{_LEFT + width}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_text(show_y(highest * share))}</text>')
    for x in dict.fromkeys((xs[0], xs[-1])):
        parts.append(f'<text x="{place[x]:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{_text(show_x(x))}</text>')
    if limit:
        parts.append(f'<path class="limit" d="M{_LEFT} {up(limit):.1f}H{_LEFT + width}"/>')
    for number, each in enumerate(series):
        if each.joined:
            line = " ".join(f"{place[x]:.1f},{up(y):.1f}" for x, y, _ in each.points)
            parts.append(f'<polyline class="series-{number}" points="{line}"/>')
        for x, y, said in each.points:
            kind = f"series-{number}{' best' if x == best and number == 0 else ''}"
            title = f"<title>{_text(said)}</title>"
            parts.append(f'<circle class="{kind}" cx="{place[x]:.1f}" cy="{up(y):.1f}" r="4">{title}</circle>')
            if words:
                name = _text(said.split(":")[0])
                parts.append(f'<text x="{place[x]:.1f}" y="{up(y) - 8:.1f}" text-anchor="middle">{name}</text>')
    keys = "".join(f'<span class="key-{n}">● {_text(each.name)}</span>' for n, each in enumerate(series))
    return f'{"".join(parts)}</svg><p class="frontier-key">{keys}</p>'


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    body = "".join(
        f'<tr class="{kind}">{"".join(f"<td>{_text(cell)}</td>" for cell in row)}</tr>'
        for kind, row in zip(kinds, rows, strict=True)
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="values">{table}</table></div>'


def _text(words: str) -> str:
    return html.escape(words)
