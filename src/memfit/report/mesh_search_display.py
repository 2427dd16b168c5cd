"""A search over meshes for people: the best shape first, what was the same in all, then every shape."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.plans import EXPANDABLE, MeshPoint, MeshSearch, display_mesh
from memfit.report.search_display import display_rate
from memfit.text import counted, number_table
from memfit.units import display_bytes, display_ms


def mesh_search_report(search: MeshSearch) -> Group:
    """Show everything that fits a screen of 100 columns."""
    parts: list[RenderableType] = [_headline(search)]
    planned = [point for point in search.points if point.status != "impossible"]
    impossible = [point for point in search.points if point.status == "impossible"]
    if planned:
        parts += [Text(), _shapes(search, planned), Text(), Text(_legend(search, planned), style="dim")]
    if impossible:
        parts += [Text(), _impossible(impossible)]
    parts += [Text(f"note: {note}", style="dim") for note in search.notes]
    return Group(*parts)


def _headline(search: MeshSearch) -> Text:
    nodes = -(-search.ranks // search.ranks_per_node)
    where = f"{search.ranks} x {search.target}"
    if nodes > 1:
        where += f" in {nodes} nodes of {search.ranks_per_node}"
    text = Text(f"mesh of {where}, budget {display_bytes(search.budget_bytes)} a rank: ")
    best = search.best
    if not search.complete:
        text.append("interrupted, up to here ", style="bold yellow")
    if best is None:
        text.append("nothing fits", style="bold red")
        text.append(_what_is_missing(search))
    elif best.with_care:
        text.append(f"{display_mesh(best.mesh)}, with care", style="bold yellow")
    else:
        text.append(f"{display_mesh(best.mesh)} is best", style="bold green")
    if best is not None and best.throughput_per_s is not None and best.throughput_per_rank_per_s is not None:
        rate, each = display_rate(best.throughput_per_s), display_rate(best.throughput_per_rank_per_s)
        text.append(f"\npredicted: {rate} {search.counts}/s, {each} a GPU")
        text.append(", nothing recomputed" if not best.recompute_ms else "")
    samples = "" if search.samples is None else f", {counted(search.samples, 'sample')}"
    text.append(f"\nthe same in all shapes: the {search.fixed}{samples}")
    return text


def _what_is_missing(search: MeshSearch) -> str:
    needs = [point for point in search.points if point.minimum_budget_bytes is not None]
    if not needs:
        return ""
    least = min(needs, key=lambda point: point.minimum_budget_bytes or 0)
    return (
        f"\nthe smallest budget that works is {display_bytes(least.minimum_budget_bytes or 0)}, with "
        f"{display_mesh(least.mesh)}; give a larger budget, more GPUs or a smaller batch"
    )


def _shapes(search: MeshSearch, points: list[MeshPoint]) -> Table:
    names = ["batch", "step", "exposed", "recompute", f"{search.counts}/s", "a GPU", "peak", "reserved"]
    table = number_table(*search.dims, *names, left=0)
    best = search.best
    for point in points:
        style = "bold green" if point is best else None if point.fits else "dim"
        sizes = [str(point.mesh.get(name, 1)) for name in search.dims]
        table.add_row(*sizes, *_cells(point), style=style)
    return table


def _cells(point: MeshPoint) -> list[str]:
    batch = "" if point.batch is None else str(point.batch)
    if point.step_ms is None or point.peak_bytes is None:
        why = "no time" if point.status == "unknown" else "no plan"
        least = point.minimum_budget_bytes
        return [batch, why, "", "", "", "", *(("", "") if least is None else ("needs", display_bytes(least)))]
    share, rate, each = point.exposed_share, point.throughput_per_s, point.throughput_per_rank_per_s
    reserved = "" if point.peak_reserved_bytes is None else display_bytes(point.peak_reserved_bytes)
    return [
        batch,
        display_ms(point.step_ms),
        f"{share:.1%}" if share else "",
        display_ms(point.recompute_ms) if point.recompute_ms else "",
        "" if rate is None else display_rate(rate),
        "" if each is None else display_rate(each),
        display_bytes(point.peak_bytes),
        f"{reserved} !" if point.with_care else reserved,
    ]


def _impossible(points: list[MeshPoint]) -> Table:
    table = number_table("cannot be", "why", left=2)
    for point in points:
        table.add_row(display_mesh(point.mesh), Text(point.reason), style="dim")
    return table


def _legend(search: MeshSearch, points: list[MeshPoint]) -> str:
    lines = [
        "batch: samples of a data-parallel rank; exposed: the part of the step that waits for communication or is "
        "slowed by it; recompute: time that the plan adds"
    ]
    spread = _spread(points)
    if spread:
        lines.append(spread)
    if any(point.fits and (point.budget_bytes or 0) < search.budget_bytes for point in points):
        lowered = [point.budget_bytes or 0 for point in points if point.fits]
        least = display_bytes(min(lowered))
        lines.append(f"the budget was lowered, to {least} at the lowest, where the caching allocator needs the room")
    if any(point.with_care for point in points):
        lines.append(
            "!: with care, the caching allocator would reserve more than the device has for tensors; memfit plan says "
            f"what helps, or run with {EXPANDABLE}"
        )
    return "\n".join(lines)


def _spread(points: list[MeshPoint]) -> str:
    """Say which dimensions go from node to node; all shapes have the same order of dimensions."""
    inside = {name for point in points for name, nodes in point.nodes.items() if nodes == 1 and point.mesh[name] > 1}
    across = {name for point in points for name, nodes in point.nodes.items() if nodes > 1}
    said = []
    if inside - across:
        said.append(f"{' and '.join(sorted(inside - across))} inside a node")
    if across:
        said.append(f"{' and '.join(sorted(across))} from node to node")
    return f"links: {', '.join(said)}" if across else ""
