"""The curves of one model as an SVG: step time against memory, and recomputed FLOPs against memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from memfit.units import MiB

from .models import Case
from .runs import Run

COLORS = {
    "memfit": "#1663b0",
    "memfit by FLOPs": "#6cb4ee",
    "plain": "#555555",
    "every block": "#c2561a",
    "second block": "#b8960c",
    "sac_milp": "#3d8b40",
    "compile": "#8b3d88",
}
LABELS = {
    "memfit by FLOPs": "memfit, planned for FLOPs",
    "second block": "every second block",
    "compile": "torch.compile at a memory budget",
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 420, 300, 64, 56, 76, 84


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    method: str
    x: float
    y: float


def draw(case: Case, runs: Sequence[Run], path: Path) -> None:
    """Two panels side by side; memfit's points are joined. The file is the same for the same measurements."""
    timed = [_Point(method=r.method, x=r.peak_bytes / MiB, y=r.ms) for r in runs if r.times_ms]
    again = [
        _Point(method=r.method, x=r.peak_bytes / MiB, y=r.recomputed_flops / 1e9)
        for r in runs
        if r.recomputed_flops is not None
    ]
    whole = LEFT + 2 * WIDTH + GAP + 24
    body = [
        f'<text x="{LEFT}" y="22" class="title">{escape(case.name)}: {escape(case.size)}</text>',
        *_panel(LEFT, "step time, ms", timed),
        *_panel(LEFT + WIDTH + GAP, "recomputed GFLOP", again),
        *_legend([method for method in COLORS if any(run.method == method for run in runs)]),
    ]
    style = (
        "text{font:12px sans-serif;fill:#222}.title{font-size:14px;font-weight:bold}"
        ".grid{stroke:#ddd}.axis{stroke:#888}"
    )
    height = TOP + HEIGHT + BOTTOM
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {height}" width="{whole}" height="{height}">\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panel(left: float, title: str, points: Sequence[_Point]) -> list[str]:
    if not points:
        return []
    x, x_ticks = _scale([p.x for p in points], left, left + WIDTH)
    y, y_ticks = _scale([p.y for p in points], TOP + HEIGHT, TOP)
    found = [f'<text x="{left}" y="{TOP - 10}">{title}</text>']
    for tick in y_ticks:
        found.append(f'<line class="grid" x1="{left}" x2="{left + WIDTH}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        found.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        found.append(f'<line class="grid" y1="{TOP}" y2="{TOP + HEIGHT}" x1="{x(tick):.1f}" x2="{x(tick):.1f}"/>')
        found.append(f'<text x="{x(tick):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{tick:g}</text>')
    found.append(f'<path class="axis" fill="none" d="M{left} {TOP}V{TOP + HEIGHT}H{left + WIDTH}"/>')
    found.append(f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 34}" text-anchor="end">measured peak, MiB</text>')
    ours = sorted((p for p in points if p.method == "memfit"), key=lambda p: p.x)
    line = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in ours)
    found.append(f'<polyline points="{line}" fill="none" stroke="{COLORS["memfit"]}" stroke-width="2"/>')
    for p in points:
        label = f"{p.method}: {p.x:.1f} MiB, {p.y:.4g}"
        place = f'cx="{x(p.x):.1f}" cy="{y(p.y):.1f}" r="5" fill="{COLORS[p.method]}"'
        found.append(f"<circle {place}><title>{label}</title></circle>")
    return found


def _legend(methods: Sequence[str]) -> list[str]:
    found, place, row = [], float(LEFT), TOP + HEIGHT + 58
    for method in methods:
        label = LABELS.get(method, method)
        found.append(f'<circle cx="{place}" cy="{row - 4}" r="5" fill="{COLORS[method]}"/>')
        found.append(f'<text x="{place + 10}" y="{row}">{label}</text>')
        place += 30 + 6.5 * len(label)
    return found


def _scale(values: Sequence[float], begin: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """A linear scale over all values and a little more, and round figures on it."""
    low, high = min(values), max(values)
    margin = (high - low or high or 1.0) * 0.08
    low, high = max(0.0, low - margin), high + margin
    step = 10.0 ** len(str(int(high - low)))
    while (high - low) / step < 4:
        step /= 2 if str(step).lstrip("0.").startswith(("1", "2")) else 2.5
    first = int(low / step) + (low > 0)
    ticks = [step * number for number in range(first, int(high / step) + 1)]
    return lambda value: begin + (value - low) / (high - low) * (end - begin), ticks
