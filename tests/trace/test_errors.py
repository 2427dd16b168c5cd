"""Bad input gets an error that names the op, the module and the line, and says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import InputError, MemfitError
from memfit.trace import CaptureError, Step


class Inner(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


class Outer(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.inner = Inner(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


def refused(function, target: str = "cpu") -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        memfit.trace(Step(Outer(function), torch.randn(2, 4)), target=target)
    error = caught.value
    assert isinstance(error, (ValueError, MemfitError))
    assert error.module == "inner"
    assert "test_errors.py" in error.source
    assert error.op in str(error) and error.source in str(error) and error.advice in str(error)
    return error


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x * x.sum().item(), "aten._local_scalar_dense.default"),
        (lambda x: x if x.sum() > 0 else -x, "aten._local_scalar_dense.default"),
        (lambda x: x[x > 0], "aten.nonzero.default"),
        (lambda x: torch.nonzero(x).float(), "aten.nonzero.default"),
        (lambda x: torch.masked_select(x, x > 0), "aten.masked_select.default"),
        (lambda x: torch.unique(x), "aten._unique2.default"),
    ],
)
def test_data_dependence_is_refused(function, op: str, target: str) -> None:
    error = refused(function, target)
    assert error.op in (op, "aten.index.Tensor")
    assert "values" in str(error)


def test_shapes_that_do_not_fit_name_the_op() -> None:
    error = refused(lambda x: x @ torch.ones(3, 3))
    assert error.op in ("matmul", "__matmul__", "aten.mm.default")
    assert "batch" in error.advice


def test_op_without_a_meta_kernel() -> None:
    library = torch.library.Library("memfit_test", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    error = refused(lambda x: torch.ops.memfit_test.opaque(x.detach()) + x)
    assert error.op == "memfit_test.opaque.default"
    assert "register_fake" in error.advice


def test_loss_that_is_not_a_scalar() -> None:
    with pytest.raises(InputError, match=r"shape \(2, 4\).*Step.loss"):
        memfit.trace(Step(nn.Linear(4, 4), torch.randn(2, 4)), target="cpu")


def test_loss_that_is_not_a_tensor() -> None:
    class Pair(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple:
            return (super().forward(x),)

    with pytest.raises(InputError, match=r"loss is a tuple.*Step.loss"):
        memfit.trace(Step(Pair(4, 4), torch.randn(2, 4)), target="cpu")


def test_optimizer_of_another_model() -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"2 parameter\(s\) that are not the model's"):
        memfit.trace(Step(nn.Linear(4, 4), torch.randn(2, 4), optimizer=optimizer), target="cpu")


def test_nothing_to_train() -> None:
    with pytest.raises(InputError, match="nothing to train"):
        memfit.trace(Step(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4)), target="cpu")


def test_gradient_for_a_tensor_that_is_no_parameter() -> None:
    loose = torch.ones(4, requires_grad=True)
    error = refused(lambda x: x * loose)
    assert "no parameter of the model" in str(error)


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(InputError, match="h100-sxm"):
        memfit.trace(Step(nn.Linear(4, 4), torch.randn(2, 4)), target="h100-smx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulation_steps": 0}, "accumulation_steps is 0"),
        ({"autocast": torch.float64}, "autocast is torch.float64"),
    ],
)
def test_bad_options_of_a_step(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Step(nn.Linear(4, 4), torch.randn(2, 4), **options)


def test_model_that_is_no_model() -> None:
    with pytest.raises(InputError, match=r"Step\.model is a str"):
        Step("llama", None)
    with pytest.raises(InputError, match="returned a int"):
        memfit.trace(Step(lambda: 3, None), target="cpu")
