"""Joint plans on two ranks over Gloo, with both engines, against planning less, in parts, and by hand.

What `joint.py` does in one process, for sharded steps: one thread a rank, ops, links, engines and disk calibrated by
all ranks at once (`torchrun -m memfit calibrate`), plans by rank 0, two models of each plan, steps of all by turns
behind a barrier, the slowest rank counts, medians. The joint plan is the one that `memfit.verify.tune` keeps: plans
that come near the predicted fastest run a few steps by turns, before and apart from what is measured here. How far
two models of one plan are apart is up to the machine and to no plan; the median of that is printed beside the ratios.
Budgets lie between the smallest that checkpointing alone can meet and what the sharded step needs. `--folder` keeps
the calibration and what was found; what is there is not done again.

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
import json
import os
import statistics
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
MODELS = 2
"""So many models are timed of each plan."""
JOINT, LOSS_FIRST, EVERY = "joint", "loss first", "every block"


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
    return folder / f"joint-{name}-{engine}{'-quick' if quick else ''}.json"


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
                file.write_text(json.dumps(row))
                show([row])
    dist.barrier()
    dist.destroy_process_group()


def compare(case: Case, engine: str, target: str, rounds: int) -> dict[str, Any]:
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
    measured = measure([trained(case, plan) for _ in range(MODELS) for plan in different.values()], rounds)
    of_model = [measured[place :: len(different)] for place in range(len(different))]
    of_key = {key: statistics.fmean(found) for key, found in zip(different, of_model, strict=True)}
    predicted = [(plan.predicted.peak_bytes, plan.predicted.step_ms) for _, _, plan in made if plan.predicted]
    return {
        "model": case.name,
        "engine": engine,
        "runs": [
            (method, budget, of_key[key], *figures, _does(plan))
            for (method, budget, plan), key, figures in zip(made, keys, predicted, strict=True)
        ],
        "apart": [max(found) / min(found) - 1 for found in of_model],
        "ok": [found.ok for found in checks],
        "findings": [each for found in checks for each in found.findings],
        "peaks": [max(each.peak.measured_bytes for each in found.ranks) for found in checks],
    }


def _key(plan: Plan) -> bytes:
    """The same for plans that do the same."""
    return msgspec.json.encode((plan.checkpoint, plan.chunked_loss or None, plan.shard))


def _does(plan: Plan) -> str:
    decided = [f"{each.kind} {each.setting}" for each in plan.decisions or ()]
    return ", ".join(decided) or f"recomputes {sum(entry.recompute_ms for entry in plan.checkpoint):.0f} ms"


def show(rows: list[dict[str, Any]]) -> list[float]:
    """Print each point; return the ratios."""
    ratios = []
    for row in rows:
        print(f"{row['model']}, {row['engine']}: joint plans verified {row['ok']}", *row["findings"], sep="; ")
        if row.get("apart"):  # not in files of older runs
            print(f"  two models of one plan are {statistics.median(row['apart']):.1%} apart (median)")
        for place, (_, budget, ours, _, expected, does) in enumerate(run for run in row["runs"] if run[0] == JOINT):
            others = {
                method: (ms, predicted)
                for method, own, ms, peak, predicted, _ in row["runs"]
                if method != JOINT and (own == budget or (own is None and peak <= budget))
            }
            best = min(others, key=others.__getitem__)
            ratios.append(others[best][0] / ours)
            shown = ", ".join(f"{method} {ms:.0f} [{predicted:.0f}]" for method, (ms, predicted) in others.items())
            within = row["peaks"][place] <= budget
            print(f"  {budget / MiB:7.1f} MiB: joint {ours:.0f} [{expected:.0f}] ms ({does}); {shown}; ", end="")
            print(f"{best} {ratios[-1]:.3f}; peak {row['peaks'][place] / MiB:.1f} MiB{'' if within else ' ABOVE'}")
    return ratios


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
        rows = [json.loads(file.read_text()) for file in files]
    ratios = show(rows)
    apart = statistics.median([each for row in rows for each in row.get("apart", ())] or [0.0])
    print(f"two models of one plan are {apart:.1%} apart (median); points slower than that:", end=" ")
    print(sum(each < 1 - apart for each in ratios), "of", len(ratios))
    print(f"the fastest other's time over the joint plan's: {', '.join(f'{each:.3f}' for each in ratios)}")
    print(f"least: {min(ratios):.3f}, median {statistics.median(ratios):.3f} (must be at least 1)")


if __name__ == "__main__":
    main()
