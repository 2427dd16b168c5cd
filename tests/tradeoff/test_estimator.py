"""`SACEstimator` under the names that users of PyTorch's prototype know."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from llama import Shape, training_step
from rich.console import Console
from torch import nn

import memfit
from memfit.capture import Trace
from memfit.compat import SACEstimator, sac_stats
from memfit.errors import InputError, StateError
from memfit.tradeoff import find_units

SMALL = Shape(layers=2, hidden=32, heads=4, key_value_heads=2, feed_forward=64, vocabulary=128)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return memfit.trace(training_step(SMALL, length=16), target="h100-sxm")


@pytest.fixture
def estimator(trace: Trace) -> SACEstimator:
    return SACEstimator.of(trace, np.array([(op.read_bytes + op.written_bytes) / 1e9 for op in trace.ops]))


def test_modules_with_children_are_there_by_path(estimator: SACEstimator) -> None:
    assert list(estimator.sac_mod_stats) == [
        "",
        "layers.0",
        "layers.0.attention",
        "layers.0.feed_forward",
        "layers.1",
        "layers.1.attention",
        "layers.1.feed_forward",
    ]
    assert estimator.sac_mod_greedy_order_meta.keys() == estimator.sac_mod_stats.keys()
    assert estimator.sac_mod_tradeoff_stats == {}


def test_statistics_are_those_of_the_unit(estimator: SACEstimator, trace: Trace) -> None:
    unit = next(each for each in find_units(trace) if each.name == "layers.1.feed_forward")
    op_ms = [(op.read_bytes + op.written_bytes) / 1e9 for op in trace.ops]
    assert estimator.sac_mod_stats["layers.1.feed_forward"] == sac_stats(trace, op_ms, unit)
    with pytest.raises(InputError, match="as many times"):
        sac_stats(trace, op_ms[1:], unit)


def test_curves_are_fitted_when_asked_for(estimator: SACEstimator) -> None:
    estimator.pwlf_sac_tradeoff_curve(n_segments=2)
    assert estimator.sac_mod_tradeoff_stats.keys() == estimator.sac_mod_stats.keys()
    layer = estimator.sac_mod_tradeoff_stats["layers.0"]
    assert layer.n_segments == len(layer.slopes) == 2
    assert layer.sac_memory == sum(estimator.sac_mod_stats["layers.0"].memory)


def test_frontiers_are_made_once(estimator: SACEstimator) -> None:
    assert estimator.frontiers is estimator.frontiers
    assert estimator.frontiers["layers.0"] is estimator.frontiers["layers.1"]


def shown(estimator: SACEstimator, **options: object) -> str:
    text = io.StringIO()
    estimator.display_modulewise_sac_stats(console=Console(file=text, width=240), **options)  # type: ignore[arg-type]
    return text.getvalue()


@pytest.mark.parametrize("tabular", [False, True])
def test_display_shows_modules_down_to_a_depth(estimator: SACEstimator, tabular: bool) -> None:
    text = shown(estimator, depth=1, print_tabular=tabular)
    assert "Module: Llama\n" in text and "layers.0" not in text
    text = shown(estimator, depth=3, print_tabular=tabular)
    assert "Module: Llama.layers.1\n" in text and "Module: Llama.layers.1.attention" not in text
    for word in ("_fused_rms_norm", "Saved Autograd", "Always Recomputed", "MSPS"):
        assert word in text


def test_a_step_is_captured_and_timed_when_it_is_entered(trace: Trace) -> None:
    step = training_step(SMALL, length=16)
    with SACEstimator(step, target="h100-sxm")("operator-level-cost-model") as found:
        stats = found.sac_mod_stats["layers.0"]
    assert stats.func_names.count("mm") == 7
    assert all(runtime > 0 for op, runtime in enumerate(stats.runtimes) if stats.func_names[op] == "mm")
    assert found.frontiers["layers.0"].policies[-1].recompute_ms > 0


def test_a_function_of_ones_own_is_captured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()

    found = SACEstimator().run(step)
    assert found.sac_mod_stats[""].func_names == ["t", "addmm", "gelu", "t", "addmm"]


def test_a_with_block_cannot_be_watched() -> None:
    with pytest.raises(StateError, match="run\\(function\\)"), SACEstimator():
        pass
    with pytest.raises(StateError, match="captured nothing"):
        _ = SACEstimator().frontiers


def test_an_unknown_way_of_timing_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="operator-level-cost-model"):
        SACEstimator()("operator-level-guess")
    assert SACEstimator()("operator-level-benchmark") is not None


def test_a_module_that_has_no_backward_has_statistics() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.frozen.requires_grad_(False)
            self.head = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.frozen(x)).sum()

    captured = memfit.trace(memfit.Step(Partly(), torch.ones(2, 4)), target="cpu")
    found = SACEstimator.of(captured, np.ones(len(captured.ops)))
    assert found.sac_mod_stats["frozen"].func_names[-1] == "relu"
    assert "frozen" not in found.frontiers
