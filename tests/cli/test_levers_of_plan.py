"""`memfit plan` where nothing fits: its levers are worked out, and say whether they are enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_runner import STEP, Runner

CPU = ("--target", "cpu")


@pytest.mark.parametrize(("budget", "enough"), [("300KiB", False), ("700KiB", True)])
def test_levers_of_a_budget_that_cannot_be_met_say_what_is_missing(run: Runner, budget: str, enough: bool) -> None:
    ran = run("plan", STEP, *CPU, "--budget", budget)
    assert ran.code == 3 and "what would help, on top of the plan that needs least" in ran.out
    assert "micro-batch of" in ran.out and "missing" in ran.out
    assert bool(re.search("│ +enough by itself", ran.out)) == enough
    assert "rank" not in ran.out.partition("what would help, on top")[2] and "host" not in ran.out
    assert "on top of the plan" not in run("plan", STEP, *CPU, "--budget", budget, "--no-levers").out


def test_page_and_markdown_have_the_same_levers_and_explain_too(run: Runner, tmp_path: Path) -> None:
    files = ("-o", tmp_path / "plan.json", "--html", tmp_path / "page.html", "--markdown", tmp_path / "plan.md")
    assert run("plan", STEP, *CPU, "--budget", "700KiB", *files).code == 3
    assert '"name":"micro-batch of' in (tmp_path / "page.html").read_text()
    assert "micro-batch of" in (tmp_path / "plan.md").read_text()
    again = run("report", tmp_path / "plan.json", STEP)
    assert again.code == 0 and "micro-batch of" in again.out and "enough by itself" in again.out
    assert "micro-batch of" in run("explain", STEP, "--plan", tmp_path / "plan.json").out


def test_another_optimizer_step_that_does_not_help_enough_is_still_a_plan_with_levers(run: Runner) -> None:
    ran = run("plan", STEP, *CPU, "--budget", "300KiB", "--optimizer-lever")
    assert ran.code == 3 and "what would help, on top of the plan that needs least" in ran.out
