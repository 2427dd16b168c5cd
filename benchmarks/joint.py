"""Joint plans against planning less, planning in parts, and settings by hand: measured steps at the same budgets.

Real training steps on the CPU, one thread, of a Llama and a GPT-2 shape with 8,192 words, a ViT and a UNet, at four
budgets between the smallest that checkpointing alone can meet and what the plain step needs. The disk is measured first
(`memfit calibrate`), ops are timed on this machine. In one run, interleaved, medians over two models of each method:

- joint: `decide=("loss", "offload")`, one program over checkpointing, offload to the disk and the chunks of the loss.
  It is the plan that `memfit.verify.tune` keeps: plans that come near the predicted fastest run some steps by turns,
  before and apart from what is measured here
- checkpointing: the plan that recomputes and nothing else
- loss first: the loss in as many chunks as there are, then checkpointing for the budget
- offload first: every unit offloads all that is copied beside the next one, then checkpointing for the budget
- every block, second block: `torch.utils.checkpoint`; all offloaded: every unit offloads as much as it may. These take
  no budget, and count where their measured peak is within it

The joint plan and the fastest other at each budget are then measured once more, five new models of each by turns: the
ratio (Note [Once more] in quality/duel.py). Two plans that do the same are one run.

The allocator keeps its memory (`quality.runs.KEEPS_MEMORY`). A peak is what is resident when a step begins and the
rise above it by the allocator's events. Gradients under the joint plan are those of the plain step, bit for bit, or
close where the plan says that sums are in another order. With `--folder`, times of ops and plans stay there, and
`--stages` does the work in parts, which all want a quiet machine. `--quick` is a smoke test: tiny models, times by the
roofline, and figures that mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from quality.duel import Duel, duel_of, show_duels
from quality.models import CASES, Case
from quality.runs import Run, checkpointed, keep_memory, run_of

import memfit
from memfit.capture import chunked_losses, find_chunkable
from memfit.cost import Benchmark, Cost, Roofline, Runtime
from memfit.cost.disk import measure_disk
from memfit.hardware import OffloadLink, Target
from memfit.plans import Plan
from memfit.plans.build import build_checkpoint
from memfit.plans.record import OffloadLinkRecord
from memfit.solve import Candidate, Problem, SolveOptions, minimum_budget_bytes
from memfit.tradeoff import Policy
from memfit.units import MiB
from memfit.verify import tune

PARTS = (0.0, 0.25, 0.5, 0.75)
QUICK_PARTS = (0.5,)
SHAPES = {"llama": {"vocabulary": 8192, "batch": 4}, "gpt2": {"vocabulary": 8192, "batch": 2}, "vit": {"batch": 16}}
NUMBERS = (2, 4, 8, 16)
MODELS = 2
"""So many models are timed of each method first."""
AGAIN = 5
"""So many of the two that are measured once more."""
CHUNKS = max(NUMBERS)
JOINT, ALONE, LOSS_FIRST, OFFLOAD_FIRST = "joint", "checkpointing", "loss first", "offload first"
EVERY, SECOND, OFFLOADED, PLAIN = "every block", "second block", "all offloaded", "plain"
PLANNED = (ALONE, LOSS_FIRST, OFFLOAD_FIRST)
BY_HAND = (EVERY, SECOND, OFFLOADED)
STAGES = ("times", "plans", "measure")
Plans = list[tuple[str, int | None, Plan | None]]


class Comparison:
    """All methods on one model."""

    def __init__(self, case: Case, parts: Sequence[float], disk: OffloadLink, cost: Cost) -> None:
        self.case, self.cost = case, cost
        target = Target.parse("cpu")
        self.target = replace(target, device=replace(target.device, disk=disk))
        self.runtime = Runtime.of(memfit.trace(case.step(), target=self.target), cost)
        plain = Problem.of(self.runtime, self.target)
        least = minimum_budget_bytes(plain)
        assert least is not None
        self.budgets = [int(least + part * (plain.baseline_bytes - least)) for part in parts]
        self.problem = Problem.of(self.runtime, self.target, SolveOptions(offload=True))
        self.runs: list[Run] = []
        self.by_budget: dict[tuple[str, int], Run] = {}
        self.plans: dict[bytes, Run] = {}
        self.broken: list[str] = []

    def plan(self) -> Plans:
        """Plan for every budget in every way, None where there is no plan."""
        found: Plans = [(OFFLOADED, None, self._all_offloaded())]
        for budget in self.budgets:
            found.append((JOINT, budget, self._tuned(budget)))
            found.append((ALONE, budget, self._plan(budget, SolveOptions(decide=()))))
            found.append((OFFLOAD_FIRST, budget, self._plan(budget, SolveOptions(decide=(), offload="hidden"))))
            if find_chunkable(self.runtime.trace) is not None:
                found.append((LOSS_FIRST, budget, self._plan(budget, SolveOptions(decide=(), loss_chunks=CHUNKS))))
        return found

    def prepare(self, plans: Plans) -> None:
        """Prepare every method, and measure its peak."""
        self._add(lambda: run_of(self.case, PLAIN, lambda _: None))
        blocks = self.case.blocks
        self._add(lambda: run_of(self.case, EVERY, partial(checkpointed, blocks=blocks)))
        self._add(lambda: run_of(self.case, SECOND, partial(checkpointed, blocks=blocks[::2])))
        for each in plans:
            self._add_plan(*each)

    def check(self, plans: Plans) -> None:
        """Compare gradients and peaks under joint plans with those of the plain step, and with the budget."""
        for method, _, plan in plans:
            if method == JOINT and plan is not None:
                self._check(plan)

    def measure(self, rounds: int) -> None:
        """Measure times, by turns."""
        _by_turns(
            [each for place in range(MODELS) for run in self.runs for each in (run, *run.again)[place : place + 1]],
            rounds,
        )

    def measure_again(self, ours: Run, other: Run, rounds: int) -> Duel:
        """Measure two methods against each other on models made anew (Note [Once more])."""
        if ours is other:
            return Duel()
        made = []
        for _ in range(AGAIN):
            for run in (ours, other):
                assert run.make is not None
                made.append(run.make())
                made[-1].step()
        _by_turns(made, rounds)
        medians = [statistics.median(run.times_ms) for run in made]
        return duel_of(medians[::2], medians[1::2])

    def _plan(self, budget: int, options: SolveOptions) -> Plan | None:
        step = self.case.step()
        plan = memfit.plan(step, target=self.target, budget=budget, cost=self.cost, options=options, progress=False)
        return None if plan.predicted is None else plan

    def _tuned(self, budget: int) -> Plan | None:
        """The joint plan that is the fastest here."""
        options = SolveOptions(decide=("loss", "offload"))
        found = tune(
            self.case.step(),
            target=self.target,
            budget=budget,
            cost=self.cost,
            options=options,
            rounds=6,
            progress=False,
        )
        print(f"  {budget / MiB:.1f} MiB: {', '.join(f'{each.label} {each.measured_ms:.0f}' for each in found.tried)}")
        return None if found.plan.predicted is None else found.plan

    def _all_offloaded(self) -> Plan:
        """A plan under which every unit that may offload does, as much as any of its policies."""
        chosen = []
        for candidate in self.problem.candidates:
            away = [policy for policy in candidate.policies if policy.offload]
            if away:
                chosen.append((candidate, max(away, key=lambda policy: (policy.offloaded_bytes, -policy.recompute_ms))))
        return self._by_hand(chosen)

    def _by_hand(self, chosen: Sequence[tuple[Candidate, Policy]]) -> Plan:
        """A plan with these policies; predicted is its time alone."""
        plain = memfit.plan(self.runtime.trace, target=self.target, cost=self.cost, progress=False)
        assert plain.predicted is not None
        again = sum(policy.recompute_ms for _, policy in chosen)
        waits = sum(policy.exposed_ms for _, policy in chosen)
        entries = [build_checkpoint(self.runtime.trace, each.unit, policy, each.window) for each, policy in chosen]
        predicted = msgspec.structs.replace(
            plain.predicted,
            step_ms=plain.predicted.step_ms + again + waits,
            recompute_ms=again,
            exposed_offload_ms=waits,
        )
        link = msgspec.convert(self.target.device.offload_link, OffloadLinkRecord, from_attributes=True)
        return msgspec.structs.replace(
            plain,
            checkpoint=tuple(sorted(entries, key=lambda entry: entry.begin)),
            predicted=predicted,
            offload_link=link,
        )

    def _add(self, make: Callable[[], Run], predicted_ms: float = 0.0, note: str = "") -> Run:
        """Prepare a method on models of its own, and measure its peak on the first."""
        run = make()
        run.predicted_ms, run.note, run.make = predicted_ms, note, make
        run.measure_peak()
        run.again = [make() for _ in range(MODELS - 1)]
        for other in run.again:
            other.step()
        self.runs.append(run)
        print(f"  {run.method:15s} peak {run.peak_bytes / MiB:7.1f} MiB {run.note}", flush=True)
        return run

    def _add_plan(self, method: str, budget: int | None, plan: Plan | None) -> None:
        if plan is None:
            print(f"  {method:15s} finds nothing for {budget or 0:,} bytes")
            return
        key = msgspec.json.encode((plan.checkpoint, plan.chunked_loss or None))
        run = self.plans.get(key)
        if run is None:
            assert plan.predicted is not None
            asked = "" if budget is None else f"for {budget / MiB:.1f} MiB: "
            run = self.plans[key] = self._add(
                lambda: run_of(self.case, method, plan.apply, budget, plan.loss),
                plan.predicted.step_ms,
                f"{asked}{_describe(plan)}",
            )
        if budget is not None:
            self.by_budget[method, budget] = run

    def _check(self, plan: Plan) -> None:
        found = plan.verify(self.case.step(), 1, time_tolerance=None)
        same = found.exactness is not None and found.exactness.equal
        if not found.ok or not same or found.peak.measured_bytes > plan.budget_bytes:
            self.broken.append(f"{self.case.name}, {plan.budget_bytes / MiB:.1f} MiB: {'; '.join(found.findings)}")

    def report(self, rounds: int) -> list[Duel]:
        """Print the table; return the ratios, at least 1 where the joint plan is not slower than any other."""
        plain = self.runs[0]
        print(f"  plain: {plain.ms:.0f} ms, {plain.peak_bytes / MiB:.1f} MiB; below ms, a peak in MiB behind it")
        names = (JOINT, *PLANNED, *BY_HAND)
        print(f"  {'budget':>10s} " + " ".join(f"{name:>15s}" for name in names) + "   fastest other, ratio; predicted")
        duels = []
        for budget in self.budgets:
            ours = self.by_budget[JOINT, budget]
            others = {name: self._best(name, budget) for name in (*PLANNED, *BY_HAND)}
            within = {name: run for name, run in others.items() if run is not None}
            if not within:  # checkpointing alone finds a plan for every budget
                self.broken.append(f"{self.case.name}: no other way was within {budget:,} bytes")
                continue
            best = min(within, key=lambda name: within[name].ms)
            duels.append(self.measure_again(ours, within[best], rounds))
            if ours.peak_bytes > budget:
                self.broken.append(f"{self.case.name}: {ours.peak_bytes:,} bytes where {budget:,} are allowed")
            cells = " ".join(f"{_cell(run):>15s}" for run in (ours, *others.values()))
            off = f"{ours.predicted_ms:.0f} ms, {ours.predicted_ms / ours.ms - 1:+.1%}"
            print(f"  {budget / MiB:6.1f} MiB {cells}   {best}, {duels[-1]}; {off}", flush=True)
        apart = [max(run.medians_ms) / min(run.medians_ms) - 1 for run in self.runs]
        print(f"  models of one method are {statistics.median(apart):.1%} apart (median), {max(apart):.1%} (most)")
        return duels

    def _best(self, method: str, budget: int) -> Run | None:
        found = self.by_budget.get((method, budget))
        runs = [run for run in self.runs if run.method == method] if method in BY_HAND else [found]
        within = [run for run in runs if run is not None and run.peak_bytes <= budget]
        return min(within, key=lambda run: run.ms, default=None)


def _by_turns(models: Sequence[Run], rounds: int) -> None:
    """Time each so many steps."""
    gc.collect()
    gc.freeze()  # collections between steps are then short
    for number in range(rounds):
        turn = number * 3 % len(models)  # neighbours take turns too
        for run in (*models[turn:], *models[:turn])[:: 1 if number % 2 else -1]:
            run.measure_time()
    gc.unfreeze()


def time_ops(case: Case, cost: Cost) -> None:
    """Time every op of the step, also with its loss in chunks."""
    plain = memfit.trace(case.step(), target="cpu")
    Runtime.of(plain, cost)
    chunkable = find_chunkable(plain)
    for chunks in () if chunkable is None else NUMBERS:
        assert chunkable is not None
        with chunked_losses(chunkable.with_chunks(chunks)):
            Runtime.of(memfit.trace(case.step(), target="cpu"), cost)


def _disk(folder: Path) -> OffloadLink:
    """What the disk was measured to be, once for a folder."""
    file = folder / "disk.json"
    if not file.exists():
        file.write_bytes(msgspec.json.encode(measure_disk()))
    return msgspec.json.decode(file.read_bytes(), type=OffloadLink)


def _describe(plan: Plan) -> str:
    """What a plan does, in few words."""
    away = sum(entry.offloaded_bytes or 0 for entry in plan.checkpoint)
    again = sum(entry.recompute_ms for entry in plan.checkpoint)
    chunks = f", loss in {plan.chunked_loss.chunks} chunks" if plan.chunked_loss else ""
    waits = sum(entry.exposed_ms or 0.0 for entry in plan.checkpoint)
    offload = f", offloads {away / MiB:.1f} MiB for {waits:.0f} ms" if away else ""
    return f"recomputes {again:.0f} ms{offload}{chunks}"


def _cell(run: Run | None) -> str:
    return "-" if run is None else f"{run.ms:.0f} ({run.peak_bytes / MiB:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="for times of ops and plans, a temporary one unless given")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--quick", action="store_true", help="tiny models, one budget")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    duels: dict[str, list[Duel]] = {}
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        disk = _disk(folder)
        print(
            f"disk: {disk.to_host_bytes_per_s / 1e9:.2f} GB/s there, {disk.to_device_bytes_per_s / 1e9:.2f} GB/s back, "
            f"{disk.compute_s_per_byte * 1e9:.2f} ns a byte from the ops beside"
        )
        cost: Cost = Roofline() if options.quick else Benchmark(folder=folder, progress=False)
        for name in options.models:
            case = CASES[name](options.quick, **SHAPES.get(name, {}))
            print(f"{case.name}: {case.size}, AdamW, float32", flush=True)
            if "times" in options.stages:
                time_ops(case, cost)
            if options.stages == ["times"]:
                continue
            comparison = Comparison(case, QUICK_PARTS if options.quick else PARTS, disk, cost)
            file = folder / f"plans-{name}.json"
            if "plans" in options.stages:
                made = [(method, budget, plan and plan.to_json()) for method, budget, plan in comparison.plan()]
                file.write_bytes(msgspec.json.encode(made))
            read = msgspec.json.decode(file.read_bytes(), type=list[tuple[str, int | None, str | None]])
            plans = [(method, budget, Plan.from_json(text) if text else None) for method, budget, text in read]
            if "plans" in options.stages:
                comparison.check(plans)
                broken += comparison.broken
            if "measure" in options.stages:
                comparison.broken.clear()
                comparison.prepare(plans)
                rounds = 3 if options.quick else options.rounds
                comparison.measure(rounds)
                duels[name] = comparison.report(rounds)
                broken += comparison.broken
            del comparison
            gc.collect()
    for each in broken:
        print(f"NOT AS PLANNED: {each}")
    for name, found in duels.items():
        print(f"{name}: {', '.join(map(str, found))}")
    if duels:
        show_duels([each for found in duels.values() for each in found])


if __name__ == "__main__":
    main()
