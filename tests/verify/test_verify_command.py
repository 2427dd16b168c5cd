"""`memfit verify plan.json train.py:step`: where the step comes from, what is printed, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from verified_steps import planned, step_of

from memfit.cli import main

TRAIN = """
from verified_steps import step_of

def step():
    return step_of()

def nothing():
    return None

number = 3
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    torch.manual_seed(0)
    plan, train = tmp_path / "plan.json", tmp_path / "train_verified.py"
    planned(step_of()).save(plan)
    train.write_text(TRAIN)
    return str(plan), str(train)


def test_a_plan_that_holds(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    plan, train = files
    options = ["--steps", "1", "--time-tolerance", "None"]
    assert main(["verify", plan, f"{train}:step", *options]) == 0
    shown = capsys.readouterr().out
    assert "the plan holds" in shown and "peak with the plan" in shown
    assert main(["verify", plan, "verified_steps:step_of", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_plan_that_does_not_hold_is_exit_code_1(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    plan, train = files
    text = json.loads(Path(plan).read_text())
    text["predicted"]["step_ms"] = 1e9
    Path(plan).write_text(json.dumps(text))
    assert main(["verify", plan, f"{train}:step", "--steps", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("{train}:stp", "did you mean 'step'?"),
        ("{train}:nothing", "returned a NoneType"),
        ("{train}:number", "returned a int"),
        ("{train}", "names no function"),
        ("missing_file.py:step", "there is no file missing_file.py"),
        ("missing_package.train:step", "there is no module 'missing_package'"),
    ],
)
def test_what_names_no_step_is_said(
    place: str, says: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, train = files
    assert main(["verify", plan, place.format(train=train)]) == 1
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_plan_that_is_not_there(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "missing.json", f"{files[1]}:step"]) == 1
    assert "there is no file missing.json" in capsys.readouterr().err


def test_wrong_usage() -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["verify"])
    assert exit_code.value.code == 2
