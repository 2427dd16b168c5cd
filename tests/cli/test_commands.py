"""Every other command: its plain output, its JSON, and what it refuses."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

import memfit
from memfit.presets import list_shapes
from tests.cli.command_runner import STEP, Runner, document
from tests.cli.command_steps import BUDGET

CPU = ("--target", "cpu")


def test_explain_a_step(run: Runner) -> None:
    ran = run("explain", STEP, *CPU, "--budget", BUDGET)
    assert ran.code == 0 and "what fills the peak" in ran.out and "layers.0-2" in ran.out
    found = document(run, "explain", STEP, *CPU, "--budget", BUDGET, "--no-levers")
    assert found["fits"] is False and found["levers"] == []
    assert sum(found["by_category"].values()) == found["peak_bytes"]


def test_explain_a_plan_with_and_without_its_step(run: Runner, files: Path) -> None:
    found = document(run, "explain", STEP, "--plan", files / "plan.json", "--no-levers")
    assert found["planned"] and found["checkpointing"]["units"]
    alone = document(run, "explain", files / "plan.json")
    assert alone["peak_bytes"] == found["peak_bytes"] and not alone["by_module"]
    assert "peak" in run("explain", files / "plan.json").out


def test_explain_a_trace(run: Runner, files: Path) -> None:
    assert document(run, "explain", files / "step.memfit", "--no-levers")["device"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["{files}/plan.json", "--target", "cpu"], 2, "plan.json has its own target; leave --target out"),
        ([STEP, "--plan", "{files}/plan.json", "--ranks", "2"], 2, "has its own number of ranks; leave --ranks out"),
        (["{files}/plan.json", "--plan", "{files}/plan.json"], 2, "--plan: STEP is a plan already"),
        (["missing.json"], 2, "STEP: there is no file missing.json"),
        ([STEP, "--plan", "missing.json"], 2, "--plan: there is no file missing.json"),
        ([STEP, "--batch", "8", "--plan", "{files}/plan.json"], 1, "another step"),
    ],
)
def test_explain_refuses(arguments: list[str], code: int, says: str, run: Runner, files: Path) -> None:
    ran = run("explain", *(each.format(files=files) for each in arguments))
    assert ran.code == code and says in ran.said and not ran.out


def test_curve(run: Runner) -> None:
    ran = run("curve", STEP, *CPU, "--points", "3", "--budget", BUDGET)
    assert ran.code == 0 and "the smallest budget that works" in ran.out
    assert "at 1000.00 KiB, each further MiB saves" in ran.out
    found = document(run, "curve", STEP, *CPU, "--points", "3")
    assert len(found["points"]) == 3 and found["price"] is None
    assert found["points"][-1]["budget_bytes"] == found["baseline_bytes"]


def test_a_curve_is_shown_also_where_nothing_fits_the_budget(run: Runner) -> None:
    asked = ("curve", STEP, *CPU, "--points", "2", "--budget", "300KiB")
    ran = run(*asked)
    assert ran.code == 3 and "the smallest budget that works" in ran.out
    assert "no plan fits 300.00 KiB; the smallest budget that works is" in " ".join(ran.out.split())
    ran = run(*asked, "--json")
    assert ran.code == 3 and json.loads(ran.out)["price"] is None and len(json.loads(ran.out)["points"]) == 2


def test_curve_refuses(run: Runner) -> None:
    ran = run("curve", STEP, *CPU, "--points", "1")
    assert ran.code == 2 and "--points: 1 points make no curve; give 2 or more" in ran.said


def test_search_for_a_batch(run: Runner) -> None:
    ran = run("search", STEP, *CPU, "--budget", "2MiB", "--values", "64,256,1024")
    assert ran.code == 0 and "256 is best" in ran.out
    found = document(run, "search", STEP, *CPU, "--budget", "2MiB", "--values", "64,256,1024")
    assert found["over"] == "batch" and found["largest"] == 256
    forced = ("--force", "layers.*", "--values", "64")
    assert document(run, "search", STEP, *CPU, *forced)["points"][0]["recompute_ms"] > 0


def test_search_tells_of_every_value_as_it_is_tried(run: Runner) -> None:
    ran = run("search", STEP, *CPU, "--budget", "2MiB", "--values", "64,256,1024", "--json")
    lines = ran.err.splitlines()
    assert lines[0].startswith("searching for the best batch size of tests.cli.command_steps:step")
    told = [line for line in lines if line.startswith("batch ")]
    assert [line.partition(":")[0] for line in told] == ["batch 64", "batch 256", "batch 1024"]
    assert "samples/s" in told[0] and "e+" not in told[0] and "no plan fits, which needs" in told[2]
    assert json.loads(ran.out)["complete"] is True


def test_a_search_that_ended_at_its_limit_names_the_option(run: Runner) -> None:
    ran = run("search", STEP, *CPU, "--budget", "90%", "--largest", "2")
    assert ran.code == 0 and "--largest" in ran.out


def test_an_interrupted_search_shows_what_it_has(run: Runner) -> None:
    ran = run("search", "tests.cli.command_steps:interrupted", *CPU, "--budget", "2MiB", "--values", "64,128,256")
    assert ran.code == 130 and "interrupted, up to here 128 is best" in " ".join(ran.out.split())
    nothing = run("search", "tests.cli.command_steps:interrupted", *CPU, "--values", "256")
    assert nothing.code == 130 and not nothing.out


def test_search_runs_the_users_file_once(run: Runner, tmp_path: Path) -> None:
    train = Path(__file__).with_name("command_steps.py").read_text()
    counted = tmp_path / "counted_train.py"
    counted.write_text(f"{train}\nopen(__file__ + '.runs', 'a').write('once ')\n")
    found = document(run, "search", f"{counted}:step", *CPU, "--values", "64,128,256", "--force", "layers.0")
    assert len(found["points"]) == 3 and (tmp_path / "counted_train.py.runs").read_text() == "once "


def test_search_over_ranks_and_where_nothing_fits(run: Runner) -> None:
    found = document(run, "search", STEP, "--over", "ranks", "--target", "h100-sxm", "--largest", "4")
    assert [point["ranks"] for point in found["points"]] == [1, 2, 4]
    ran = run("search", STEP, *CPU, "--budget", "100KiB", "--values", "64", "--json")
    assert ran.code == 3 and json.loads(ran.out)["fits"] is False


def test_search_over_devices_with_a_price_and_a_page(run: Runner, tmp_path: Path) -> None:
    page = tmp_path / "devices.html"
    asked = ("search", STEP, "--over", "device", "--values", "t4,h100-sxm", "--price", "t4=0.3", "--html", page)
    found = document(run, *asked)
    assert [point["device"] for point in found["points"]] == ["t4", "h100-sxm"] and found["smallest"] == "t4"
    assert found["points"][0]["price"]["usd_per_hour"] == 0.3 and found["points"][1]["price"]["date"]
    assert "h100-sxm" in page.read_text()


def test_a_value_that_is_proven_later_is_not_told_of_as_if_it_were_another(run: Runner, tmp_path: Path) -> None:
    page = tmp_path / "search.html"
    ran = run("search", STEP, *CPU, "--budget", "2MiB", "--largest", "300", "--html", page)
    told = [line.partition(" (")[0] for line in ran.err.splitlines() if line.startswith("batch ")]
    first = [line.partition(":")[0] for line in told if "once more" not in line]
    assert ran.code == 0 and len(first) == len(set(first)) and page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--over", "device"], "--target is what the search finds"),
        (["--price", "t4=1"], "--price is for --over device"),
        (["--batch", "4"], "--batch is what the search finds; leave it out, or write --largest 4"),
        (["--over", "ranks", "--ranks", "4"], "--ranks is what the search finds"),
        (["--values", "1,two"], "--values is '1,two'; write whole numbers"),
        (["--values", "0,1"], "--values is '0,1'; write whole numbers of at least 1"),
        (["--values", "1,2", "--largest", "4"], "--largest: the last of --values is the largest"),
        (["--largest", "0"], "--largest is 0"),
        (["--over", "seq", "--largest", "64"], "--largest is 64; sequences are searched in steps of 128: write more"),
        (["--over", "width"], "invalid choice 'width' for argument '--over'"),
        (["--over", "seq"], "takes no argument of that name; let the function take it: def step(seq="),
    ],
)
def test_search_refuses(arguments: list[str], says: str, run: Runner) -> None:
    ran = run("search", STEP, *CPU, *arguments)
    assert ran.code == 2 and says in ran.said and not ran.out


def test_compare_plans_and_traces(run: Runner, files: Path, tmp_path: Path) -> None:
    ran = run("compare", files / "plan.json", files / "roomy.json")
    assert ran.code == 0 and "1000.00 KiB" in ran.out and "1.00 GiB" in ran.out
    assert isinstance(document(run, "compare", files / "plan.json", files / "roomy.json"), dict)
    assert run("compare", files / "step.memfit", files / "step.memfit").code == 0


@pytest.mark.parametrize(
    ("first", "second", "code", "says"),
    [
        ("plan.json", "step.memfit", 2, "plan.json is a plan and"),
        ("plan.json", "missing.json", 2, "B: there is no file"),
        ("plan.json", "notes.txt", 1, "notes.txt is neither a plan nor a trace; give what `memfit plan -o` or"),
    ],
)
def test_compare_refuses(first: str, second: str, code: int, says: str, run: Runner, files: Path) -> None:
    (files / "notes.txt").write_text("text")
    ran = run("compare", files / first, files / second)
    assert ran.code == code and says in ran.said


def test_report(run: Runner, files: Path, tmp_path: Path) -> None:
    ran = run("report", files / "plan.json", STEP)
    assert ran.code == 0 and "|" in ran.out, "Markdown is printed when no file is named"
    assert isinstance(document(run, "report", files / "plan.json", STEP, "--curve"), dict)
    ran = run("report", files / "plan.json", STEP, "--snapshot", tmp_path / "s.pickle", "--html", tmp_path / "p.html")
    assert ran.code == 0 and not ran.out and ran.said.count("wrote ") == 2
    assert pickle.loads((tmp_path / "s.pickle").read_bytes())["segments"] is not None


def test_report_of_a_verified_plan(run: Runner, files: Path, tmp_path: Path) -> None:
    found = tmp_path / "verification.json"
    plan = files / "plan.json"
    verified = run("verify", plan, STEP, "--steps", "1", "-o", found)
    assert verified.code == 0 and found.is_file()
    assert "measured" in run("report", plan, STEP, "--verified", found).out
    assert "measured" not in run("report", plan, STEP).out
    found.write_text("{}")
    ran = run("report", plan, STEP, "--verified", found)
    assert ran.code == 1 and "is no verification" in ran.said
    ran = run("report", plan, STEP, "--verified", tmp_path / "missing.json")
    assert ran.code == 2 and "--verified: there is no file" in ran.said


def test_report_refuses_another_step(run: Runner, files: Path) -> None:
    ran = run("report", files / "plan.json", STEP, "--batch", "8")
    assert ran.code == 1 and "another step" in ran.said
    assert run("report", "missing.json", STEP).code == 2


def test_shapes(run: Runner) -> None:
    ran = run("shapes")
    assert ran.code == 0 and "llama3-8b" in ran.out and "8.03 billion" in ran.out
    assert [each["name"] for each in document(run, "shapes")] == [shape.name for shape in list_shapes()]


def test_narrow_terminals_get_fewer_columns_and_whole_words(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shapes = run("shapes").out
    row = next(line.split("│") for line in shapes.splitlines() if line.startswith("llama3-8b "))
    assert [cell.strip() for cell in row[1:3]] == ["8.03 billion", "8192"] and "sizes from" not in shapes
    assert "usable" not in run("devices").out


def test_a_shape_has_no_lines_of_the_users(run: Runner) -> None:
    found = document(run, "explain", "gpt2", "--target", "h100-sxm", "--no-levers")
    assert found["at"]["source"] == "" and found["by_line"] == []


def test_devices(run: Runner) -> None:
    ran = run("devices")
    assert ran.code == 0 and "h100-sxm" in ran.out and "NVIDIA, 2023" in ran.out
    assert all(len(line) <= 100 for line in ran.out.splitlines())
    names = [device.name for device in memfit.hardware.list_devices()]
    assert [each["name"] for each in document(run, "devices")] == names


def test_one_device_with_its_sources(run: Runner) -> None:
    ran = run("devices", "h100")
    assert "NVIDIA H100 SXM5 80GB, --target h100-sxm" in ran.out and "3,350 GB/s" in ran.out
    assert "data sheet" in ran.out and "about, " in ran.out
    found = document(run, "devices", "h100-sxm")
    assert found["usable_bytes"] == memfit.hardware.load_device("h100-sxm").usable_bytes and found["provenance"]


def test_an_unknown_device(run: Runner) -> None:
    ran = run("devices", "h100-smx")
    assert ran.code == 2 and "did you mean h100-sxm" in ran.said


def test_env_has_what_a_bug_report_needs_and_no_path(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = document(run, "env")
    assert found["memfit"] == memfit.__version__ and found["torch"]["version"] and found["cores"]
    assert found["settings"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for text in (json.dumps(found), run("env").out):
        assert str(Path.home()) not in text and os.getcwd() not in text and os.uname().nodename not in text


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--device", "h100-smx"], 2, "--device: unknown device"),
        (["--threads", "0"], 2, "--threads is 0"),
        (["--output", "nowhere/d.toml"], 1, "--output: there is no folder"),
    ],
)
def test_calibrate_refuses(arguments: list[str], code: int, says: str, run: Runner) -> None:
    ran = run("calibrate", *arguments)
    assert ran.code == code and says in ran.said
