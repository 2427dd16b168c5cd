"""Predicted memory stays as near to published figures as docs/evidence.md says, on a slice of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.memory import Room
from tests.evidence import memory_steps, single_gpu
from tests.evidence.memory import root_table, snapshot_table, step_table
from tests.evidence.memory_steps import PublishedMemory
from tests.evidence.pages import write_section
from tests.evidence.single_gpu import SingleGpuRun

_ALLOCATED, _RESERVED = 0.03, 0.05
_STEPS = {run.name: run for run in memory_steps.read_runs()}
_FAST = ("titan-165-fsdp2-ac", "pt-129721-after", "litgpt-lora-stablelm3b-mb1")
_SLOW = ("titan-165-fsdp2-sac", "titan-40f8-a100-fused", "titan-qwen3-32b-bs1", "tune-3b-packed")


def _is_near(run: PublishedMemory) -> bool:
    errors = run.errors()
    assert errors
    return all(abs(error) < (_ALLOCATED if name == "allocated" else _RESERVED) for name, error in errors.items())


@pytest.mark.parametrize("name", _FAST)
def test_published_peaks_are_predicted(name: str) -> None:
    assert _is_near(_STEPS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", _SLOW)
def test_published_peaks_of_larger_steps_are_predicted(name: str) -> None:
    assert _is_near(_STEPS[name])


def test_a_reduction_on_the_reduce_stream_reserves_more() -> None:
    """What PR 129721 measured: it is why the stream of a buffer matters."""
    before, after = _STEPS["pt-129721-before-step1"], _STEPS["pt-129721-after"]
    assert before.predicted.first_step_reserved_bytes > after.predicted.first_step_reserved_bytes
    assert before.predicted.peak_allocated_bytes == after.predicted.peak_allocated_bytes


@pytest.mark.slow
def test_published_run_out_of_memory_is_told_from_one_that_ran() -> None:
    assert _STEPS["titan-perf-8B-op"].room is not Room.TOO_LITTLE
    assert _STEPS["titan-perf-l2-70B-bs2-op-OOM"].room is Room.TOO_LITTLE


def _runs(family: str) -> list[SingleGpuRun]:
    return [run for run in single_gpu.read_runs() if run.family == family]


def test_perceptrons_on_one_gpu_are_predicted() -> None:
    assert all(abs(run.error) < 0.02 for run in _runs("mlp")[:4])


def test_transformers_on_one_gpu_are_predicted() -> None:
    """With the forward that their script runs before it trains; without it the last of these is 13 % too low."""
    runs = [run for run in _runs("transformer") if run.measured_mib is not None]
    for run in (*runs[1:3], runs[-1]):
        assert not run.convolves and abs(run.error) < 0.01


def test_convolutional_run_is_inside_its_range() -> None:
    run = next(run for run in _runs("cnn") if "depth:5_" in run.config)
    assert run.convolves and run.inside()


def test_runs_that_were_out_of_memory_are_told() -> None:
    failed = [run for run in _runs("transformer") if run.measured_mib is None]
    assert failed and all(run.out_of_memory for run in failed)


def test_settings_are_read_from_the_name_of_a_run() -> None:
    given = single_gpu.settings("depth:9_arch:reverse_pyramid_act:leaky_relu_dropout:0.25_dropout:True_batchnorm:False")
    assert given == {
        "depth": "9", "arch": "reverse_pyramid", "act": "leaky_relu", "dropout_rate": "0.25", "dropout": "True",
        "batchnorm": "False",
    }  # fmt: skip


def test_tables_say_what_was_compared() -> None:
    assert snapshot_table()[-1].startswith("12 of 12 are the same, ")
    after = _STEPS["pt-129721-after"]
    assert step_table([after], "reserved")[-1].startswith("2 figures: median 0.0%")
    assert len(root_table([after])) == 2 + 2


def test_a_section_is_written_between_its_own_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_section(page, "one", "first")
    write_section(page, "two", "second")
    write_section(page, "one", "third")
    text = page.read_text()
    assert "first" not in text and text.index("third") < text.index("second")
