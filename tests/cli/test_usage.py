"""What the command refuses and how it says so, its exit codes, and that it is quiet where it should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit import __version__
from memfit.cli.command import COMMANDS
from tests.cli.command_runner import STEP, Runner


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["versoin"], "there is no command 'versoin'; did you mean 'version'?"),
        (["plna", "--help"], "did you mean 'plan'?"),
        (["frobnicate", "--help"], "there are plan, explain, estimate, curve"),
        (["--loud"], "there is no option '--loud'"),
    ],
)
def test_a_command_that_does_not_exist_is_wrong_usage(arguments: list[str], hint: str, run: Runner) -> None:
    ran = run(*arguments)
    assert ran.code == 2 and hint in ran.said and not ran.out


def test_no_command_is_wrong_usage_and_shows_the_help(run: Runner) -> None:
    ran = run()
    assert ran.code == 2 and "usage: memfit COMMAND" in ran.err and not ran.out


def test_help_lists_every_command(run: Runner) -> None:
    for arguments in (["--help"], ["-h"], ["help"]):
        ran = run(*arguments)
        assert ran.code == 0 and not ran.err
        assert all(f"  {name} " in ran.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, run: Runner) -> None:
    ran = run(name, "--help")
    assert ran.code == 0 and not ran.err
    assert ran.out.startswith(f"usage: memfit {name} ") and f"  memfit {name}" in ran.out and "--json" in ran.out
    assert run("help", name).out == ran.out


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_does_not_exist_is_wrong_usage(name: str, run: Runner) -> None:
    needed = dict.fromkeys(("plan", "explain", "estimate", "curve", "search", "tune"), 1)
    needed |= dict.fromkeys(("compare", "verify", "report"), 2)
    ran = run(name, *["x"] * needed.get(name, 0), "--jsno")
    assert ran.code == 2 and not ran.out
    assert "--jsno" in ran.said and "--json" in ran.said


@pytest.mark.parametrize(
    "name", ["plan", "explain", "estimate", "curve", "search", "compare", "verify", "tune", "report"]
)
def test_a_missing_argument_is_wrong_usage(name: str, run: Runner) -> None:
    ran = run(name, "--json")
    assert ran.code == 2 and not ran.out and "issing" in ran.said


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--tp", "8"], "there is no option '--tp': tensor parallelism is not planned. Today parameters"),
        (["--tensor_parallel_size=8"], "tensor parallelism is not planned"),
        (["--pp", "2"], "pipeline parallelism is not planned"),
        (["--cp", "2"], "context parallelism is not planned"),
        (["--ep", "2"], "expert parallelism is not planned"),
        (["--nproc-per-node", "8"], "write --ranks 8, which shards the model over 8 ranks"),
        (["--gpu", "h100"], "there is no option '--gpu'; write --target h100-sxm"),
        (["--batch-size", "8"], "there is no option '--batch-size'; write --batch 8"),
        (["--max-memory", "8GiB"], "write --budget 72GiB"),
        (["--frobnicate"], "there is no option '--frobnicate'; `memfit plan --help` lists those that there are"),
    ],
)
def test_options_of_other_tools_say_what_to_write_and_what_is_not_planned(
    given: list[str], says: str, run: Runner
) -> None:
    ran = run("plan", "gpt2", *given, "--target", "h100-sxm")
    assert ran.code == 2 and says in ran.said and not ran.out and "-o, --output" not in ran.said


def test_the_nearest_option_is_suggested(run: Runner) -> None:
    ran = run("plan", "gpt2", "--tarfet", "h100-sxm")
    assert ran.code == 2 and "Perhaps you meant" in ran.said and "--target" in ran.said


@pytest.mark.parametrize("spelling", [["version"], ["--version"], ["-V"]])
def test_version(spelling: list[str], run: Runner) -> None:
    assert run(*spelling).out == f"{__version__}\n"
    assert json.loads(run(*spelling, "--json").out) == {"memfit": __version__}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell: str, run: Runner) -> None:
    ran = run("--tyro-print-completion", shell)
    assert ran.code == 0
    assert all(name in ran.out for name in COMMANDS) and "--param-dtype" in ran.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "h100-smx"], "--target: unknown device 'h100-smx'; did you mean h100-sxm"),
        (["--target", "cpu", "--budget", "10x"], "--budget: unknown unit 'x'"),
        (["--target", "h100-sxm", "--budget", "900GiB"], "--budget: a budget of '900GiB' does not fit h100-sxm"),
        (["--target", "cpu", "--ranks", "0"], "--ranks is 0; write a whole number of at least 1"),
        (["--target", "cpu", "--batch", "0"], "--batch is 0; write a whole number of at least 1"),
        (["--target", "cpu", "--force", "layers.9"], "--force: no unit is called 'layers.9'; did you mean"),
        (["--target", "cpu", "--forbid", "blocks.*"], "--forbid: nothing fits 'blocks.*'; there are layers.0"),
        (
            ["--target", "cpu", "--force", "zzz"],
            "--force: no unit is called 'zzz'; there are <loss>, layers.0, ",
        ),
        (["--target", "cpu", "--time-limit", "-1"], "--time-limit is -1; write seconds, more than 0"),
        (["--target", "cpu", "--time-limit", "0"], "--time-limit is 0; write seconds, more than 0"),
        (["--time-limit", "soon"], "Error parsing --time-limit: 'soon' is no number; write for example 60"),
        (["--target", "cpu", "--budget", "80", "GB"], "80 GB are two words; write 80GB"),
        (["--target", "cpu", "--parallel", "ddp"], "--parallel ddp is for several ranks, and there is one; add"),
        (["--target", "cpu", "--param-dtype", "bfloat16"], "--param-dtype is for sharded parameters, and one rank has"),
        (["--target", "cpu", "--replicas", "2"], "--replicas is for sharded parameters, and one rank has"),
        (["--target", "cpu", "--ranks", "4", "--replicas", "0"], "--replicas is 0; write a whole number of at least 1"),
        (["--batch", "x"], "Error parsing --batch: 'x' is no whole number; write for example 8"),
        (["--param-dtype", "int7"], "Expected one of ('float64', 'float32', 'bfloat16', 'float16')"),
        (["--target", "cpu", "--force", "layers.0", "--forbid", "layers.0"], "'layers.0' is both forced and forbidden"),
    ],
)
@pytest.mark.parametrize("name", ["plan", "curve"])
def test_a_wrong_value_names_its_option(name: str, arguments: list[str], says: str, run: Runner) -> None:
    ran = run(name, STEP, *arguments)
    assert ran.code == 2 and says in ran.said and not ran.out


@pytest.mark.parametrize(
    ("step", "code", "says"),
    [
        ("raises", 1, "memfit: tests.cli.command_steps:raises raised RuntimeError: the file is empty ("),
        ("number", 1, "tests.cli.command_steps:number is neither a function nor a memfit.Step but of the type int"),
        ("nothing", 1, "tests.cli.command_steps:nothing returned no memfit.Step but something of the type None"),
    ],
)
def test_what_goes_wrong_in_the_users_code_is_told_in_its_lines(step: str, code: int, says: str, run: Runner) -> None:
    ran = run("plan", f"tests.cli.command_steps:{step}", "--target", "cpu")
    assert ran.code == code and says in ran.said and "Traceback" not in ran.err
    lines = [line for line in ran.err.splitlines() if " in " in line]
    assert all("command_steps.py:" in line for line in lines) and len(lines) == (2 if step == "raises" else 0)


@pytest.mark.parametrize("name", ["plan", "explain", "curve", "search"])
def test_without_a_target_or_a_gpu_the_user_is_told_how_to_name_one(
    name: str, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = run(name, STEP)
    assert ran.code == 2 and not ran.out
    assert "--target: there is no GPU here to plan for; name one: --target h100-sxm" in ran.said


@pytest.mark.parametrize(
    ("option", "path", "says"),
    [
        ("--output", "nowhere/plan.json", "--output: there is no folder nowhere"),
        ("--html", ".", "--html: . is a folder"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_work(
    option: str, path: str, says: str, run: Runner
) -> None:
    ran = run("plan", "no-such-step", option, path)
    assert ran.code == 1 and says in ran.said


def test_a_curve_that_nothing_would_show_is_refused(run: Runner) -> None:
    ran = run("plan", STEP, "--curve")
    assert ran.code == 2 and "--curve is for files that show the plan; add --html FILE" in ran.said


def test_two_results_are_not_written_to_one_file(run: Runner, tmp_path: Path) -> None:
    ran = run("plan", STEP, "-o", tmp_path / "a.json", "--perfetto", tmp_path / "a.json")
    assert ran.code == 2 and "write to the same file" in ran.said


def test_ctrl_c_is_no_traceback(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.hardware.list_devices", interrupted)
    ran = run("devices")
    assert ran.code == 130 and ran.said == "memfit: stopped"


def program(*arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", "memfit", *arguments], stdout=pipe, stderr=pipe, env=environment)


def test_it_runs_as_a_module() -> None:
    with program("version", "--json") as process:
        out, err = process.communicate(timeout=120)
    assert json.loads(out) == {"memfit": __version__} and not err and process.returncode == 0


@pytest.mark.parametrize("arguments", [(), ("h100-sxm",), ("--json",), ("h100-sxm", "--json"), ("h100-smx",)])
def test_a_look_at_the_devices_does_not_wait_for_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from memfit.cli import main; code = main(['devices', *sys.argv[1:]])\n"
        "heavy = {'torch', 'numpy', 'highspy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy and code in (0, 2), heavy"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


def test_a_reader_that_leaves_is_no_traceback() -> None:
    with program("devices", "--json") as process:
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate(timeout=120)
    assert not err and process.returncode == 1


@pytest.mark.parametrize("name", ["plan", "explain", "curve", "search"])
def test_what_a_forward_raises_is_told_with_its_module_and_line(name: str, run: Runner) -> None:
    ran = run(name, "tests.cli.command_steps:asserts", "--target", "cpu")
    assert ran.code == 1 and "Traceback" not in ran.err and not ran.out
    assert "memfit: AssertionError: the width must be 7 where: module 0 at" in ran.said
    assert "command_steps.py:" in ran.said and "what to do:" in ran.said and "capture.py" not in ran.err
