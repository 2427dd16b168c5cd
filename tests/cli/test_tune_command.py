"""`memfit tune train.py:step`: what is run, printed and written, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit.plans import load
from tests.cli.command_runner import STEP, Runner
from tests.cli.command_steps import BUDGET

CPU = ("--target", "cpu")
QUICK = ("--rounds", "1", "--steps", "1")


def test_the_fastest_plan_is_printed_and_written(run: Runner, tmp_path: Path) -> None:
    ran = run("tune", STEP, *CPU, "--budget", BUDGET, "-o", tmp_path / "plan.json", *QUICK)
    assert ran.code == 0 and "plan for CPU" in ran.out
    plan = load(tmp_path / "plan.json")
    assert plan.status == "optimal" and plan.checkpoint
    assert run("verify", tmp_path / "plan.json", STEP, "--steps", "1").code == 0
    ran = run("tune", STEP, *CPU, "--budget", BUDGET, "--json", *QUICK)
    document = json.loads(ran.out)
    assert ran.code == 0 and document["plan"]["fingerprint"] == plan.fingerprint
    assert {each["label"] for each in document["tried"]} >= {"as decided"}


def test_exit_code_3_where_nothing_fits(run: Runner) -> None:
    ran = run("tune", STEP, *CPU, "--budget", "1KiB", *QUICK)
    assert ran.code == 3 and "does not fit" in ran.out


def test_a_model_that_does_not_fit_is_not_built(run: Runner) -> None:
    """32 GiB of parameters, which would end the process."""
    ran = run("tune", "llama3-8b", *CPU, "--budget", "8GiB", "--batch", "1", "--seq", "16", *QUICK)
    assert ran.code == 3 and "does not fit" in ran.out


def test_several_ranks_ask_for_torchrun(run: Runner) -> None:
    ran = run("tune", STEP, *CPU, "--ranks", "2")
    assert ran.code == 2 and "torchrun --nproc-per-node 2 -m memfit tune" in ran.err


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--rounds", "0"), 2, "--rounds is 0"),
        (("--steps", "0"), 2, "--steps is 0"),
        (("--mesh", "dp=2"), 2, "--mesh: the step shards its model by itself"),
        (("--decide", "everything"), 2, "--decide"),
    ],
)
def test_wrong_usage(options: tuple[str, ...], code: int, says: str, run: Runner) -> None:
    ran = run("tune", STEP, *CPU, *options)
    assert ran.code == code and says in ran.said


def test_what_cannot_be_run_is_said(files: Path, run: Runner) -> None:
    ran = run("tune", files / "step.memfit", *CPU)
    assert ran.code == 2 and "is a trace, which cannot be run" in ran.said
    ran = run("tune", STEP, "--target", "h100-sxm")
    assert ran.code == 1 and "no GPU that torch can use" in ran.said
