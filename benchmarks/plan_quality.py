"""How good plans are: measured step time and peak of memfit's plans and of what else there is, at the same budgets.

Real training steps on the CPU, one thread, of a Llama shape, a GPT-2 shape, a ViT and a UNet. Budgets lie between the
smallest that memfit can meet and what the plain step needs. In one run, interleaved, medians:

- memfit: the plan for the budget, applied; ops are timed on this machine (`Benchmark`), each run anew
- every block, every second block: `torch.utils.checkpoint`, which takes no budget
- sac_milp: PyTorch's `sac_milp` and its policy per module, applied with `create_selective_checkpoint_contexts`
- compile: torch.compile's `activation_memory_budget`, by recomputed FLOPs and peak alone (quality/compiled.py); it
  minimises FLOPs and not time, so memfit's side of this is a plan for the budget that minimises FLOPs, too

A peak is what is resident when a step begins and the rise above it by the allocator's events, the same for all. A peer
counts at a budget with the fastest of all its measured runs, whatever they were made for, whose measured peak is
within it. PyTorch's solver may take 180 s per budget; `--peers blocks` leaves it and the compiler out. `--quick`
is a smoke test: tiny models, times by the roofline, and figures that mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from quality.compiled import Compiled
from quality.models import CASES, Case
from quality.picture import draw
from quality.runs import Run, checkpointed, resident_bytes, run_of
from quality.sac import Planner, apply_decision
from torch import nn

import memfit
from memfit.capture import Trace
from memfit.cost import Benchmark, Cost, Roofline, Runtime
from memfit.cost.runtime import Times
from memfit.hardware import Target
from memfit.plans import Plan
from memfit.solve import Problem, minimum_budget_bytes
from memfit.units import MiB

PARTS = (0.0, 0.2, 0.4, 0.6, 0.8)
QUICK_PARTS = (0.5,)
PEERS = ("blocks", "sac", "compile")
EVERY, SECOND, SAC, COMPILE, MEMFIT, PLAIN = "every block", "second block", "sac_milp", "compile", "memfit", "plain"
BY_FLOPS = "memfit by FLOPs"
TIMED = (EVERY, SECOND, SAC)


class Flops:
    """What torch.compile's partitioner minimises: FLOPs, here with a little for every op so that none is free."""

    def op_ms(self, trace: Trace) -> Times:
        """A hundred GFLOP per second."""
        return np.array([op.flops * 1e-8 + (0.0 if op.view else 1e-4) for op in trace.ops])


