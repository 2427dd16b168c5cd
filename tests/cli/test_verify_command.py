"""`memfit verify plan.json train.py:step`: where the step comes from, what is printed, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command_runner import STEP, Runner
from tests.cli.command_steps import BUDGET

TRAIN = Path(__file__).with_name("command_steps.py")
QUICK = ("--steps", "1")


def test_a_plan_that_holds(files: Path, run: Runner, tmp_path: Path) -> None:
    ran = run("verify", files / "plan.json", f"{TRAIN}:step", *QUICK)
    assert ran.code == 0
    assert "the plan holds" in ran.out and "peak with the plan" in ran.out
    ran = run("verify", files / "plan.json", STEP, "--json", "-o", tmp_path / "found.json", *QUICK)
    assert ran.code == 0 and json.loads(ran.out)["ok"] is True
    assert (tmp_path / "found.json").read_text() == ran.out


def test_a_plan_for_several_ranks_asks_for_torchrun(run: Runner, tmp_path: Path) -> None:
    run("plan", STEP, "--target", "cpu", "--ranks", "2", "--budget", "1GiB", "-o", tmp_path / "plan.json")
    ran = run("verify", tmp_path / "plan.json", STEP)
    assert ran.code == 2 and "torchrun --nproc-per-node 2 -m memfit verify" in ran.err


def changed(plan: Path, folder: Path, **predicted: float) -> Path:
    """The plan with other predictions."""
    text = json.loads(plan.read_text())
    text["predicted"] |= predicted
    (folder / "changed.json").write_text(json.dumps(text))
    return folder / "changed.json"


def test_a_time_that_is_off_is_a_remark(files: Path, run: Runner, tmp_path: Path) -> None:
    """On a machine that others use too, no plan would hold otherwise."""
    slow = changed(files / "plan.json", tmp_path, step_ms=1e9)
    ran = run("verify", slow, STEP, *QUICK)
    assert ran.code == 0 and "the plan holds, but for its time" in ran.out and "-100% from its prediction" in ran.out
    ran = run("verify", slow, STEP, *QUICK, "--json")
    assert ran.code == 0 and json.loads(ran.out)["ok"] is True and json.loads(ran.out)["findings"] == []


def test_a_time_counts_when_one_asks_for_it(files: Path, run: Runner, tmp_path: Path) -> None:
    slow = changed(files / "plan.json", tmp_path, step_ms=1e9)
    ran = run("verify", slow, STEP, *QUICK, "--time-tolerance", "0.9", "--json")
    assert ran.code == 1 and json.loads(ran.out)["ok"] is False
    assert run("verify", slow, STEP, *QUICK, "--time-tolerance", "1.5").code == 0


def test_other_gradients_are_exit_code_1(run: Runner, tmp_path: Path) -> None:
    step, plan = "tests.cli.command_steps:counting", tmp_path / "plan.json"
    assert run("plan", step, "--target", "cpu", "--budget", BUDGET, "-o", plan, "--no-levers").code == 0
    ran = run("verify", plan, step, *QUICK)
    assert ran.code == 1 and "the plan does not hold" in ran.out and "gradients differ" in ran.out


@pytest.mark.parametrize(
    ("place", "code", "says"),
    [
        (f"{TRAIN}:stp", 2, "did you mean 'step'?"),
        (f"{TRAIN}:nothing", 1, "returned no memfit.Step but something of the type None"),
        (f"{TRAIN}:number", 1, "is neither a function nor a memfit.Step but of the type int"),
        (str(TRAIN), 2, "names no function"),
        ("missing_file.py:step", 2, "there is no file missing_file.py"),
        ("missing_package.train:step", 2, "there is no module 'missing_package'"),
        ("vit-base", 1, "has no values"),
    ],
)
def test_what_names_no_step_that_can_be_run_is_said(place: str, code: int, says: str, files: Path, run: Runner) -> None:
    ran = run("verify", files / "plan.json", place)
    assert ran.code == code and says in ran.said


def test_a_trace_cannot_be_run(files: Path, run: Runner) -> None:
    ran = run("verify", files / "plan.json", files / "step.memfit")
    assert ran.code == 2 and "is a trace, which cannot be run" in ran.said


def test_a_plan_that_is_not_there(run: Runner) -> None:
    ran = run("verify", "missing.json", STEP)
    assert ran.code == 2 and "PLAN: there is no file missing.json" in ran.said


def test_wrong_usage(run: Runner, files: Path) -> None:
    assert run("verify").code == 2
    for wrong in (("--steps", "many"), ("--steps", "0"), ("--memory-tolerance", "-1"), ("--time-tolerance", "nan")):
        ran = run("verify", files / "plan.json", STEP, *wrong)
        assert ran.code == 2 and wrong[0] in ran.said
