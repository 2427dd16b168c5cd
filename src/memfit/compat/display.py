"""Statistics of selective checkpointing as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from memfit.compat.greedy import group_of
from memfit.compat.sac import SACGreedyOrderMeta, SACStats


def show_stats(sac_stats: SACStats, console: Console, tabular: bool) -> None:
    """The ops of a module, one in a row."""
    console.print(
        f"Total Memory: {sum(sac_stats.memory)} B Total Runtime: {sum(sac_stats.runtimes)} ms"
        f" Store Random: {sac_stats.force_store_random}",
        highlight=False,
    )
    parents = dict(sac_stats.inplace_ops)
    flags = ("View-like", "Random", "Saved Autograd", "In-place")
    table = _table(("Op Idx", "Op Name", "Runtimes(ms)", "Memory (B)", *flags), tabular)
    for op, name in enumerate(sac_stats.func_names):
        table.add_row(
            str(op),
            name,
            f"{sac_stats.runtimes[op]:.4f}",
            str(sac_stats.memory[op]),
            str(op in sac_stats.view_like_ops),
            str(op in sac_stats.rand_ops),
            str(op in sac_stats.saved_autograd_ops),
            str(parents.get(op)),
        )
    console.print(table)


def show_tradeoff(greedy: SACGreedyOrderMeta, sac_stats: SACStats, console: Console, tabular: bool) -> None:
    """What is discarded and run again, added up over the greedy order."""
    total_memory, total_runtime = sum(sac_stats.memory), sum(sac_stats.runtimes)
    headers = ("Op Id(s)", "Op Name(s)", "Discarded Mem (%)", "Discarded Mem (B)", "Recomp time (%)")
    table = _table((*headers, "Recomp time (ms)", "MSPS", "Always Stored", "Always Recomputed"), tabular)
    discarded, spent = 0, 0.0

    def add(ops: Iterable[int], msps: float | None, *, stored: bool = False, recomputed: bool = False) -> None:
        nonlocal discarded, spent
        ops = sorted(ops)
        discarded += sum(sac_stats.memory[op] for op in ops)
        spent += sum(sac_stats.runtimes[op] for op in ops)
        table.add_row(
            ", ".join(map(str, ops)),
            ", ".join(sorted({sac_stats.func_names[op] for op in ops})),
            f"{discarded / total_memory if total_memory else 0:.4f}",
            str(discarded),
            f"{spent / total_runtime if total_runtime else 0:.4f}",
            f"{spent:.4f}",
            f"{msps:.2e}" if msps is not None else "",
            str(stored),
            str(recomputed),
        )

    for op in sorted(greedy.recomputed_ops):
        add([op], None, recomputed=True)
    for candidate in greedy.msps_meta:
        add(group_of(greedy, candidate.op_idx), candidate.msps)
    for op in sorted(greedy.stored_ops):
        add(group_of(greedy, op), None, stored=True)
    console.print(table)


def _table(headers: Iterable[str], tabular: bool) -> Table:
    return Table(*headers, box=box.HEAVY_HEAD if tabular else None)
