"""Kernel calls that are not certified are measured or noted; gradient formulas are those of a run without modes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from memfit.capture import Step, Trace, kernels
from memfit.capture import execution as execution_module
from memfit.capture.kernels import certified_ops, operand_kind
from memfit.memory import Timeline, measured

pytestmark = pytest.mark.usefixtures("frozen_heap")


class Weights(nn.Module):
    """Two parameters that a step computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(24, 40))
        self.b = nn.Parameter(torch.rand(24, 40))


ROWS = torch.arange(40) % 7
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu of an expanded gradient": lambda a, b: F.gelu(a).sum(),
    "gelu of a transposed gradient": lambda a, b: (F.gelu(a).t() @ b).sum(),
    "layer norm of strided operands": lambda a, b: F.layer_norm(a.t(), (24,), b[:, 0], b[:, 1]).square().sum(),
    "formula that adds": lambda a, b: sum(each.square().sum() for each in torch.var_mean(a * b, dim=1)),  # type: ignore[misc]
    "greatest of all": lambda a, b: (a * b).max(),
    "median of all": lambda a, b: (a * b).median(),
    "copysign": lambda a, b: torch.copysign(a, b).sum(),
    "cumulative maximum": lambda a, b: torch.cummax(a * b, 1).values.square().sum(),
    "clamped by tensors": lambda a, b: torch.clamp(a * 2, b * 0, b).square().sum(),
    "index put": lambda a, b: torch.index_put(a * 2, (ROWS[:20],), b[:20]).square().sum(),
    "strided rows": lambda a, b: (a * b).index_select(0, ROWS[::2]).square().sum(),
    "mixed dtypes": lambda a, b: torch.logaddexp(a, b.double()).sum(),
}


def find_step(function: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def run(model: nn.Module, *_: object) -> None:
        function(model.a, model.b).backward()
        model.zero_grad()

    return Step(Weights(), run=run, optimizer=None)


def measured_peak(step: Step) -> int:
    model = step.build_model()
    step.execute(model, None, "cpu")
    with measured() as truth:
        step.execute(model, None, "cpu")
    return truth.peak_bytes


def captured_peak(trace: Trace) -> int:
    timeline = Timeline.of(trace)
    return timeline.peak_bytes - timeline.start_bytes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_peak_is_that_of_a_real_step(name: str) -> None:
    torch.manual_seed(0)
    step = find_step(FUNCTIONS[name])
    trace = memfit.trace(step, target="cpu")
    assert captured_peak(trace) == measured_peak(step)


def test_a_call_too_large_to_be_measured_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_module, "MEASURED_LIMIT_BYTES", 0)
    trace = memfit.trace(find_step(FUNCTIONS["gelu of an expanded gradient"]), target="cpu")
    assert any(note.startswith("aten.gelu_backward.default: too large") for note in trace.notes)


def test_a_decomposition_is_run_for_one_measurement_only() -> None:
    known = set(kernels._PROBED)
    trace = memfit.trace(find_step(lambda a, b: torch.linalg.svdvals(a[:, :23] * b[:, :23]).sum()), target="cpu")
    measurements = [key for key in set(kernels._PROBED) - known if "_linalg_svd" in str(key)]
    assert len(measurements) == 1
    assert any("_linalg_svd" in note and "may depend on values" in note for note in trace.notes)


def test_a_decomposition_that_would_take_long_is_not_run() -> None:
    known = set(kernels._PROBED)
    step = Step(nn.Linear(8, 6000), memfit.spec((6000, 8)), loss=lambda output, _: torch.linalg.svdvals(output).sum())
    trace = memfit.trace(step, target="cpu")
    assert not any("_linalg_svd" in str(key) for key in set(kernels._PROBED) - known)
    assert any("_linalg_svd" in note and "too large to run once here" in note for note in trace.notes)


@pytest.mark.parametrize("value", [0.0, None], ids=["a number", "rows"])
def test_writing_to_the_rows_of_a_mask_is_measured(value: float | None) -> None:
    class Selected(nn.Module):
        def __init__(self, share: int) -> None:
            super().__init__()
            self.linear, self.share = nn.Linear(64, 64), share

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            keep = torch.arange(x.shape[0]) % self.share == 0
            y = x.clone()
            y[keep] = self.linear(x[keep]) if value is None else value
            return y.sum()

    for share in (2, 8):  # the same shapes, another number of rows
        model = Selected(share)
        step = Step(model, torch.randn(256, 64), optimizer=None)
        trace = memfit.trace(step, target="cpu")
        assert not any("index_put" in note for note in trace.notes)
        assert captured_peak(trace) == measured_peak(step)


def test_a_call_that_fails_on_made_up_values_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_module, "measure_call", lambda *_: "RuntimeError: not these")
    trace = memfit.trace(find_step(FUNCTIONS["gelu of an expanded gradient"]), target="cpu")
    assert any("could not be run once here (RuntimeError: not these)" in note for note in trace.notes)


def test_measuring_leaves_the_random_state_alone() -> None:
    def drawn(a: Tensor, b: Tensor) -> Tensor:
        first = F.rrelu(a.t(), training=True)
        return (first * torch.rand(())).sum()

    step = find_step(drawn)
    before = torch.get_rng_state()
    memfit.trace(step, target="cpu")
    assert torch.equal(before, torch.get_rng_state())


def test_a_capture_for_a_gpu_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("measured on the host for a GPU")

    monkeypatch.setattr(execution_module, "measure_call", measure)
    for function in FUNCTIONS.values():
        assert memfit.trace(find_step(function), target="h100-sxm").ops


def test_kinds_of_operands() -> None:
    plain = torch.zeros(4, 6)
    assert operand_kind([plain, plain]) == "contiguous"
    assert operand_kind([plain, plain.t()]) == "strided"
    assert operand_kind([plain, plain.double()]) == "contiguous-mixed"
    assert operand_kind([plain.bfloat16()]) == "contiguous-mixed"
    assert operand_kind([plain, torch.zeros(4, dtype=torch.int64)]) == "contiguous-integer"
    assert operand_kind([plain[:0]]) == "empty"
    assert operand_kind([torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)]) == "channels-last"


def test_what_training_is_made_of_is_certified() -> None:
    table = certified_ops()
    for name in ("add.Tensor", "mul.Tensor", "sum.dim_IntList", "native_layer_norm.default", "embedding.default"):
        assert any(kind.startswith("contiguous") for kind in table[f"aten.{name}"]), name
