"""`memfit plan`: what it prints, what it writes, what it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

import memfit
from memfit.plans import Plan
from tests.cli.command_runner import STEP, Runner
from tests.cli.command_steps import BUDGET

HERE = Path(__file__).parent
CPU = ("--target", "cpu")


def planned(run: Runner, *arguments: object) -> Plan:
    """The plan that a command prints as JSON, and nothing else."""
    ran = run("plan", *arguments, "--json")
    assert ran.code == 0, ran.err
    return Plan.from_json(ran.out)


def test_the_plan_is_printed_with_levers_and_written(run: Runner, tmp_path: Path) -> None:
    ran = run("plan", STEP, *CPU, "--budget", BUDGET, "-o", tmp_path / "plan.json")
    assert ran.code == 0
    assert "1 rank, budget 1000.00 KiB: optimal" in ran.out and "checkpointed:" in ran.out
    assert "what would lower this peak further" in ran.out and "micro-batch" in ran.out
    assert "wrote" in ran.said and "wrote" not in ran.out
    assert memfit.load(tmp_path / "plan.json").checkpoint


def test_json_is_the_document_that_is_written(run: Runner, tmp_path: Path) -> None:
    ran = run("plan", STEP, *CPU, "--budget", BUDGET, "--json", "-o", tmp_path / "plan.json")
    assert ran.out == (tmp_path / "plan.json").read_text()


def test_nothing_fits_is_exit_code_3_and_still_a_document(run: Runner, tmp_path: Path) -> None:
    ran = run("plan", STEP, *CPU, "--budget", "300KiB", "-o", tmp_path / "plan.json")
    assert ran.code == 3 and "infeasible" in ran.out and "the smallest that works is" in ran.out
    assert memfit.load(tmp_path / "plan.json").status == "infeasible"
    assert run("plan", STEP, *CPU, "--budget", "300KiB", "--json").code == 3


def test_a_function_of_a_module_or_file_and_a_trace_give_the_same_plan(run: Runner, files: Path) -> None:
    by_module = planned(run, STEP, *CPU, "--budget", BUDGET)
    assert planned(run, f"{HERE / 'command_steps.py'}:step", *CPU, "--budget", BUDGET) == by_module
    assert planned(run, files / "step.memfit", "--budget", BUDGET) == by_module


def test_batch_is_passed_to_the_function(run: Runner) -> None:
    assert planned(run, STEP, *CPU, "--batch", "64").trace.inputs[0].shape == (64, 32)


def test_without_a_target_the_gpu_that_is_there_is_meant(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert planned(run, STEP).target.device == "h100-sxm"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Voodoo 2")
    ran = run("plan", STEP)
    assert ran.code == 2 and "the GPU here is 'Voodoo 2', of which memfit has no figures; name one" in ran.said


def test_without_a_budget_all_that_is_usable_is_meant(run: Runner) -> None:
    usable = memfit.hardware.load_device("h100-sxm").usable_bytes
    assert planned(run, STEP, "--target", "h100-sxm").budget_bytes == usable


def test_units_are_forced_forbidden_and_allowed(run: Runner) -> None:
    def checkpointed(*arguments: str) -> set[str]:
        return {entry.unit for entry in planned(run, STEP, *CPU, *arguments).checkpoint}

    assert checkpointed() == set()
    assert checkpointed("--force", "layers.*") == {"layers.0", "layers.1", "layers.2"}
    assert checkpointed("--force", "layers.0", "--force", "layers.2") == {"layers.0", "layers.2"}
    assert "layers.1" not in checkpointed("--forbid", "layers.1", "--budget", "1200KiB")
    assert checkpointed("--units", "layers.1", "--budget", "1250KiB") == {"layers.1"}


def test_sharding_is_as_asked(run: Runner) -> None:
    options = ("--ranks", "4", "--shard-units", "layers.*", "--param-dtype", "bfloat16", "--reduce-dtype", "float32")
    plan = planned(run, STEP, "--target", "h100-sxm", *options, "--shard-dtype", "float32")
    assert plan.shard is not None and plan.ranks == plan.shard.ranks == 4
    assert {unit.module for unit in plan.shard.units} == {"", "layers.0", "layers.1", "layers.2"}
    dtypes = (plan.shard.param_dtype, plan.shard.reduce_dtype, plan.shard.shard_dtype)
    assert dtypes == ("bfloat16", "float32", "float32")
    plan = planned(run, STEP, "--target", "h100-sxm", "--ranks", "4", "--replicas", "2", "--engine", "sharded")
    assert plan.shard is not None and (plan.ranks, plan.shard.ranks, plan.shard.replicas) == (4, 2, 2)
    ran = run("plan", STEP, "--target", "h100-sxm", "--ranks", "4", "--replicas", "3")
    assert ran.code == 2 and "4 ranks do not divide into 3 replicas that are sharded" in ran.said


def test_the_optimizer_may_be_a_lever(run: Runner, files: Path) -> None:
    assert planned(run, STEP, *CPU, "--optimizer-lever", "--budget", BUDGET).status == "optimal"
    ran = run("plan", files / "step.memfit", "--optimizer-lever")
    assert ran.code == 2 and "--optimizer-lever captures the step in other ways; give the step" in ran.said


def test_a_trace_is_of_one_batch_and_device(run: Runner, files: Path) -> None:
    ran = run("plan", files / "step.memfit", "--batch", "4")
    assert ran.code == 2 and "--batch: " in ran.said and "is a trace, of one batch" in ran.said
    ran = run("plan", files / "step.memfit", "--target", "h100-sxm")
    assert ran.code == 2 and "--target: the trace was captured for cpu" in ran.said
    ran = run("plan", "missing.memfit")
    assert ran.code == 2 and "there is no trace missing.memfit" in ran.said


@pytest.mark.parametrize(
    ("step", "code", "says"),
    [
        ("gpt3", 2, "STEP: there is no shape 'gpt3'; did you mean gpt2"),
        ("tests.cli.command_steps:stp", 2, "did you mean 'step'?"),
        ("missing_file.py:step", 2, "STEP: there is no file missing_file.py"),
        ("{files}/plan.json", 2, "is a file of JSON; for a configuration of transformers write hf:"),
        ("hf:missing.json", 2, "missing.json"),
    ],
)
def test_what_names_no_step_is_said(step: str, code: int, says: str, run: Runner, files: Path) -> None:
    ran = run("plan", step.format(files=files), *CPU)
    assert ran.code == code and says in ran.said and not ran.out


def test_every_file_is_written(run: Runner, tmp_path: Path) -> None:
    names = {"html": "page.html", "perfetto": "step.json", "snapshot": "step.pickle", "markdown": "plan.md"}
    options = [part for option, name in names.items() for part in (f"--{option}", tmp_path / name)]
    ran = run("plan", STEP, *CPU, "--budget", BUDGET, *options, "--curve", "--no-levers")
    assert ran.code == 0 and ran.said.count("wrote ") == 4
    assert {path.name for path in tmp_path.iterdir()} == set(names.values())
    assert all(path.stat().st_size > 500 for path in tmp_path.iterdir())
    assert "<html" in (tmp_path / "page.html").read_text()[:200]


def test_files_of_an_infeasible_plan_are_written(run: Runner, tmp_path: Path) -> None:
    arguments = ("--budget", "300KiB", "--markdown", tmp_path / "plan.md", "--html", tmp_path / "page.html")
    ran = run("plan", STEP, *CPU, *arguments, "--no-levers")
    assert ran.code == 3 and len(list(tmp_path.iterdir())) == 2


def test_a_built_in_shape_on_eight_gpus_needs_nothing_else(run: Runner) -> None:
    ran = run("plan", "gpt2", "--target", "h100-sxm", "--ranks", "8", "--batch", "2", "--seq", "128", "--no-levers")
    assert ran.code == 0 and "8 ranks" in ran.out and "sharded by 8" in ran.out
    assert "GPT-2 small" in ran.said and "GPT-2 small" not in ran.out