class Comparison:
    """All methods on one model."""

    def __init__(self, case: Case, parts: Sequence[float], peers: Sequence[str], folder: Path, quick: bool) -> None:
        self.case, self.parts, self.peers, self.folder = case, parts, peers, folder
        self.trace: Trace = memfit.trace(case.step(), target="cpu")
        self.cost: Cost = Roofline() if quick else Benchmark(folder=folder / "times", progress=False)
        self.runtime = Runtime.of(self.trace, self.cost)
        problem = Problem.of(self.runtime, Target.parse("cpu"))
        least = minimum_budget_bytes(problem)
        assert least is not None
        self.least_bytes, self.baseline_bytes = least, problem.baseline_bytes
        self.budgets = [int(least + part * (self.baseline_bytes - least)) for part in parts]
        self.runs: list[Run] = []

    def measure(self, rounds: int, own_peaks: bool) -> None:
        """Prepare every method and measure its peak; then times, by turns."""
        self._add(run_of(self.case, PLAIN, lambda _: None))
        if "compile" in self.peers:
            self._add_compiled()
        if "blocks" in self.peers:
            self._add(run_of(self.case, EVERY, partial(checkpointed, blocks=self.case.blocks)))
            self._add(run_of(self.case, SECOND, partial(checkpointed, blocks=self.case.blocks[::2])))
        if "sac" in self.peers:
            self._add_sac()
        if own_peaks:
            peaks = {run.peak_bytes for run in self.runs if run.method in TIMED}
            self.budgets += [peak for peak in peaks if self.least_bytes <= peak < self.baseline_bytes]
            self.budgets = sorted(set(self.budgets))
        for budget in self.budgets:
            self._add_memfit(MEMFIT, budget, self.cost)
            if "compile" in self.peers:
                self._add_memfit(BY_FLOPS, budget, Flops())
        timed = [run for run in self.runs if run.method not in (COMPILE, BY_FLOPS)]
        gc.collect()
        gc.freeze()  # collections between steps are then short
        for number in range(rounds):
            turn = number * 5 % len(timed)  # neighbours take turns too
            for run in (*timed[turn:], *timed[:turn])[:: 1 if number % 2 else -1]:
                run.measure_time()
        gc.unfreeze()

    def _add(self, run: Run) -> None:
        run.measure_peak()
        self.runs.append(run)
        print(f"  {run.method:15s} peak {_mib(run.peak_bytes)} {run.note}", flush=True)

    def _add_memfit(self, method: str, budget: int, cost: Cost) -> None:
        plan = memfit.plan(self.trace, budget=budget, cost=cost, progress=False)
        run = run_of(self.case, method, plan.apply, budget)
        run.recomputed_flops = recomputed_flops(self.trace, plan)
        assert plan.predicted is not None
        saved = sum(len(entry.saved_ops) for entry in plan.checkpoint)
        run.note = (
            f"for {_mib(budget)} ({plan.status}): predicted {_mib(plan.predicted.peak_bytes)}, "
            f"+{plan.predicted.recompute_ms:.0f} ms; {len(plan.checkpoint)} units, {saved} ops saved"
        )
        self._add(run)

    def _add_sac(self) -> None:
        planner = Planner(self.case, self.runtime, self.folder / "sac_milp.json")
        step = self.case.step()
        model = step.model
        assert isinstance(model, nn.Module)
        optimizer = step.build_optimizer(model)
        step.execute(model, optimizer, "cpu")
        apart = resident_bytes(step, model, optimizer) - sum(p.numel() * p.element_size() for p in model.parameters())
        for number, budget in enumerate(self.budgets):
            decision = planner.decide(budget - apart)
            if number == 0:
                print(f"  {SAC}: with {planner.source}")
            if decision is None:
                print(f"  {SAC:15s} finds nothing for {_mib(budget)}", flush=True)
                continue
            try:
                run = run_of(self.case, SAC, partial(apply_decision, decision=decision), budget)
                run.note = (
                    f"for {_mib(budget)}: predicted {_mib(decision.peak_bytes + apart)}, "
                    f"+{decision.recompute_ms:.0f} ms; {len(decision.saved)} units; {decision.seconds:.0f} s"
                )
                self._add(run)
            except Exception as error:  # a decision that PyTorch cannot run
                reason = str(error).strip().splitlines()[0]
                print(f"  {SAC:15s} cannot be run for {_mib(budget)}: {type(error).__name__}: {reason}")

    def _add_compiled(self) -> None:
        """At the budget's equivalent: the part that is left for activations, of what the plain step has."""
        plain = self.runs[0]
        still = plain.resident_bytes + sum(s.bytes for s in self.trace.storages if s.category == "gradient")
        for budget in self.budgets:
            part = min(1.0, max(0.0, (budget - still) / (self.baseline_bytes - still)))
            step = self.case.step()
            compiled = Compiled(step, part)
            try:
                compiled.run()
            except Exception as error:  # whatever the compiler raises on a model
                print(f"  {COMPILE:15s} cannot compile: {type(error).__name__}: {str(error).splitlines()[0]}")
                return
            assert isinstance(step.model, nn.Module)
            resident = resident_bytes(step, step.model, compiled.optimizer)
            run = Run(method=COMPILE, budget_bytes=budget, step=compiled.run, resident_bytes=resident)
            run.measure_peak()
            run.recomputed_flops = compiled.recomputed_flops
            run.note = f"for {_mib(budget)}: {run.recomputed_flops / 1e9:.2f} GFLOP again at a part of {part:.2f}"
            run.step = _nothing
            self.runs.append(run)
            print(f"  {run.method:15s} peak {_mib(run.peak_bytes)} {run.note}", flush=True)
            torch._dynamo.reset()
            gc.collect()

    def report(self) -> tuple[list[float], list[float]]:
        """The table; the ratios of times and of recomputed FLOPs, each at least 1 where memfit is not worse."""
        plain = self.runs[0]
        print(f"  plain: {plain.ms:.0f} ms, {_mib(plain.peak_bytes)}; times below in ms, a peak in MiB behind it")
        header = " ".join(f"{name:>20s}" for name in (MEMFIT, *TIMED))
        print(
            f"  {'budget':>10s} {header}  {'fastest':12s} {'ratio':>6s}   GFLOP again: memfit, by FLOPs, compile, ratio"
        )
        times, flops = [], []
        for budget in self.budgets:
            ours = next(run for run in self.runs if run.method == MEMFIT and run.budget_bytes == budget)
            theirs = {name: self._best(name, budget) for name in TIMED}
            within = [run for run in theirs.values() if run is not None]
            ratio = None
            if within and ours.peak_bytes <= budget:
                ratio = min(run.ms for run in within) / ours.ms
                times.append(ratio)
            candidates = within + ([ours] if ours.peak_bytes <= budget else [])
            fastest = min(candidates, key=lambda run: run.ms).method if candidates else "nobody"
            cells = " ".join(f"{_cell(run):>20s}" for run in (ours, *theirs.values()))
            shown = "-" if ratio is None else f"{ratio:.3f}"
            compared, flops_ratio = self._flops(ours, budget)
            if flops_ratio is not None:
                flops.append(flops_ratio)
            broken = "" if ours.peak_bytes <= budget else "  memfit BREAKS THE BUDGET"
            print(f"  {_mib(budget):>10s} {cells}  {fastest:12s} {shown:>6s}   {compared}{broken}")
        return times, flops

    def _best(self, method: str, budget: int) -> Run | None:
        within = [run for run in self.runs if run.method == method and run.peak_bytes <= budget]
        return min(within, key=lambda run: run.ms, default=None)

    def _flops(self, timed: Run, budget: int) -> tuple[str, float | None]:
        """GFLOP of the plan for time, of the plan for FLOPs, of the compiler; the ratio of the last two."""
        ours = next((run for run in self.runs if run.method == BY_FLOPS and run.budget_bytes == budget), None)
        within = [run for run in self.runs if run.method == COMPILE and run.peak_bytes <= budget]
        cells = [_gflop(timed), _gflop(ours)]
        if ours is None or not within:
            return ", ".join((*cells, "-, -")), None
        if ours.peak_bytes > budget:
            return ", ".join((*cells, "-, -  memfit by FLOPs BREAKS THE BUDGET")), None
        theirs = min(within, key=_flops_of)
        same = _flops_of(theirs) == _flops_of(ours)
        ratio = 1.0 if same else _flops_of(theirs) / max(_flops_of(ours), 1)
        return ", ".join((*cells, _gflop(theirs), f"{min(ratio, 999.0):.2f}")), ratio


