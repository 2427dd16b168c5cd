"""Plans on real ranks: both engines, five models, four configurations, at 2 and 4 Gloo ranks of this machine.

For each, every rank's peak is measured beside the predicted one and the budget, and the step under the plan is compared
bit for bit with the step on the same engine without it. `--parts` says what is done: `calibrate` measures each number
of ranks, all at once (as `torchrun -m memfit calibrate` does), `plan` plans, `peaks` verifies plans, `predict` works
their times out again by the calibration that is there, and `times` measures steps with and without the plan by turns,
in rounds over all cases, which mean something on a quiet machine only. A first round warms the processes up and is not
counted: oneDNN generates code for shapes that a process has not met. `--folder` keeps what was found, for the next
part. `python benchmarks/ranks.py --json ranks.json` prints the table and writes it.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import memfit
from memfit.analysis import Report
from memfit.cost import calibrate_on_ranks
from memfit.plans import Plan, build_policy
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from memfit.verify import calibrate_engines

VOCABULARY, BATCH, LENGTH = 512, 4, 128
PARTS = ("calibrate", "plan", "peaks", "predict", "times")
SHOWN = ("peak_errors", "predicted_ms", "plain_predicted_ms", "rounds_ms", "plain_rounds_ms")
TURNS = 2
ENGINES = ("fsdp2", "sharded")
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "use_cache": False,
}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=256, n_layer=4, n_head=8, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=256, d_kv=32, d_ff=704, num_layers=3, num_heads=8, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=704, image_size=64, patch_size=8
    )
    config.num_labels = 10
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit, "mixtral": mixtral}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """How a step is sharded, and where its budget lies between the least and what it takes without a plan."""

    part: float
    accumulation_steps: int = 1
    shard: dict[str, Any] = field(default_factory=dict)


CONFIGURATIONS = {
    "float32": Configuration(part=0.4),
    "bfloat16": Configuration(part=0.4, shard={"param_dtype": "bfloat16", "reduce_dtype": "float32"}),
    "accumulation": Configuration(part=0.1, accumulation_steps=2),
    "not resharded": Configuration(part=0.6, shard={"reshard_after_forward": False}),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    engine: str
    model: str
    configuration: str

    def file(self, folder: Path) -> Path:
        """Where what is found of it is kept."""
        name = self.configuration.replace(" ", "-")
        return folder / f"{dist.get_world_size()}-ranks-{self.engine}-{self.model}-{name}.json"

    def step(self) -> memfit.Step:
        """This rank's step, on a batch of its own."""
        torch.manual_seed(0)
        model = MODELS[self.model]().train()
        numbers = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=numbers)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if self.model == "vit":
            labels = torch.randint(0, 10, (BATCH,), generator=numbers)
            batch = {"pixel_values": torch.randn((BATCH, 3, 64, 64), generator=numbers), "labels": labels}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        steps = CONFIGURATIONS[self.configuration].accumulation_steps
        return memfit.Step(model, batch, optimizer=optimizer, accumulation_steps=steps)

    def plan(self, step: memfit.Step, target: str) -> Plan:
        """The plan of a budget between the least and what the step takes without one."""
        configuration = CONFIGURATIONS[self.configuration]
        options = SolveOptions(  # sharded as the configuration says
            shard=ShardOptions(engine=self.engine, **configuration.shard),  # type: ignore[arg-type]
            decide=(),
        )
        asked: Any = {"target": target, "ranks": dist.get_world_size(), "options": options, "progress": False}
        tight = memfit.plan(step, budget="1KiB", **asked)
        least, most = tight.minimum_budget_bytes, tight.baseline.peak_bytes
        assert least is not None
        return memfit.plan(step, budget=int(least + configuration.part * (most - least)), **asked)


