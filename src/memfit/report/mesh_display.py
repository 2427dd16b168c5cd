"""What each dimension of a mesh does to a step, as rows that the terminal, Markdown and the page show."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table

from memfit.analysis import MeshDimension, Report, find_dimensions
from memfit.text import number_table
from memfit.units import display_bytes, display_ms

_COLUMNS = ("dim", "ranks", "nodes", "calls", "bytes", "time", "exposed", "at peak")
_WITHOUT = ("without it", "step then")
"""Peak and time of the step without a dimension, where it was captured."""


def dimensions_of(report: Report) -> tuple[MeshDimension, ...]:
    """Return the dimensions of a report's mesh, at the peak of the step with its plan if there is one."""
    return find_dimensions(report, report.planned or report.baseline)


def dimension_cells(dimensions: Sequence[MeshDimension]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns, and a row for each dimension."""
    compared = any(each.without_peak_bytes is not None for each in dimensions)
    rows = []
    for each in dimensions:
        cells = [
            each.name,
            str(each.size),
            str(each.nodes),
            str(each.collectives),
            display_bytes(each.sent_bytes),
            display_ms(each.communication_ms),
            display_ms(each.exposed_ms),
            display_bytes(each.at_peak_bytes),
        ]
        if compared:
            peak, step_ms = each.without_peak_bytes, each.without_step_ms
            cells += ["" if peak is None else display_bytes(peak), "" if step_ms is None else display_ms(step_ms)]
        rows.append(cells)
    return [*_COLUMNS, *(_WITHOUT if compared else ())], rows


def dimension_table(dimensions: Sequence[MeshDimension]) -> Table | None:
    """Return the table for a terminal; None where the step is not on a mesh of its own."""
    if not dimensions:
        return None
    names, rows = dimension_cells(dimensions)
    title = "what each dimension of the mesh does: its collectives, and what they made that is at the peak"
    table = number_table(*names, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def dimension_values(report: Report) -> list[dict[str, Any]]:
    """Return the dimensions as plain values, for JSON and for the page."""
    return [{"name": each.name, **msgspec.to_builtins(_fields(each))} for each in dimensions_of(report)]


def _fields(each: MeshDimension) -> dict[str, Any]:
    found = dataclasses.asdict(each)
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}
