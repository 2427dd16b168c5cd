"""`memfit verify plan.json train.py:step`: where the step comes from, what is printed, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import STEP, Runner

TRAIN = Path(__file__).with_name("command_steps.py")
QUICK = ("--steps", "1", "--time-tolerance", "None")


def test_a_plan_that_holds(files: Path, run: Runner, tmp_path: Path) -> None:
    ran = run("verify", files / "plan.json", f"{TRAIN}:step", *QUICK)
    assert ran.code == 0
    assert "the plan holds" in ran.out and "peak with the plan" in ran.out
    ran = run("verify", files / "plan.json", STEP, "--json", "-o", tmp_path / "found.json", *QUICK)
    assert ran.code == 0 and json.loads(ran.out)["ok"] is True
    assert (tmp_path / "found.json").read_text() == ran.out


def test_a_plan_that_does_not_hold_is_exit_code_1(files: Path, run: Runner, tmp_path: Path) -> None:
    text = json.loads((files / "plan.json").read_text())
    text["predicted"]["step_ms"] = 1e9
    (tmp_path / "slow.json").write_text(json.dumps(text))
    ran = run("verify", tmp_path / "slow.json", STEP, "--steps", "1", "--json")
    assert ran.code == 1 and json.loads(ran.out)["ok"] is False


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (f"{TRAIN}:stp", "did you mean 'step'?"),
        (f"{TRAIN}:nothing", "returned no memfit.Step but something of the type None"),
        (f"{TRAIN}:number", "is neither a function nor a memfit.Step but of the type int"),
        (str(TRAIN), "names no function"),
        ("missing_file.py:step", "there is no file missing_file.py"),
        ("missing_package.train:step", "there is no module 'missing_package'"),
        ("vit-base", "has no values"),
    ],
)
def test_what_names_no_step_that_can_be_run_is_said(place: str, says: str, files: Path, run: Runner) -> None:
    ran = run("verify", files / "plan.json", place)
    assert ran.code == 1 and says in ran.said


def test_a_trace_cannot_be_run(files: Path, run: Runner) -> None:
    ran = run("verify", files / "plan.json", files / "step.memfit")
    assert ran.code == 2 and "is a trace, which cannot be run" in ran.said


def test_a_plan_that_is_not_there(run: Runner) -> None:
    ran = run("verify", "missing.json", STEP)
    assert ran.code == 1 and "there is no file missing.json" in ran.said


def test_wrong_usage(run: Runner, files: Path) -> None:
    assert run("verify").code == 2
    assert run("verify", files / "plan.json", STEP, "--steps", "many").code == 2
