"""Rich tables of a memory summary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from memfit.capture import short
from memfit.memory import Fit, MemorySummary, ModuleMemory, OpLocation
from memfit.paths import alike, module_label
from memfit.text import caption_more, number_table
from memfit.units import display_bytes

_STYLE = {Fit.FITS: "green", Fit.TIGHT: "yellow", Fit.TOO_LARGE: "red"}
_WIDE = 130
"""Columns from which every column of the table of modules has room."""


def print_memory(summary: MemorySummary, console: Console | None = None) -> Group:
    """Print the summary on the console, the standard one by default, and give what was printed."""
    console = console or Console()
    report = memory_report(summary, wide=console.width >= _WIDE)
    console.print(report)
    return report


def memory_report(summary: MemorySummary, *, modules: int = 12, wide: bool = True) -> Group:
    """Show the verdict, the peak by category, the largest storages and the modules that hold most for backward."""
    parts: list[RenderableType] = [
        _verdict(summary),
        _by_category(summary),
        _largest(summary),
        _by_module(summary, modules, wide),
    ]
    parts.extend(Text(f"note: {note}", style="dim") for note in summary.notes)
    return Group(*parts)


def _verdict(summary: MemorySummary) -> Panel:
    lines = Text()
    lines.append(f"{summary.fit.value}", style=f"bold {_STYLE[summary.fit]}")
    needed, total = display_bytes(summary.needed_bytes), display_bytes(summary.device_bytes)
    lines.append(f": needs {needed} of {total}")
    if summary.free_bytes >= 0:
        lines.append(f", {display_bytes(summary.free_bytes)} to spare\n")
    else:
        lines.append(f", {display_bytes(-summary.free_bytes)} too much\n")
    peak = summary.peak
    lines.append("peak in ").append(peak.phase, style="bold").append(f" at op {peak.op} ")
    lines.append(short(peak.name), style="cyan").append(_module(peak))
    if peak.source:
        lines.append(f"\n  {peak.source}", style="dim")
    if summary.fit is Fit.TIGHT:
        times = "once" if summary.retries == 1 else f"{summary.retries} times"
        lines.append(f"\nthe allocator empties its cache {times} a step; each time stalls the device")
    if summary.failing is not None:
        failing = summary.failing
        lines.append(f"\nruns out of memory in step {summary.failing_step}, in {failing.phase} at op {failing.op} ")
        lines.append(short(failing.name), style="cyan").append(_module(failing))
    return Panel(lines, title=f"memory of one step on {summary.device_title}", title_align="left")


def _module(place: OpLocation) -> str:
    if place.module is None:
        return ", outside any module"
    return f" of {module_label(place.module)}"


def _by_category(summary: MemorySummary) -> Table:
    table = number_table("category", "bytes", "share", title="at the peak")
    for category, n_bytes in summary.peak_by_category.items():
        table.add_row(category.value, display_bytes(n_bytes), _share(n_bytes, summary.peak_bytes))
    table.add_section()
    table.add_row("tensors", display_bytes(summary.peak_bytes), "", style="bold")
    table.add_row("  of which resident at start", display_bytes(summary.start_bytes), "")
    if summary.peak_reserved_bytes != summary.peak_bytes:
        table.add_row("allocated, as torch counts it", display_bytes(summary.peak_allocated_bytes), "")
        table.add_row("reserved by the allocator", display_bytes(summary.peak_reserved_bytes), "", style="bold")
    for overhead in summary.overheads:
        table.add_row(overhead.name, display_bytes(overhead.bytes), "")
    if summary.overheads:
        table.add_row("all of it", display_bytes(summary.needed_bytes), "", style="bold")
    return table


def _largest(summary: MemorySummary) -> Table:
    words = ("category", "what", "where")
    table = number_table("bytes", *words, title="\nlargest storages at the peak", left=0, words=words)
    for storage in summary.largest:
        where = storage.source.partition(" ")[0] or storage.module
        table.add_row(display_bytes(storage.bytes), storage.category.value, short(storage.name), where)
    return table


def _by_module(summary: MemorySummary, count: int, wide: bool) -> Table:
    wide_only = ("kind", "gradients", "optimizer")
    names = ("module", "kind", "calls", "parameters", *wide_only[1:], "activations", "device at fwd", "at bwd peak")
    shown = [name for name in names if wide or name not in wide_only]
    table = number_table(*shown, title="\nmodules that hold most for backward", words=("kind",))
    rows = sorted(_alike(summary.modules), key=lambda row: -row.activation_bytes)
    for row in rows[:count]:
        owned = [row.parameter_bytes, row.gradient_bytes, row.optimizer_state_bytes]
        held = [row.activation_bytes, row.forward_peak_bytes, row.backward_peak_bytes]
        table.add_row(
            row.name,
            *((row.kind,) if wide else ()),
            str(row.calls),
            *(display_bytes(n_bytes) for n_bytes in (owned if wide else owned[:1])),
            *(display_bytes(n_bytes) for n_bytes in held),
        )
    caption_more(table, len(rows), count)
    return table


@dataclass(slots=True)
class _Row:
    """Modules whose paths differ in numbers only, added up."""

    name: str
    kind: str
    modules: int = 0
    calls: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_state_bytes: int = 0
    activation_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0


def _alike(modules: Iterable[ModuleMemory]) -> list[_Row]:
    """Merge `layers.0.norm` … `layers.31.norm` into one row `layers.*.norm`; modules never called have none."""
    rows: dict[tuple[str, str], _Row] = {}
    members: dict[tuple[str, str], str] = {}
    for module in modules:
        if not module.calls:
            continue
        key = (alike(module.module), module.kind)
        row = rows.setdefault(key, _Row(module_label(key[0]), module.kind))
        members[key] = module_label(module.module)
        row.modules += 1
        row.calls += len(module.calls)
        row.parameter_bytes += module.parameter_bytes
        row.gradient_bytes += module.gradient_bytes
        row.optimizer_state_bytes += module.optimizer_state_bytes
        row.activation_bytes += module.activation_bytes
        row.forward_peak_bytes = max(row.forward_peak_bytes, module.forward_peak_bytes)
        row.backward_peak_bytes = max(row.backward_peak_bytes, module.backward_peak_bytes)
    for key, row in rows.items():
        if row.modules == 1:
            row.name = members[key]
    return list(rows.values())


def _share(n_bytes: int, total_bytes: int) -> str:
    return f"{100 * n_bytes / total_bytes:.1f}%" if total_bytes else ""
