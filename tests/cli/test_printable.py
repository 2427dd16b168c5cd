"""Names come from whoever wrote the model or the plan: what a terminal would act on is written out."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

import memfit
from memfit.cli.output import escape, make_printable
from tests.cli.command_runner import Runner

STRANGE = "a\nb\x1b[31m\x9b2J\r\u202e"


def strange_step() -> memfit.Step:
    blocks = nn.ModuleDict({STRANGE: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[STRANGE](x).sum()

    return memfit.Step(Model(), memfit.spec((512, 64)))


def test_no_command_prints_control_characters_of_names(run: Runner, tmp_path: Path) -> None:
    trace = memfit.trace(strange_step(), target="cpu")
    memfit.save_trace(trace, tmp_path / "step.memfit")
    memfit.plan(trace, budget="90%").save(tmp_path / "plan.json")
    step, plan = tmp_path / "step.memfit", tmp_path / "plan.json"
    for command in (
        ("plan", step, "--force", "blocks.*"),
        ("explain", step),
        ("explain", plan),
        ("report", plan, step),
        ("plan", step, "--force", "blocks.c\x1b"),
    ):
        ran = run(*command)
        shown = ran.out + ran.err
        assert not any(character in shown for character in "\x1b\x9b\r\u202e"), command
    shown = run("plan", step, "--force", "blocks.*").out
    assert r"blocks.a\nb\x1b[31m\x9b2J" in shown


def test_a_row_of_a_table_stays_a_row() -> None:
    table = Table("module", title="two\nlines")
    table.add_row(STRANGE)
    table.add_row(Text(STRANGE, style="bold"))
    plain = make_printable(Group(table, Text("two\nlines")))
    cells = list(plain.renderables[0].columns[0].cells)
    assert cells[0] == r"a\nb\x1b[31m\x9b2J\r\u202e" and r"a\nb\x1b[31m\x9b2J" in cells[1].plain
    assert plain.renderables[0].title == plain.renderables[1].plain == "two\nlines"


def test_how_a_lever_is_done_is_in_lines_and_names_stay_in_theirs(run: Runner, tmp_path: Path) -> None:
    wide = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    wide.add_module(STRANGE, nn.Linear(64, 256))
    step = memfit.Step(wide, memfit.spec((512, 64)), loss=lambda output, _: output.mean())
    memfit.save_trace(memfit.trace(step, target="cpu"), tmp_path / "step.memfit")
    lines = run("explain", tmp_path / "step.memfit").out.partition("\nhow\n")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if "del output" in line)
    about = [line.rstrip() for line in lines[first : first + 4]]
    assert about[-1] == "  assumes nothing needs it after the loss" and r"1 module: a\nb\x1b[31m" in about[-2], about
    assert all(r"\n" not in line.replace(r"a\nb", "") for line in lines)


def test_what_is_fit_to_print_stays_as_it_is() -> None:
    for text in ("layers.0-31", "été, 層, 🙂", "two\nlines", "a\tb"):
        assert escape(text) == text
