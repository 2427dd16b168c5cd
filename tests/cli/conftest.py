"""Lets the tests of this folder import their helpers, and gives them a plan and a trace in files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import command_steps

import memfit
from memfit.cli import main

STEP = "command_steps:step"


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan, another one, and the trace that they are for."""
    folder = tmp_path_factory.mktemp("files")
    trace = memfit.trace(command_steps.step(), target="cpu")
    memfit.save_trace(trace, folder / "step.memfit")
    for name, budget in (("plan.json", command_steps.BUDGET), ("roomy.json", "1GiB")):
        memfit.plan(trace, budget=budget).save(folder / name)
    return folder


class Ran:
    """A command that was run in this process: its exit code and what it printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.said = " ".join(err.split())


class Runner:
    """Runs commands, also those that end the program."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Ran:
        self._capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_code:
            code = int(exit_code.code or 0)
        shown = self._capsys.readouterr()
        return Ran(code, shown.out, shown.err)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("COLUMNS", "100")
    return Runner(capsys)