def _flops_of(run: Run) -> int:
    assert run.recomputed_flops is not None
    return run.recomputed_flops


def _gflop(run: Run | None) -> str:
    return "-" if run is None else f"{_flops_of(run) / 1e9:.2f}"


def recomputed_flops(trace: Trace, plan: Plan) -> int:
    """FLOPs of the ops that a plan runs again."""
    return sum(trace.ops[entry.begin + op.offset].flops for entry in plan.checkpoint for op in entry.recomputed_ops)


def _nothing() -> None:
    """A step that is not run any more, so that its model can go."""


def _mib(count: int) -> str:
    return f"{count / MiB:.1f} MiB"


def _cell(run: Run | None) -> str:
    return "-" if run is None else f"{run.ms:.0f} ({run.peak_bytes / MiB:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--budgets", nargs="+", type=float, help="parts between smallest and plain")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", nargs="+", choices=PEERS)
    parser.add_argument("--own-peaks", action="store_true", help="also budgets that are just what a peer's run takes")
    parser.add_argument("--out", type=Path, help="a folder for pictures, docs/images unless --quick")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, one budget, no solver of PyTorch's, no compiler"
    )
    options = parser.parse_args()
    if options.quick:
        options.budgets, options.rounds = options.budgets or QUICK_PARTS, min(options.rounds, 3)
        options.peers = options.peers or ("blocks",)
    elif options.out is None:
        options.out = Path(__file__).parent.parent / "docs" / "images"
    options.budgets, options.peers = options.budgets or PARTS, options.peers or PEERS
    torch.set_num_threads(1)
    times: list[float] = []
    flops: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            case = CASES[name](options.quick)
            print(f"{case.name}: {case.size}, AdamW, float32", flush=True)
            comparison = Comparison(case, options.budgets, options.peers, Path(folder), options.quick)
            comparison.measure(options.rounds, options.own_peaks)
            found = comparison.report()
            times += found[0]
            flops += found[1]
            if options.out is not None:
                draw(case, comparison.runs, options.out / f"plan-quality-{case.name}.svg")
            del comparison
            gc.collect()
    if flops:
        least = min(flops)
        print(f"compile's recomputed FLOPs over those of memfit's plan by FLOPs, within the budget, least: {least:.2f}")
    worst = min(times, default=1.0)
    print(f"the best peer's time over memfit's, within the budget, least: {worst:.3f} (must be at least 1)")


if __name__ == "__main__":
    main()
