"""The command line is frozen: what scripts rely on changes on purpose or not at all."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import sys
from pathlib import Path

import pytest

import memfit.cli
from memfit.cli.command import COMMANDS, command_class, parse_command
from memfit.plans import Plan
from memfit.solve import Limits, SolveOptions
from memfit.verify.verification import MEMORY_TOLERANCE, TIME_TOLERANCE
from tests.cli import surface
from tests.cli.command_runner import Runner


def test_commands_options_and_defaults_are_frozen() -> None:
    assert surface.text() == surface.FILE.read_text(), "on purpose? then run python tests/cli/surface.py"


def test_every_command_prints_json() -> None:
    assert [name for name, options in surface.surface().items() if "--json" not in options] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_explained_with_an_example(name: str) -> None:
    text = inspect.getdoc(command_class(name)) or ""
    assert f"  memfit {name}" in text.partition("examples:")[2]


def test_defaults_that_the_help_names_are_those_of_the_library(run: Runner) -> None:
    options = surface.surface()
    verify = {name: option["default"] for name, option in options["verify"].items()}
    assert verify["--memory-tolerance"] == MEMORY_TOLERANCE
    assert f"beyond {TIME_TOLERANCE}" in run("verify", "--help").out
    assert verify["--steps"] == inspect.signature(Plan.verify).parameters["steps"].default
    assert Limits().time_limit_s == 60.0 == SolveOptions().limits.time_limit_s


def test_nothing_heavy_is_imported_before_a_command_runs() -> None:
    """`memfit --help` is quick because files of the command import torch and other rooms inside functions only."""
    light = {*sys.stdlib_module_names, "tyro", "rich", "memfit.cli", "memfit.errors", "memfit.units", "memfit._version"}
    light |= {"memfit.processes", "memfit.progress", "memfit.text", "memfit.torch_private.deferred_imports"}
    for path in Path(memfit.cli.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert any(name == each or name.startswith(f"{each}.") for each in light), f"{path.name} imports {name}"


def test_every_command_that_help_and_docs_show_can_be_written_so() -> None:
    docs = Path(__file__).parents[2] / "docs" / "cli.md"
    shown = re.findall(r"^ +\$ memfit (.+)$", docs.read_text(), flags=re.MULTILINE)
    for name in COMMANDS:
        examples = (inspect.getdoc(command_class(name)) or "").partition("examples:")[2]
        shown += re.findall(r"^ +memfit (.+)$", examples, flags=re.MULTILINE)
    assert {line.split()[0] for line in shown} == set(COMMANDS)
    for line in shown:
        name, *arguments = shlex.split(line)
        assert isinstance(parse_command(name, arguments), command_class(name)), line
