"""A report for a pull request: the headline, without and with the plan, decisions, what was measured and assumed.

Note [Safe to paste]: names of modules and ops, source lines and notes come from whoever wrote the model. In prose every
character is escaped that Markdown or HTML gives a meaning to; names stand in code spans, whose fences are longer than
any run of backticks in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from memfit.analysis import Lever, Report, describe_shortfall, reserves_more
from memfit.capture import Category
from memfit.plans import Blocker, Estimate, Plan, describe_peak, display_mesh
from memfit.report.assumed import list_assumptions
from memfit.report.curve_display import describe_curve
from memfit.report.decided import DECIDED_COLUMNS, decision_cells, decisions_of, describe_price
from memfit.report.decisions import list_decisions
from memfit.report.headline import headline, without_plan_of
from memfit.report.mesh_display import dimension_cells, dimensions_of
from memfit.text import counted
from memfit.units import display_bytes, display_ms

if TYPE_CHECKING:
    from memfit.verify import BytesCheck, MsCheck, Verification

_ROWS = 12
_MEANING = re.compile(r"([\\`*_\[\]|~#@!])")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def to_markdown(report: Report, levers: Sequence[Lever] = ()) -> str:
    """Return the report as GitHub shows it; the same report is the same text."""
    words = headline(report)
    parts = [
        f"### memfit: {_prose(words.verdict.lower())}, {_prose(words.figures)}",
        f"{_prose(words.subject)}. {' '.join(map(_prose, words.sentences))}",
        _before_and_after(report),
        *_highest(report),
        *_mesh(report),
    ]
    if report.curve is not None:
        parts.append(f"**Trade-off:** {_prose(describe_curve(report.curve))}.")
    if report.verification is not None:
        parts += _verified(report.verification)
    parts += [*_decided(report), *_decisions(report), *_levers(report, levers), *_assumed(report)]
    return "\n\n".join(parts) + "\n"


def _before_and_after(report: Report) -> str:
    """Write peak, reserved, time and categories, each without the plan and with it."""
    plan = report.plan
    without = without_plan_of(report)
    if plan is None:
        timeline = report.baseline
        step_ms = report.runtime.total_ms + report.problem.exposed_ms
        rows = [["**peak**", display_bytes(timeline.peak_bytes)], ["**step**", display_ms(step_ms)]]
        rows += [[category.value, display_bytes(n)] for category, n in timeline.peak_by_category.items()]
        return _table(["", "as it is"], rows)
    columns: list[Estimate | Blocker] = [plan.baseline]
    names = ["", without]
    if plan.predicted is not None:
        columns.append(plan.predicted)
        names += ["with the plan", "change"]
    elif plan.blocker is not None:
        columns.append(plan.blocker)
        names += ["the lowest there is", "change"]
    return _table(names, _rows(plan, columns))


def _rows(plan: Plan, columns: Sequence[Estimate | Blocker]) -> Iterator[list[str]]:
    estimates = [each for each in columns if isinstance(each, Estimate)]
    yield ["**peak**", *_bytes_cells([each.peak_bytes for each in columns])]
    if len(estimates) == len(columns):
        if reserves_more(plan):
            cells = _bytes_cells([each.peak_reserved_bytes for each in estimates])
            if any(each.peak_reserved_low_bytes is not None for each in estimates):  # ranges, so no one difference
                cells = [each.reserved for each in estimates] + [""] * (len(cells) - len(estimates))
            yield ["reserved by the allocator", *cells]
        times = [each.step_ms for each in estimates]
        yield ["**step**", *map(display_ms, times), *([_part(times[1], times[0])] if len(times) == 2 else [])]
    if plan.predicted is not None:
        yield ["recomputing", "", display_ms(plan.predicted.recompute_ms), ""]
        if plan.ranks > 1:
            yield ["waiting for communication", "", display_ms(plan.predicted.exposed_communication_ms), ""]
        if plan.offload_link:
            yield ["waiting for offload", "", display_ms(plan.predicted.exposed_offload_ms or 0.0), ""]
    by_category = [each.peak_by_category for each in columns]
    for category in sorted(Category, key=lambda category: -max(each.get(category, 0) for each in by_category)):
        if any(category in each for each in by_category):
            yield [f"{category.value} at the peak", *_bytes_cells([each.get(category, 0) for each in by_category])]


def _bytes_cells(values: Sequence[int]) -> list[str]:
    cells = [display_bytes(value) for value in values]
    return [*cells, _part(values[1], values[0])] if len(values) == 2 else cells


def _part(now: float, then: float) -> str:
    """Return the change as a part of what was; empty where there is none or there was nothing."""
    if now == then or not then:
        return ""
    part = (now - then) / then
    return f"{part:+.1%}" if abs(part) >= 5e-4 else "under 0.1%"


def _highest(report: Report) -> Iterator[str]:
    plan = report.plan
    if plan is None:
        return
    without = without_plan_of(report) if plan.ranks == 1 else f"when {without_plan_of(report)}"
    lines = [f"Highest {without}: {_prose(describe_peak(plan.baseline.peak_at))}."]
    if plan.predicted is not None:
        lines.append(f"Highest with the plan: {_prose(describe_peak(plan.predicted.peak_at))}.")
    yield " ".join(lines)


def _mesh(report: Report) -> Iterator[str]:
    """Yield what the dimensions of the mesh do, for a step that is on one of its own."""
    dimensions = dimensions_of(report)
    if dimensions:
        names, rows = dimension_cells(dimensions)
        mesh = _prose(display_mesh(report.trace.mesh))
        yield f"**The mesh, {mesh}:** collectives of one step, and what they made that is at the peak.\n\n" + _table(
            names, [[_code(row[0]), *row[1:]] for row in rows]
        )


def _decided(report: Report) -> Iterator[str]:
    """Yield the kinds of decisions that were taken together, with the price of each."""
    if report.plan is None or not decisions_of(report.plan):
        return
    price = describe_price(report.plan)
    rows = [[_prose(cell) for cell in decision_cells(each)] for each in decisions_of(report.plan)]
    said = f"**Decided together**{f'; {price}' if price else ''}:"
    yield f"{said}\n\n{_table(DECIDED_COLUMNS, rows, left=(0, 1))}"


def _decisions(report: Report) -> Iterator[str]:
    """Yield the table of decisions: units that are alike are one row, those with most bytes first."""
    plan = report.plan
    if plan is None or not plan.checkpoint:
        return
    found = [row for row in list_decisions(report) if row["decision"] != "kept"]
    found.sort(key=lambda row: -row["all_bytes"])
    rows = [
        [
            _code(row["unit"]),
            str(row["units"]),
            display_bytes(row["drops_bytes"]),
            *([display_bytes(row["away_bytes"])] if plan.offload_link else []),
            _code(row["keeps"]) if row["keeps"] else "nothing",
            display_ms(row["each_ms"]),
        ]
        for row in found[:_ROWS]
    ]
    away = ["offloads"] if plan.offload_link else []
    names = ["unit", "units", "each drops", *away, "keeps", "recompute"]
    table = _table(names, rows, left=(0, names.index("keeps")))
    if len(found) > _ROWS:
        table += f"\n\nand {len(found) - _ROWS} more"
    what = "checkpointed or offloaded" if plan.offload_link else "checkpointed"
    yield _folded(f"Decisions: {counted(len(plan.checkpoint), 'unit')} {what}", table)


def _levers(report: Report, levers: Sequence[Lever]) -> Iterator[str]:
    """Yield levers with what each does to the peak; where nothing fits, with whether it is enough."""
    if not levers:
        return
    hopeless = report.plan is not None and report.plan.predicted is None
    budget_bytes = report.target.usable_bytes if report.plan is None else report.plan.budget_bytes
    rows = [
        [
            _prose(lever.name if lever.same_numbers else f"{lever.name} (computes other numbers)"),
            display_bytes(lever.saves_bytes),
            display_bytes(lever.peak_bytes),
            "not known" if lever.costs_ms is None else f"{lever.costs_ms:+.1f} ms",
            *([describe_shortfall(lever, budget_bytes)] if hopeless else []),
            _prose(lever.how),
        ]
        for lever in levers
    ]
    names = ["lever", "saves", "peak then", "step", *(["for the budget"] if hopeless else []), "how"]
    table = _table(names, rows, left=(0, len(names) - 1))
    if hopeless:
        yield f"**What would help**, on top of the plan that needs least:\n\n{table}"
    else:
        yield _folded("What would lower the peak further", table)


def _verified(found: Verification) -> list[str]:
    if found.ok:
        verdict = "the plan holds"
    else:
        verdict = "the plan holds, but for its time" if found.only_time_differs else "the plan does not hold"
    rows = [
        *_bytes_row("peak without the plan", found.baseline_peak),
        *_bytes_row("peak with the plan", found.peak),
        *_ms_row("step without the plan", found.baseline_step),
        *_ms_row("step with the plan", found.step),
    ]
    parts = [f"**Verified on {_prose(found.device)}:** {verdict}.", _table(["", "predicted", "measured", "by"], rows)]
    if found.findings:
        parts.append("\n".join(f"- {_prose(finding)}" for finding in found.findings))
    exactness = found.exactness
    if exactness is not None and exactness.equal:
        parts.append(
            f"Losses, {exactness.gradients} gradients, parameters and buffers of {exactness.steps} steps are the same "
            "bit for bit with and without the plan."
        )
    return parts


def _bytes_row(name: str, each: BytesCheck | None) -> Iterator[list[str]]:
    if each is not None:
        off = f"{each.error:+.2%}" if each.difference_bytes else "none"
        yield [name, display_bytes(each.predicted_bytes), display_bytes(each.measured_bytes), off]


def _ms_row(name: str, each: MsCheck | None) -> Iterator[list[str]]:
    if each is not None:
        yield [name, display_ms(each.predicted_ms), display_ms(each.measured_ms), f"{each.error:+.1%}"]


def _assumed(report: Report) -> Iterator[str]:
    items = [f"- {_prose(name)}: {_prose(value)}" for name, value in list_assumptions(report)["facts"]]
    notes = report.plan.notes if report.plan is not None else report.trace.notes
    items += [f"- note: {_prose(note)}" for note in notes]
    yield _folded("What was assumed", "\n".join(items))


def _folded(title: str, inside: str) -> str:
    """Return a part that opens when asked; Markdown inside it needs empty lines around."""
    return f"<details><summary>{_prose(title)}</summary>\n\n{inside}\n\n</details>"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    lines = [_line(names), _line("---" if place in left else "---:" for place in range(len(names)))]
    return "\n".join([*lines, *map(_line, rows)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _prose(text: str) -> str:
    """Escape text so that it is nothing but text (Note [Safe to paste])."""
    flat = " ".join(text.split())
    return "".join(_HTML.get(each, each) for each in _MEANING.sub(r"\\\1", flat))


def _code(text: str) -> str:
    """Write a name in a table cell; a pipe would end the cell also in a code span."""
    flat = " ".join(text.split()).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", flat)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{flat}{space}{fence}"
