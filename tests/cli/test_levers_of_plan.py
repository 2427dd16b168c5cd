"""`memfit plan` where nothing fits: its levers are worked out, and say whether they are enough."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.command_runner import STEP, Runner

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


def test_levers_name_the_options_that_plan_with_them(run: Runner) -> None:
    shown = run("plan", STEP, "--target", "h100-sxm", "--batch", "65536")
    words = " ".join(shown.out.split())
    assert "(--autocast bfloat16)" in words and "(--budget " in words
    explained = run("explain", STEP, "--target", "h100-sxm", "--batch", "65536").out
    assert "with memfit plan: --autocast bfloat16" in explained
    assert "with memfit plan: --batch 32768 --accumulation-steps 2" in explained


def test_options_change_the_step_as_the_levers_say(run: Runner) -> None:
    def peak(*options: str) -> int:
        ran = run("plan", STEP, "--target", "h100-sxm", "--batch", "65536", *options, "--json")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)["baseline"]["peak_bytes"]

    plain = peak()
    assert peak("--autocast", "bfloat16") < plain
    assert peak("--autocast", "float32") == plain
    halves = run("plan", STEP, "--target", "h100-sxm", "--batch", "32768", "--accumulation-steps", "2", "--json")
    assert json.loads(halves.out)["baseline"]["peak_bytes"] < plain
    assert "2 micro-batches a step" in halves.said


def test_a_trace_is_as_it_was_captured(run: Runner, files: Path) -> None:
    ran = run("plan", files / "step.memfit", "--autocast", "bfloat16")
    assert ran.code == 2 and "--autocast: " in ran.said and "is a trace, of one batch" in ran.said
    assert run("plan", STEP, "--target", "cpu", "--accumulation-steps", "0").code == 2
