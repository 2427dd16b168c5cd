"""Rich tables of a step's run time, and of what its units could give up."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.cost import Float32Precision, Runtime, peak_ms, real_flops
from memfit.paths import alike, module_label
from memfit.text import number_table
from memfit.tradeoff import Frontiers
from memfit.units import display_bytes, display_ms


def print_time(runtime: Runtime, frontiers: Frontiers | None = None, console: Console | None = None) -> Group:
    """Print the run time on the console, the standard one by default, and give what was printed."""
    report = time_report(runtime, frontiers)
    (console or Console()).print(report)
    return report


def time_report(runtime: Runtime, frontiers: Frontiers | None = None, *, modules: int = 10) -> Group:
    """Show the step and its phases, the modules that take longest and, given frontiers, what units could give up."""
    parts: list[RenderableType] = [_headline(runtime), _by_module(runtime, modules)]
    if frontiers is not None:
        parts.append(_by_unit(frontiers, modules))
    return Group(*parts)


def _headline(runtime: Runtime) -> Text:
    trace = runtime.trace
    phases = ", ".join(f"{phase.value} {display_ms(ms)}" for phase, ms in runtime.by_phase_ms.items() if ms)
    text = (
        Text("\npredicted time of one step: ").append(display_ms(runtime.total_ms), style="bold").append(f" ({phases})")
    )
    flops = sum(real_flops(op) for op in trace.ops)
    if flops and runtime.total_ms:
        precision = Float32Precision.of_torch() if trace.device_type == "cuda" else Float32Precision()
        busy_ms = sum(peak_ms(op, trace.hardware, precision) for op in trace.ops)
        rate, part = flops / runtime.total_ms / 1e9, busy_ms / runtime.total_ms
        text.append(f"\n{rate:,.1f} TFLOP/s, {part:.0%} of what the device could do in its number formats")
    return text


@dataclass(slots=True)
class _Row:
    """Modules whose paths differ in numbers only, added up."""

    count: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0


def _by_module(runtime: Runtime, count: int) -> Table:
    rows: dict[str, _Row] = defaultdict(_Row)
    for path, module in runtime.modules.items():
        row = rows[module_label(alike(path))]
        row.count += 1
        row.forward_ms += module.forward_ms
        row.backward_ms += module.backward_ms
    table = number_table("module", "modules", "forward", "backward", "share", title="\nmodules that take longest")
    ordered = sorted(rows.items(), key=lambda item: -(item[1].forward_ms + item[1].backward_ms))
    for path, row in ordered[:count]:
        both = row.forward_ms + row.backward_ms
        share = f"{both / runtime.total_ms:.1%}" if runtime.total_ms else ""
        table.add_row(path, str(row.count), display_ms(row.forward_ms), display_ms(row.backward_ms), share)
    return table


def _by_unit(frontiers: Frontiers, count: int) -> Table:
    """Show the most that units alike could give up, each recomputed in full, and the cheapest half of it."""
    rows: dict[str, tuple[int, int, float, int, float]] = {}
    for unit in frontiers.units:
        policies = frontiers.of(unit).policies
        most = policies[-1]
        if most.discarded_bytes <= 0:
            continue
        half = next(policy for policy in policies if 2 * policy.discarded_bytes >= most.discarded_bytes)
        path = module_label(alike(unit.name))
        number, full, full_ms, part, part_ms = rows.get(path, (0, 0, 0.0, 0, 0.0))
        rows[path] = (
            number + 1,
            full + most.discarded_bytes,
            full_ms + most.recompute_ms,
            part + half.discarded_bytes,
            part_ms + half.recompute_ms,
        )
    table = number_table(
        "unit", "units", "at most", "for", "about half", "for", title="\nwhat units could give up for time"
    )
    for path, (number, full, full_ms, part, part_ms) in sorted(rows.items(), key=lambda item: -item[1][1])[:count]:
        table.add_row(
            path, str(number), display_bytes(full), display_ms(full_ms), display_bytes(part), display_ms(part_ms)
        )
    return table