def work(arguments: argparse.Namespace) -> None:
    """What each rank does: calibrate, plan on rank 0 and verify on all, or time the planned steps."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    ranks, folder = dist.get_world_size(), Path(arguments.folder)
    calibrated = folder / f"cpu-{ranks}-ranks.toml"
    if "calibrate" in arguments.parts:
        calibration = calibrate_engines(calibrate_on_ranks(name=calibrated.stem))
        if dist.get_rank() == 0:
            calibration.save(calibrated)
        dist.barrier()
    target = calibrated.stem if calibrated.exists() else "cpu"
    names = product(arguments.engines, arguments.models, arguments.configurations)
    cases = [Case(engine=engine, model=model, configuration=name) for engine, model, name in names]
    for part, work_out in (("plan", plan_case), ("predict", predict)):
        if part in arguments.parts:  # ranks have a part of the cases each
            for case in cases[dist.get_rank() :: ranks]:
                note(folder, case, work_out(case, folder, target))
            dist.barrier()
    if "peaks" in arguments.parts:
        for case in cases:
            found = verify(case, folder, target)
            if dist.get_rank() == 0:
                note(folder, case, found)
    if "times" in arguments.parts:
        planned = [case for case in cases if case.file(folder).exists()]
        for number, case in product(range(1 + arguments.rounds), planned):
            plan = known_plan(case, folder)
            order = 1 if number % 2 else -1  # where a model lies in memory changes its time: both come first in turn
            under_plan, plain = time_ms(case, (plan, unplanned(plan))[::order], arguments.steps)[::order]
            if number and dist.get_rank() == 0:
                note(folder, case, add_round(case, folder, {"rounds_ms": under_plan, "plain_rounds_ms": plain}))
    dist.barrier()
    dist.destroy_process_group()


def note(folder: Path, case: Case, found: dict[str, Any]) -> None:
    """Write what was found of a case beside what is known of it."""
    file = case.file(folder)
    known = json.loads(file.read_text()) if file.exists() else {"ranks": dist.get_world_size(), **vars(case)}
    file.write_text(json.dumps({**known, **found}))
    shown = {name: figure for name, figure in found.items() if name in SHOWN}
    print(f"{dist.get_world_size()} ranks, {case}: {shown}", file=sys.stderr, flush=True)


def add_round(case: Case, folder: Path, taken: dict[str, float]) -> dict[str, list[float]]:
    """Return the known rounds of a case and one more."""
    known = json.loads(case.file(folder).read_text())
    return {name: [*known.get(name, ()), each_ms] for name, each_ms in taken.items()}


def plan_case(case: Case, folder: Path, target: str) -> dict[str, Any]:
    """Plan one case, and return the plan with what it predicts."""
    plan = case.plan(case.step(), target)
    assert plan.predicted is not None
    return {
        "plan": plan.to_json(),
        "checkpointed": len(plan.checkpoint),
        "predicted_ms": plan.predicted.step_ms,
        "plain_predicted_ms": plan.baseline.step_ms,
    }


def predict(case: Case, folder: Path, target: str) -> dict[str, Any]:
    """Work out again what a plan that was made before takes, by the calibration that is there now."""
    plan = known_plan(case, folder)
    problem = Report.of(plan, case.step()).problem
    units = {unit.name: unit for unit in problem.units}
    recompute_ms = sum(problem.recompute_ms(units[each.unit], build_policy(each)) for each in plan.checkpoint)
    plain_ms = problem.runtime.total_ms + problem.exposed_ms
    return {"predicted_ms": plain_ms + recompute_ms, "plain_predicted_ms": plain_ms}


def known_plan(case: Case, folder: Path) -> Plan:
    """Return the plan that was made of a case."""
    return Plan.from_json(json.loads(case.file(folder).read_text())["plan"])


def verify(case: Case, folder: Path, target: str) -> dict[str, Any]:
    """Verify the plan of one case on all ranks, or make it first on rank 0; what rank 0 reports."""
    step = case.step()
    told: list[dict[str, Any]] = [{}]
    if dist.get_rank() == 0:
        known = json.loads(case.file(folder).read_text()) if case.file(folder).exists() else {}
        told = [known if "plan" in known else plan_case(case, folder, target)]
    dist.broadcast_object_list(told)
    plan = Plan.from_json(told[0]["plan"])
    found = plan.verify(step, 1, time_tolerance=None)
    assert found.baseline_peak is not None and found.baseline_step is not None
    return {
        **told[0],
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": [each.peak.predicted_bytes for each in found.ranks],
        "measured_bytes": [each.peak.measured_bytes for each in found.ranks],
        "peak_errors": [each.peak.predicted_bytes / each.peak.measured_bytes - 1 for each in found.ranks],
        "baseline_errors": [
            each.baseline_peak.predicted_bytes / each.baseline_peak.measured_bytes - 1
            for each in found.ranks
            if each.baseline_peak is not None
        ],
        "within_budget": all(each.peak.measured_bytes <= plan.budget_bytes for each in found.ranks),
        "same_bits": found.exactness is not None and found.exactness.equal,
        "findings": list(found.findings),
    }


def unplanned(plan: Plan) -> Plan:
    """The plan without its checkpoint policies: the same units on the same engine."""
    return msgspec.structs.replace(plan, checkpoint=())


def time_ms(case: Case, plans: Sequence[Plan], steps: int) -> list[float]:
    """The median step time under each plan, by turns: some steps warm up, then the first of each turn is left out.

    A step is as long as on its slowest rank. One plan after the other would not do: a process is slower for a while
    after a model was built in it.
    """
    runs = [runner(case, plan) for plan in plans]
    laps: list[list[float]] = [[] for _ in runs]
    for turn in range(TURNS + 1):
        for run, found in zip(runs, laps, strict=True):
            taken = [lap_s(run) for _ in range(1 + steps)]
            found += taken[1:] if turn else []
    slowest = torch.tensor(laps, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return (slowest.quantile(0.5, dim=1) * 1e3).tolist()


def runner(case: Case, plan: Plan) -> Callable[[], None]:
    """Return a function that runs one step of a model of its own under a plan."""
    step = case.step()
    model, optimizer = step.model, step.optimizer
    assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    plan.apply(model, optimizer)
    return lambda: step.execute(model, optimizer, "cpu")


def lap_s(run: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table and what it adds up to."""
    timed = any("rounds_ms" in row for row in rows)
    table = Table("ranks", "engine", "model", "configuration", "units", "largest peak", "off by", "budget", "bits")
    if timed:
        for column in ("predicted", "measured", "off by", "without a plan"):
            table.add_column(column)
    peaks, offs, plain_offs = [], [], []
    for row in rows:
        cells = [str(row["ranks"]), row["engine"], row["model"], row["configuration"], str(row["checkpointed"])]
        if "peak_errors" in row:
            worst = max(row["peak_errors"], key=abs)
            peaks += [abs(each) for each in row["peak_errors"]]
            cells += [f"{max(row['measured_bytes']):,}", f"{worst:+.3%}"]
            cells += ["within" if row["within_budget"] else "ABOVE", "same" if row["same_bits"] else "OTHER"]
        else:
            cells += [""] * 4
        if "rounds_ms" in row:
            measured = statistics.median(row["rounds_ms"])
            offs.append(row["predicted_ms"] / measured - 1)
            plain_offs.append(row["plain_predicted_ms"] / statistics.median(row["plain_rounds_ms"]) - 1)
            cells += [
                f"{row['predicted_ms']:.0f} ms",
                f"{measured:.0f} ms",
                f"{offs[-1]:+.0%}",
                f"{plain_offs[-1]:+.0%}",
            ]
        table.add_row(*cells)
    console = Console(width=180)
    console.print(table)
    if peaks:
        verified = [row for row in rows if "peak_errors" in row]
        console.print(
            f"{len(verified)} cases; peaks of ranks off by {statistics.median(peaks):.4%} (median), "
            f"{max(peaks):.3%} (most); {sum(row['within_budget'] for row in verified)} within their budget; "
            f"{sum(row['same_bits'] for row in verified)} with the bits of the step without a plan"
        )
    for label, found in (("under the plan", offs), ("without it", plain_offs)):
        if found:
            near = sum(abs(each) <= 0.2 for each in found)
            console.print(
                f"times {label} off by {statistics.median(map(abs, found)):.1%} (median), "
                f"{max(map(abs, found)):.0%} (most); {near} of {len(found)} within 20 %"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--parts", nargs="+", default=["peaks"], choices=PARTS, help="what to do; times need peaks")
    parser.add_argument("--times", action="store_true", help="all parts")
    parser.add_argument("--rounds", type=int, default=3, help="over all cases that count, where times are measured")
    parser.add_argument("--steps", type=int, default=2, help="of a turn; two turns make a round")
    parser.add_argument("--folder", type=Path, help="where calibration and results are kept, to go on with later")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.parts = list(PARTS) if arguments.times else arguments.parts
    if "RANK" in os.environ:
        work(arguments)
        return
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for ranks in arguments.ranks:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEMFIT_DEVICES": str(folder)}
            given = [*command, __file__, *sys.argv[1:], "--folder", str(folder)]
            subprocess.run(given, check=True, env=environment)
        rows = [json.loads(file.read_text()) for file in sorted(folder.glob("*-ranks-*.json"))]
    rows = [row for row in rows if "peak_errors" in row or "rounds_ms" in row]
    if rows:
        show(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
