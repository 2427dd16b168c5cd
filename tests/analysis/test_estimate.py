"""Estimates: the parts add up, and what a model's size alone says is what accelerate says."""

from __future__ import annotations

import json

import pytest

import memfit
from memfit.analysis import estimate
from memfit.cli import main
from memfit.hardware import Target
from memfit.presets import step_at

TARGET = Target.parse("rtx-4090")


def test_states_are_those_of_adam_and_the_rest_grows_with_the_batch() -> None:
    small, large = (
        estimate(memfit.trace(step_at("gpt2", batch=batch, seq=128), target=TARGET), target=TARGET) for batch in (1, 8)
    )
    assert small.parameters == 124_439_808
    assert small.weights_bytes == small.gradients_bytes == pytest.approx(4 * small.parameters, rel=0.001)
    assert small.optimizer_bytes == pytest.approx(2 * small.weights_bytes, rel=0.001)
    assert small.states_bytes == large.states_bytes
    assert large.activation_bytes + large.temporary_bytes > small.activation_bytes + small.temporary_bytes > 0
    for found in (small, large):
        assert found.needed_bytes == found.peak_bytes + found.rounding_bytes + found.outside_bytes
        assert found.needed_bytes > found.states_bytes and found.fits


def test_states_are_what_accelerate_estimates() -> None:
    commands = pytest.importorskip("accelerate.commands.estimate")
    found = estimate(memfit.trace(step_at("gpt2", batch=1, seq=64), target=TARGET), target=TARGET)
    theirs = commands.estimate_training_usage(4 * found.parameters, "float32")
    assert found.states_bytes == pytest.approx(theirs["step"], rel=0.001)


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate", "gpt2", "--target", "rtx-4090", "--batch", "1", "--seq", "64"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "optimizer state" in printed and "fits NVIDIA GeForce RTX 4090" in printed
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 124_439_808


@pytest.mark.parametrize(("option", "value"), [("--ranks", "8"), ("--budget", "8GiB"), ("--mesh", "dp=8")])
def test_what_is_for_plans_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "gpt2", "--target", "rtx-4090", option, value]) == 2
    assert f"{option}: an estimate is" in capsys.readouterr().err
