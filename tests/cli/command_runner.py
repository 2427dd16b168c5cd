"""Runs commands in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memfit.cli import main

STEP = "tests.cli.command_steps:step"


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


def document(run: Runner, *arguments: object) -> Any:
    """The JSON that a command prints, and nothing else."""
    ran = run(*arguments, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)
