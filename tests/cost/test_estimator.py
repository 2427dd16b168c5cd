"""`RuntimeEstimator`: times and orders of modules from a trace, under the prototype's names."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from memfit import Step
from memfit.capture import Phase, Trace, trace
from memfit.compat import RuntimeEstimator
from memfit.cost import Runtime
from memfit.errors import InputError, MissingFeatureError, StateError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.block(x)))


class OneEach:
    """A cost model under which every op takes a millisecond."""

    def op_ms(self, trace: Trace) -> np.ndarray:
        return np.ones(len(trace.ops))


def step() -> Step:
    return Step(Model(), torch.randn(2, 8), loss=lambda out, _: out.sum())


@pytest.fixture(scope="module")
def captured() -> Trace:
    return trace(step(), target="cpu")


def test_orders_list_every_call(captured: Trace) -> None:
    estimator = RuntimeEstimator.of(captured, OneEach())
    block = ["block", "block.up", "block.down"]
    assert estimator.mod_fw_pre_order == ["", *block, *block, "head"]
    assert estimator.mod_fw_post_order == [*block[1:], "block", *block[1:], "block", "head", ""]
    backward = ["block", "block.down", "block.up"]
    assert estimator.mod_bw_pre_order == ["", "head", *backward, *backward]
    assert estimator.mod_bw_post_order == ["head", *backward[1:], "block", *backward[1:], "block", ""]
    for order in ("fw_pre_order", "fw_post_order", "bw_pre_order", "bw_post_order"):
        assert getattr(estimator, order) == getattr(estimator, f"mod_{order}")


def test_modules_have_the_time_of_their_ops_in_forward_and_backward(captured: Trace) -> None:
    estimator = RuntimeEstimator.of(captured, OneEach())
    for path, times in estimator.mod_runtimes.items():
        calls = [
            number
            for number in range(len(captured.calls))
            if any(captured.calls[outer].module == path for outer in captured.ancestors(number))
        ]
        inside = [op.phase for op in captured.ops if op.call in calls]
        assert times == {
            "fw": float(sum(phase in (Phase.FORWARD, Phase.LOSS) for phase in inside)),
            "bw": float(sum(phase is Phase.BACKWARD for phase in inside)),
        }, path
    assert estimator.total_runtime == len(captured.ops)
    assert set(estimator.mod_runtimes) == {"", "block", "block.up", "block.down", "head"}


def test_times_already_known_are_taken_as_they_are(captured: Trace) -> None:
    runtime = Runtime(captured, np.full(len(captured.ops), 0.5))
    estimator = RuntimeEstimator.of(runtime)
    assert estimator.runtime is runtime
    assert estimator.total_runtime == 0.5 * len(captured.ops)
    with pytest.raises(InputError, match="give a cost model too"):
        RuntimeEstimator.of(captured)
    with pytest.raises(InputError, match="times already"):
        RuntimeEstimator.of(runtime, OneEach())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_modules_are_displayed_down_to_a_depth(captured: Trace, depth: int) -> None:
    output = io.StringIO()
    estimator = RuntimeEstimator.of(captured, OneEach())
    estimator.display_modulewise_stats(depth, console=Console(file=output, width=200))
    lines = output.getvalue().splitlines()
    assert lines[:2] == ["Pre-Forward Execution Order:", "Model"]
    times = estimator.mod_runtimes
    assert f"Model fw: {times['']['fw']:.3f}ms bw: {times['']['bw']:.3f}ms" in lines
    assert (f"Model.head fw: {times['head']['fw']:.3f}ms bw: {times['head']['bw']:.3f}ms" in lines) == (depth >= 2)
    assert ("Model.block.up" in lines) == (depth == 3)


def test_misuse_says_what_to_do() -> None:
    estimator = RuntimeEstimator()
    with pytest.raises(StateError, match=r"RuntimeEstimator\(\).run"), estimator:
        pass
    with pytest.raises(StateError, match="captured nothing"):
        estimator.display_modulewise_stats()
    with pytest.raises(MissingFeatureError, match="'operator-level-cost-model', 'operator-level-benchmark'"):
        estimator("guess")
    assert estimator("operator-level-benchmark") is estimator
    with pytest.raises(InputError, match="needs arguments"):
        estimator.run(lambda model: model)  # type: ignore[arg-type,misc]


def test_a_step_is_captured_and_timed_on_entry() -> None:
    with RuntimeEstimator(step(), target="h100-sxm")("operator-level-cost-model") as estimator:
        assert estimator.total_runtime > 0.0
        assert estimator.runtime.trace.device_type == "cuda"
        assert estimator.mod_runtimes[""]["bw"] > estimator.mod_runtimes["head"]["bw"] > 0.0


def test_a_function_is_its_step() -> None:
    model, x = Model(), torch.randn(2, 8)

    def run() -> None:
        model(x).sum().backward()

    assert RuntimeEstimator().run(run).mod_fw_pre_order[0] == ""
