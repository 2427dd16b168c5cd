"""Lets the tests of this folder import their helpers, and gives them a plan and a trace in files."""

from __future__ import annotations

from pathlib import Path

import pytest

import memfit
from tests.cli import command_steps
from tests.cli.command_runner import Runner


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan, another one, and the trace that they are for."""
    folder = tmp_path_factory.mktemp("files")
    trace = memfit.trace(command_steps.step(), target="cpu")
    memfit.save_trace(trace, folder / "step.memfit")
    for name, budget in (("plan.json", command_steps.BUDGET), ("roomy.json", "1GiB")):
        memfit.plan(trace, budget=budget).save(folder / name)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("COLUMNS", "100")
    return Runner(capsys)
