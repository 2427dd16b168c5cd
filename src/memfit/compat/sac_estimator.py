"""`SACEstimator`, a name that users of `torch.distributed._tools` know, answered from a trace.

The prototype watches code as it runs, under fake tensors and with a GPU. memfit captures a whole step first, on
any machine. docs/design/tradeoff.md says where the numbers differ and why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from memfit.capture import Step, Trace, trace
from memfit.compat.sac import SACGreedyOrderMeta, SACStats, SACTable, SACTradeOffStats, greedy_order, group_of
from memfit.compat.step_capture import TimedStepCapture
from memfit.compat.tradeoff_curve import tradeoff_curve
from memfit.cost import cost_model
from memfit.errors import MissingFeatureError
from memfit.hardware import Device, Target
from memfit.tradeoff import Frontiers, Times, build_frontiers, forward_calls


class SACEstimator(TimedStepCapture[Trace]):
    """What selective activation checkpointing would save and cost in each module, without a GPU.

        with SACEstimator(step, target="h100-sxm")("operator-level-cost-model") as estimator:
            estimator.pwlf_sac_tradeoff_curve(n_segments=2)
            estimator.display_modulewise_sac_stats(depth=3, print_tabular=True)

    or `estimator.run(function)` for a loop of one's own, or `SACEstimator.of(trace, op_ms)`. The dictionaries hold
    every call of a module that has children, in the order of the forward, by the module's path, the model itself
    by the empty one; a second call of a module has `#1` after its path. `frontiers` has what the greedy order and
    its fitted curve approximate.
    """

    def __init__(self, step: Step | Callable[[], Any] | None = None, *, target: str | Device | Target = "cpu") -> None:
        super().__init__(step, target=target)
        self.sac_mod_stats: dict[str, SACStats] = {}
        self.sac_mod_tradeoff_stats: dict[str, SACTradeOffStats] = {}
        self.sac_mod_greedy_order_meta: dict[str, SACGreedyOrderMeta] = {}
        self._op_ms: Times = np.zeros(0)
        self._frontiers: Frontiers | None = None

    @classmethod
    def of(cls, trace: Trace, op_ms: Sequence[float] | Times) -> SACEstimator:
        """Build the estimator of a step captured before, for these times of its ops in milliseconds."""
        estimator = cls(target=trace.hardware)
        estimator._take(trace, np.asarray(op_ms, np.float64))
        return estimator

    @property
    def frontiers(self) -> Frontiers:
        """The exact trade-off of every unit of the step, the loss among them."""
        if self._frontiers is None:
            self._frontiers = build_frontiers(self._captured(), self._op_ms)
        return self._frontiers

    def pwlf_sac_tradeoff_curve(self, n_segments: int = 2, save_tradeoff_graphs: bool = False) -> None:
        """Fit a piecewise linear curve to every module's greedy order; into `sac_mod_tradeoff_stats`.

        With `save_tradeoff_graphs` each curve is drawn into the folder `tradeoff_graphs`; this needs matplotlib.
        """
        self._captured()
        for name, sac_stats in self.sac_mod_stats.items():
            curve = tradeoff_curve(sac_stats, self.sac_mod_greedy_order_meta[name], n_segments)
            self.sac_mod_tradeoff_stats[name] = curve
            if save_tradeoff_graphs:
                _draw(curve, self._label(name))

    def display_sac_stats(
        self, sac_stats: SACStats, print_tabular: bool = False, console: Console | None = None
    ) -> None:
        """Show the ops of a module."""
        show_stats(sac_stats, console or Console(), print_tabular)

    def display_sac_tradeoff_stats(
        self,
        greedy_order_meta: SACGreedyOrderMeta,
        sac_stats: SACStats,
        print_tabular: bool = False,
        console: Console | None = None,
    ) -> None:
        """Show the greedy order of a module, with memory and time added up."""
        show_tradeoff(greedy_order_meta, sac_stats, console or Console(), print_tabular)

    def display_modulewise_sac_stats(
        self, depth: int = 2, print_tabular: bool = False, console: Console | None = None
    ) -> None:
        """Show ops and greedy order of every module, down to a depth of nesting (1 is the model itself)."""
        self._captured()
        console = console or Console()
        for name, sac_stats in self.sac_mod_stats.items():
            label = self._label(name)
            if label.count(".") + 1 > depth:
                continue
            console.print(f"Module: {label}", highlight=False, markup=False)
            self.display_sac_stats(sac_stats, print_tabular, console)
            console.print(f"AC Trade-off for Module: {label} MSPS = Memory/Runtime", highlight=False, markup=False)
            self.display_sac_tradeoff_stats(self.sac_mod_greedy_order_meta[name], sac_stats, print_tabular, console)

    def _label(self, name: str) -> str:
        """Return a unit's name with the model's class in front, as the prototype has it."""
        root = next((module.kind for module in self._captured().modules if not module.path), "")
        return f"{root}.{name}" if root and name and not name.startswith("#") else f"{root}{name}"

    def _capture(self, step: Step | Callable[[], Any]) -> None:
        captured = trace(step, target=self.target)
        self._take(captured, cost_model(self._mode, self.target).op_ms(captured))

    def _take(self, trace: Trace, op_ms: Times) -> None:
        table = SACTable(trace, op_ms)
        parents = {module.path.rpartition(".")[0] for module in trace.modules if module.path}
        self._found, self._op_ms, self._frontiers = trace, op_ms, None
        self.sac_mod_stats = {unit.name: table.stats(unit) for unit in forward_calls(trace) if unit.module in parents}
        self.sac_mod_greedy_order_meta = {name: greedy_order(stats) for name, stats in self.sac_mod_stats.items()}
        self.sac_mod_tradeoff_stats = {}


def _draw(curve: SACTradeOffStats, name: str) -> None:
    """Draw the curve, its shifted points and the fit into `tradeoff_graphs/<name>.png`."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingFeatureError("save_tradeoff_graphs draws with matplotlib; pip install matplotlib") from error
    shares, times = list(curve.tradeoff_curve), list(curve.tradeoff_curve.values())
    figure, axes = pyplot.subplots()
    axes.plot(shares[:-1], times[1:], "o", label="Shifted")
    axes.plot(shares, times, "x", label="Original")
    for segment, (slope, intercept) in enumerate(zip(curve.slopes, curve.intercepts, strict=True)):
        ends = np.array(curve.fit_breaks[segment : segment + 2])
        axes.plot(ends, slope * ends + intercept, "-", color="tab:green", label="" if segment else "Fitted")
    axes.set_xlabel("Memory discarded / Total memory")
    axes.set_ylabel("Recomp time / Total recomp time")
    axes.set_title(f"{name}: {curve.sac_memory} B, {curve.sac_runtime:.4f} ms")
    axes.legend()
    folder = Path("tradeoff_graphs")
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"{name}.png")
    pyplot.close(figure)


# -- Statistics of selective checkpointing as tables ------------------------------------------------------------------


def show_stats(sac_stats: SACStats, console: Console, tabular: bool) -> None:
    """Print the ops of a module, one in a row."""
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
    """Print what is discarded and recomputed, added up over the greedy order."""
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
