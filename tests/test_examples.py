"""The examples run as they are shipped."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> str:
    environment = {**os.environ, "COLUMNS": "140", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_training_example_trains_under_its_plan() -> None:
    shown = run("examples/train.py")
    assert "budget 35.00 MiB: optimal" in shown and "checkpointed:" in shown
    losses = [float(line.rpartition(" ")[2]) for line in shown.splitlines() if ": loss " in line]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_the_trainer_of_transformers_trains_under_its_plan() -> None:
    pytest.importorskip("transformers")
    shown = run("examples/train_transformers.py")
    losses = [ast.literal_eval(line)["loss"] for line in shown.splitlines() if line.startswith("{'loss'")]
    (peaks,) = [ast.literal_eval(line) for line in shown.splitlines() if "memfit_measured_peak_gib" in line]
    assert len(losses) == 6
    assert float(peaks["memfit_measured_peak_gib"]) <= 30 / 1024


def test_the_demo_of_the_makefile_plans_prints_levers_and_writes_the_page(tmp_path: Path) -> None:
    """With a smaller shape in place of Llama 3 8B."""
    line = next(each for each in (ROOT / "Makefile").read_text().splitlines() if each.startswith("DEMO = "))
    words = line.removeprefix("DEMO = ").split()
    words[words.index("llama3-8b")] = "llama3.2-1b"
    page = tmp_path / "report.html"
    shown = run("-m", "memfit", "plan", *words, "-o", str(tmp_path / "plan.json"), "--html", str(page))
    budget = words[words.index("--budget") + 1].removesuffix("GiB")
    assert f"plan for NVIDIA H100 SXM5 80GB, 8 ranks, budget {budget}.00 GiB" in shown
    assert "what would lower this peak further" in shown
    assert page.stat().st_size > 100_000 and (tmp_path / "plan.json").is_file()


def test_the_sharded_example_trains_under_its_plan_and_goes_on_from_its_save(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/train_sharded.py", str(tmp_path))
    shown = run(*launch) + run(*launch)
    assert [line.partition(":")[0] for line in shown.splitlines() if ": loss " in line] == [
        f"step {number}" for number in range(10)
    ]


def test_the_fsdp2_example_trains_to_the_same_numbers_whoever_shards_the_model() -> None:
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/train_fsdp2.py")
    shown, wrapped = run(*launch).splitlines(), run(*launch, "--wrapped").splitlines()
    assert [line.partition(":")[0] for line in shown[:-1]] == [f"step {number}" for number in range(5)]
    assert shown[:-1] == wrapped[:-1]
    assert not shown[-1].startswith("0 units") and shown[-1].endswith("the model is Llama again")
    assert wrapped[-1].endswith("the model is FSDPLlama again"), "what the script sharded stays sharded"


def test_the_guarded_example_repeats_the_step_that_failed_and_trains_to_the_same_numbers() -> None:
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/train_guarded.py")
    shown, quiet = run(*launch).splitlines(), run(*launch, "--quiet").splitlines()
    assert shown[:-1] == quiet[:-1] and len(shown) == 6
    assert shown[-1].startswith("6 attempts for 5 steps") and quiet[-1].startswith("5 attempts for 5 steps")
