"""Exit codes: 2 for what is wrong as it was written, 1 for what goes wrong while it is done, whatever the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command_runner import STEP, Runner

CPU = ("--target", "cpu")
TAKES_A_STEP = ("plan", "explain", "curve", "search")
TAKES_A_PLAN = ("verify", "report")


@pytest.mark.parametrize("name", [*TAKES_A_STEP, *TAKES_A_PLAN])
@pytest.mark.parametrize(
    ("step", "says"),
    [
        (("gpt3",), "STEP: there is no shape 'gpt3'"),
        (("missing_file.py:step",), "STEP: there is no file missing_file.py"),
        (("no_such_package:step",), "STEP: there is no module 'no_such_package'"),
        (("tests.cli.command_steps:stp",), "STEP: there is no 'stp' in tests.cli.command_steps; did you mean 'step'?"),
        (("train.py",), "STEP: 'train.py' names no function"),
        (("hf:missing.json",), "STEP: there is no file missing.json"),
        (("missing.memfit",), "STEP: there is no trace missing.memfit"),
        (("tests.cli.command_steps:needs_seq",), "tests.cli.command_steps:needs_seq needs seq; give --seq"),
        ((STEP, "--seq", "0"), "--seq is 0; write a whole number of at least 1"),
        (("gpt2", "--seq", "2048"), "seq=2048 (--seq) is more than gpt2 has positions for; give at most 1024"),
        (("vit-base", "--seq", "8"), "seq=8 (--seq) makes no sense for vit-base"),
        ((STEP, "--seq", "8"), "seq=8 (--seq) cannot be passed to tests.cli.command_steps:step"),
    ],
)
def test_a_step_that_is_written_wrongly_is_wrong_usage(
    name: str, step: tuple[str, ...], says: str, run: Runner, files: Path
) -> None:
    ran = run(name, files / "plan.json", *step) if name in TAKES_A_PLAN else run(name, *step, *CPU)
    assert ran.code == 2 and says in ran.said and not ran.out


@pytest.mark.parametrize("name", TAKES_A_STEP)
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("--target", "h100-smx"), "--target: unknown device 'h100-smx'"),
        (("--target", "missing.toml"), "--target: "),
        ((*CPU, "--ranks", "0"), "--ranks is 0"),
        ((*CPU, "--budget", "0"), "--budget: "),
        ((*CPU, "--budget", "10x"), "--budget: unknown unit 'x'"),
        ((*CPU, "--budget", "80"), "--budget: '80' has no unit; write 80GiB"),
    ],
)
def test_hardware_that_is_written_wrongly_is_wrong_usage(
    name: str, wrong: tuple[str, ...], says: str, run: Runner
) -> None:
    ran = run(name, STEP, *wrong)
    assert ran.code == 2 and says in ran.said and not ran.out


@pytest.mark.parametrize("name", [*TAKES_A_STEP, *TAKES_A_PLAN])
@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("tests.cli.command_steps:raises", "tests.cli.command_steps:raises raised RuntimeError"),
        ("tests.cli.command_steps:nothing", "returned no memfit.Step"),
        ("tests.cli.command_steps:frozen", "no parameter of the model requires a gradient"),
    ],
)
def test_what_goes_wrong_in_a_step_is_an_error(name: str, step: str, says: str, run: Runner, files: Path) -> None:
    ran = run(name, files / "plan.json", step) if name in TAKES_A_PLAN else run(name, step, *CPU)
    assert ran.code == 1 and says in ran.said and not ran.out and "Traceback" not in ran.err


def test_a_file_that_is_not_what_it_should_be_is_an_error(run: Runner, tmp_path: Path) -> None:
    broken = tmp_path / "plan.json"
    broken.write_text(json.dumps({"schema": 1}))
    for arguments in (("explain", broken), ("compare", broken, broken), ("verify", broken, STEP)):
        ran = run(*arguments)
        assert ran.code == 1 and "plan.json" in ran.said and not ran.out


def test_a_longer_sequence_than_a_search_may_try_is_told_without_an_option_that_was_not_given(run: Runner) -> None:
    ran = run("search", "gpt2", "--over", "seq", "--values", "2048", "--target", "h100-sxm")
    assert ran.code == 2 and "memfit: seq=2048 is more than gpt2 has positions for; give at most 1024" in ran.said
