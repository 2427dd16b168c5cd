"""Joint plans on two ranks over Gloo, with both engines, against planning less, in parts, and by hand.

What `joint.py` does in one process, for sharded steps: one thread a rank, ops, links, engines and disk calibrated by
all ranks at once (`torchrun -m memfit calibrate`), plans by rank 0, steps of all by turns behind a barrier, the slowest
rank counts, medians. The joint plan is the one that `memfit.verify.tune` keeps: plans that come near the predicted
fastest run a few steps by turns, before and apart from what is measured here. The joint plan and the fastest other are
then measured once more, four new models of each by turns: the ratio (Note [Once more] in quality/duel.py). Budgets lie
between the smallest that checkpointing alone can meet and what the sharded step needs. `--folder` keeps the calibration
and what was found; what is there is not done again.

- joint: `decide=("loss", "offload", "reshard", "prefetch")`, tuned
- checkpointing: the plan that recomputes and nothing else, resharding always
- kept first: no unit is resharded after its forward, then checkpointing; loss first: 16 chunks, then checkpointing
- every block: all blocks checkpointed, resharding always; it takes no budget and counts where it fits. A UNet's blocks
  contain sharding units, and it has no such plan

Peaks and gradients of the joint plans are verified on both ranks; times in brackets are predicted. `--quick` is a smoke
test with tiny models.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import transformers
from quality.duel import Duel, duel_of, show_duels
from quality.models import CASES, Case
from quality.runs import KEEPS_MEMORY
from torch import nn

import memfit
from memfit.capture import find_chunkable
from memfit.cost import calibrate_on_ranks
from memfit.plans import Plan
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from memfit.units import MiB
from memfit.verify import calibrate_engines, tune

RANKS = 2
PARTS = (0.0, 0.25, 0.5, 0.75)
ENGINES = ("fsdp2", "sharded")
SHAPES: dict[str, dict[str, int]] = {
    "llama": {"vocabulary": 4096, "batch": 2},
    "gpt2": {"vocabulary": 4096, "batch": 2},
    "vit": {"batch": 16},
    "unet": {},
}
AGAIN = 4
"""So many models are timed of the two plans that are measured once more."""
JOINT, LOSS_FIRST, EVERY = "joint", "loss first", "every block"


class Point(msgspec.Struct, kw_only=True):
    """One budget: the joint plan, and the others within it with their times, measured and predicted."""

    budget_bytes: int
    peak_bytes: int
    ms: float
    predicted_ms: float
    does: str
    others: dict[str, tuple[float, float]]
    best: str
    ours_ms: list[float]
    """Times of models that were measured once more, of the joint plan and of `best`; empty where both do the same."""
    theirs_ms: list[float]


class Row(msgspec.Struct, kw_only=True):
    """One model on one engine."""

    model: str
    engine: str
    points: list[Point]
    ok: list[bool]
    findings: list[str]


def options_of(engine: str, blocks: tuple[str, ...]) -> dict[str, SolveOptions]:
    """What each method may decide."""
    shard = ShardOptions(engine=engine)  # type: ignore[arg-type]
    kept = ShardOptions(engine=engine, reshard_after_forward=False)  # type: ignore[arg-type]
    return {
        JOINT: SolveOptions(shard=shard, decide=("loss", "offload", "reshard", "prefetch")),
        "checkpointing": SolveOptions(shard=shard, decide=()),
        "kept first": SolveOptions(shard=kept, decide=()),
        LOSS_FIRST: SolveOptions(shard=shard, decide=(), loss_chunks=16),
        EVERY: SolveOptions(shard=shard, decide=(), force=blocks),
    }


def make_plans(case: Case, engine: str, target: str) -> tuple[list[int], list[tuple[str, int | None, str]]]:
    """Return the budgets, and for each the plans of all methods but the joint one, where they find any."""
    asked: dict[str, Any] = {"target": target, "ranks": RANKS, "progress": False}
    ways = options_of(engine, case.blocks)
    tight = memfit.plan(case.step(), budget="1KiB", options=ways["checkpointing"], **asked)
    least, most = tight.minimum_budget_bytes, tight.baseline.peak_bytes
    assert least is not None
    if find_chunkable(memfit.trace(case.step(), target="cpu")) is None:
        del ways[LOSS_FIRST]
    found: list[tuple[str, int | None, str]] = []
    with contextlib.suppress(memfit.InputError):  # where a block contains a sharding unit, as a UNet's do
        found.append((EVERY, None, memfit.plan(case.step(), options=ways[EVERY], **asked).to_json()))
    budgets = [int(least + part * (most - least)) for part in PARTS]
    for budget in budgets:
        for method, options in ways.items():
            if method not in (EVERY, JOINT):
                plan = memfit.plan(case.step(), budget=budget, options=options, **asked)
                found += [] if plan.predicted is None else [(method, budget, plan.to_json())]
    return budgets, found


def tuned(case: Case, engine: str, target: str, budget: int) -> Plan:
    """Return the joint plan that is the fastest on these ranks."""
    options = options_of(engine, case.blocks)[JOINT]
    found = tune(
        case.step(), budget=budget, target=target, ranks=RANKS, options=options, rounds=4, steps=2, progress=False
    )
    if dist.get_rank() == 0:
        tried = (f"{each.label} {each.measured_ms:.0f}" for each in found.tried)
        print(f"  {case.name}, {engine}, {budget / MiB:.1f} MiB: {', '.join(tried)}", flush=True)
    return found.plan


def trained(case: Case, plan: Plan) -> Callable[[], None]:
    """Return what trains a model of its own under a plan, one step."""
    step = case.step()
    model = step.model
    assert isinstance(model, nn.Module)
    applied, optimizer = plan.apply(model, step.build_optimizer(model))
    return lambda: step.execute(applied, optimizer, "cpu")


def measure(steps: list[Callable[[], None]], rounds: int) -> list[float]:
    """Return the median time of each on the slowest rank, by turns, in changing order."""
    times = torch.zeros(rounds, len(steps), dtype=torch.float64)
    for step in steps * 2:
        step()
    for number in range(rounds):
        order = [(place + 5 * number) % len(steps) for place in range(len(steps))]
        for turn in order[:: 1 if number % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            steps[turn]()
            times[number, turn] = 1e3 * (time.perf_counter() - began)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.median(0).values.tolist()


def result_file(folder: Path, name: str, engine: str, quick: bool) -> Path:
    """Where what was found of a model on an engine is kept."""
    return folder / f"duel-{name}-{engine}{'-quick' if quick else ''}.json"


def work(arguments: argparse.Namespace) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    folder, target = Path(arguments.folder), "cpu-2-ranks"
    if not (folder / f"{target}.toml").exists():
        calibration = calibrate_engines(calibrate_on_ranks(name=target))
        if dist.get_rank() == 0:
            calibration.save(folder / f"{target}.toml")
    dist.barrier()
    for name, engine in product(arguments.models, arguments.engines):
        file = result_file(folder, name, engine, arguments.quick)
        if not file.exists():
            row = compare(CASES[name](arguments.quick, **SHAPES[name]), engine, target, arguments.rounds)
            dist.barrier()  # every rank has seen that the file is not there
            if dist.get_rank() == 0:
                file.write_bytes(msgspec.json.encode(row))
                show(row)
    dist.barrier()
    dist.destroy_process_group()


def compare(case: Case, engine: str, target: str, rounds: int) -> Row:
    """Plan one model on one engine in every way, verify the joint plans and measure all."""
    told = [make_plans(case, engine, target) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    assert told[0] is not None
    budgets, texts = told[0]
    made = [(JOINT, budget, tuned(case, engine, target, budget)) for budget in budgets]
    made += [(method, budget, Plan.from_json(text)) for method, budget, text in texts]
    checks = [plan.verify(case.step(), 1, time_tolerance=None) for method, _, plan in made if method == JOINT]
    keys = [_key(plan) for _, _, plan in made]
    different = {key: plan for key, (_, _, plan) in zip(keys, made, strict=True)}
    of_key = dict(zip(different, measure([trained(case, plan) for plan in different.values()], rounds), strict=True))
    peaks = [max(each.peak.measured_bytes for each in found.ranks) for found in checks]
    points = []
    for (_, budget, plan), key, peak in zip(made, keys, peaks, strict=False):  # the joint ones come first
        assert plan.predicted is not None and budget is not None
        others = {
            method: (of_key[other], other, theirs.predicted.step_ms)
            for (method, own, theirs), other in zip(made, keys, strict=True)
            if theirs.predicted is not None
            and method != JOINT
            and (own == budget or (own is None and theirs.predicted.peak_bytes <= budget))
        }
        best = min(others, key=lambda method: others[method][0])
        ours, theirs = [], []
        if key != others[best][1]:
            pair = [plan, different[others[best][1]]]
            again = measure([trained(case, each) for each in pair * AGAIN], rounds)
            ours, theirs = again[::2], again[1::2]
        points.append(
            Point(
                budget_bytes=budget,
                peak_bytes=peak,
                ms=of_key[key],
                predicted_ms=plan.predicted.step_ms,
                does=_does(plan),
                others={method: (ms, predicted) for method, (ms, _, predicted) in others.items()},
                best=best,
                ours_ms=ours,
                theirs_ms=theirs,
            )
        )
    return Row(
        model=case.name,
        engine=engine,
        points=points,
        ok=[found.ok for found in checks],
        findings=[each for found in checks for each in found.findings],
    )


def _key(plan: Plan) -> bytes:
    """The same for plans that do the same."""
    return msgspec.json.encode((plan.checkpoint, plan.chunked_loss or None, plan.shard))


def _does(plan: Plan) -> str:
    decided = [f"{each.kind} {each.setting}" for each in plan.decisions or ()]
    return ", ".join(decided) or f"recomputes {sum(entry.recompute_ms for entry in plan.checkpoint):.0f} ms"


def show(row: Row) -> list[Duel]:
    """Print each point; return the ratios."""
    print(f"{row.model}, {row.engine}: joint plans verified {row.ok}", *row.findings, sep="; ")
    duels = []
    for point in row.points:
        duels.append(duel_of(point.ours_ms, point.theirs_ms) if point.ours_ms else Duel())
        shown = ", ".join(f"{method} {ms:.0f} [{predicted:.0f}]" for method, (ms, predicted) in point.others.items())
        print(f"  {point.budget_bytes / MiB:7.1f} MiB: joint {point.ms:.0f} [{point.predicted_ms:.0f}] ms", end=" ")
        print(f"({point.does}); {shown}; {point.best} {duels[-1]}; peak {point.peak_bytes / MiB:.1f} MiB", end="")
        print("" if point.peak_bytes <= point.budget_bytes else " ABOVE", flush=True)
    return duels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--folder", type=Path, help="where the calibration and what was found are kept")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments)
        return
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEMFIT_DEVICES": str(folder), **KEEPS_MEMORY}
        subprocess.run([*command, __file__, *sys.argv[1:], "--folder", str(folder)], check=True, env=environment)
        pairs = product(arguments.models, arguments.engines)
        files = [result_file(folder, *pair, arguments.quick) for pair in pairs]
        rows = [msgspec.json.decode(file.read_bytes(), type=Row) for file in files]
    show_duels([duel for row in rows for duel in show(row)])


if __name__ == "__main__":
    main()
