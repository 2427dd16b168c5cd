"""The standard output has results and nothing else, whatever the user's own code prints, when and how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_runner import Runner

NOISY = """
import atexit, ctypes, os, subprocess, sys, torch, memfit

def say(what):
    print(f"{what} by print")
    sys.stdout.write(f"{what} by sys.stdout\\n")
    sys.__stdout__.write(f"{what} by the first stdout\\n")
    os.write(1, f"{what} by number\\n".encode())

say("import")
ctypes.CDLL(None).puts(b"import by C")
subprocess.run([sys.executable, "-S", "-c", "print('import by a child')"])

class Model(torch.nn.Linear):
    def forward(self, x):
        say("forward")
        return super().forward(x).relu().sum()

def step(batch=4):
    say("step")
    torch.manual_seed(0)
    return memfit.Step(Model(8, 8), torch.ones(batch, 8))
"""
WAYS = ("print", "sys.stdout", "the first stdout", "number")


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    path = tmp_path / "noisy_train.py"
    path.write_text(NOISY)
    return path


def program(*arguments: object, out: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "memfit", *map(str, arguments)]
    return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment, timeout=120)


def test_the_program_prints_its_document_and_all_else_goes_to_the_error_output(noisy: Path) -> None:
    noisy.write_text(f"{NOISY}\natexit.register(say, 'exit')\n")
    ran = program("plan", f"{noisy}:step", "--target", "cpu", "--json")
    assert ran.returncode == 0 and json.loads(ran.stdout)["status"] == "optimal"
    for when in ("import", "step", "forward", "exit"):
        assert all(f"{when} by {way}" in ran.stderr for way in WAYS), when
    assert "import by C" in ran.stderr and "import by a child" in ran.stderr


def test_every_command_that_runs_a_step_does_so(noisy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    step, cpu, plan = f"{noisy}:step", ("--target", "cpu"), noisy.with_name("plan.json")
    commands = [
        ("plan", step, *cpu, "-o", plan),
        ("explain", step, *cpu),
        ("curve", step, *cpu, "--points", "2"),
        ("search", step, *cpu, "--values", "2,4"),
        ("compare", plan, plan),
        ("verify", plan, step, "--steps", "1"),
        ("report", plan, step),
    ]
    quiet = Runner(capfd)
    for command in commands:
        ran = quiet(*command, "--json")
        assert ran.code == 0 and isinstance(json.loads(ran.out), dict), command
        assert command[0] == "compare" or all(f"step by {way}" in ran.err for way in WAYS), command
    tables = quiet(*commands[0]).out
    assert "fits: peak" in tables and not any(f" by {way}" in tables for way in WAYS)


def test_the_streams_are_as_before_when_a_command_has_run(noisy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stdout = sys.stdout
    assert Runner(capfd)("plan", f"{noisy}:step", "--target", "nothing").code == 2
    assert sys.stdout is stdout
    os.write(1, b"by number\n")
    print("by print")
    assert capfd.readouterr().out.split() == ["by", "number", "by", "print"]


def test_a_standard_output_that_is_full_is_said() -> None:
    with open("/dev/full", "w") as full:
        ran = program("devices", out=full.fileno())
    assert ran.returncode == 1 and "cannot be written to the standard output: No space left" in ran.stderr
    assert "Traceback" not in ran.stderr and "Exception" not in ran.stderr
