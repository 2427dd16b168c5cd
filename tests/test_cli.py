"""The `memfit` command: what it refuses, and its exit codes."""

from __future__ import annotations

import pytest

from memfit import __version__
from memfit.cli import main


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["plan", "--help"], r"no command 'plan' yet; in Python: memfit.plan("),
        (["versoin"], "did you mean 'version'?"),
        (["frobnicate", "--help"], "there are calibrate, verify and version"),
    ],
)
def test_a_command_that_does_not_exist_is_wrong_usage(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert hint in shown.err and not shown.out


@pytest.mark.parametrize("arguments", [[], ["version", "--loud"], ["--loud"]])
def test_wrong_usage_of_what_exists(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(arguments)
    assert exit_code.value.code == 2


def test_help_and_version_are_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["--help"])
    assert exit_code.value.code == 0
    assert main(["version"]) == 0
    assert __version__ in capsys.readouterr().out
