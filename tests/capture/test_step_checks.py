"""What `Step` and `spec` are given: what is taken as it is meant, and what is refused with what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.capture import Step
from memfit.errors import InputError


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.linear(x), y)


def batch_of_a_loader() -> list[torch.Tensor]:
    data = TensorDataset(torch.randn(4, 8), torch.randint(0, 2, (4,)))
    return next(iter(DataLoader(data, batch_size=4)))


def test_a_list_is_positional_inputs_as_a_tuple_is() -> None:
    batch = batch_of_a_loader()
    assert isinstance(batch, list)
    listed = memfit.trace(Step(Two, batch), target="cpu")
    assert listed.fingerprint == memfit.trace(Step(Two, tuple(batch)), target="cpu").fingerprint


def test_labels_beside_the_inputs_are_told_where_to_go() -> None:
    step = Step(lambda: nn.Linear(8, 2), batch_of_a_loader(), loss=nn.CrossEntropyLoss())
    with pytest.raises(InputError, match=r"does not fit Linear\.forward.*Labels that only the loss takes"):
        memfit.trace(step, target="cpu")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((8, 3, 64, 64), r"these are ints.*memfit\.spec\(\(8, 3, 64, 64\)\)"),
        (torch.Size([8, 3]), r"these are ints.*memfit\.spec\(\(8, 3\)\)"),
        (np.zeros((2, 4)), r"batch is an array of numpy \(float64, shape \(2, 4\)\).*torch\.as_tensor\(batch\)"),
        ({"x": [np.zeros(3)]}, r"write torch\.as_tensor\(batch\['x'\]\[0\]\)"),
    ],
)
def test_a_batch_without_tensors_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Step(nn.Linear(4, 4), batch)


def test_a_step_of_ones_own_may_take_any_batch() -> None:
    Step(nn.Linear(4, 4), np.zeros(3), run=lambda model, optimizer, batch: None)


def test_a_loss_takes_output_and_batch() -> None:
    with pytest.raises(
        InputError, match=r"the loss takes \(o\), and it is called with two arguments, \(output, batch\)"
    ):
        Step(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda o: o.sum())
    Step(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda *both: both[0].sum())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy, nn.MSELoss()])
@pytest.mark.parametrize("batch", [torch.randn(4, 8), (torch.randn(4, 8),)])
def test_a_criterion_that_gets_the_inputs_for_labels_is_explained(loss: Any, batch: Any) -> None:
    with pytest.raises(InputError, match=r"called with \(output, batch\).*loss=lambda output, batch: criterion"):
        memfit.trace(Step(nn.Linear(8, 3), batch, loss=loss), target="cpu")


def test_an_assertion_of_ones_own_loss_is_told_as_it_is() -> None:
    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        assert output.shape == batch.shape, "mine"
        return output.sum()

    with pytest.raises(memfit.CaptureError, match="AssertionError: mine") as caught:
        memfit.trace(Step(nn.Linear(8, 3), torch.randn(4, 8), loss=loss), target="cpu")
    assert isinstance(caught.value.__cause__, AssertionError)


def test_torchs_assertion_inside_ones_own_loss_is_explained() -> None:
    step = Step(nn.Linear(8, 3), torch.randn(4, 8), loss=lambda o, b: nn.functional.cross_entropy(o, b))
    with pytest.raises(InputError, match=r"called with \(output, batch\)"):
        memfit.trace(step, target="cpu")


def test_a_loss_is_a_tensor() -> None:
    with pytest.raises(InputError, match=r"returned a float; it must return a tensor with one number, without \.item"):
        memfit.trace(Step(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda *_: 1.0), target="cpu")


def test_an_optimizer_is_told_what_it_may_be() -> None:
    with pytest.raises(InputError, match=r"optimizer is 'adamw', a str.*torch\.optim\.AdamW.*None for a step without"):
        Step(nn.Linear(4, 4), torch.randn(2, 4), optimizer="adamw")
    with pytest.raises(InputError, match=r"optimizer is 5, a int; give a class such as torch\.optim\.AdamW"):
        Step(nn.Linear(4, 4), torch.randn(2, 4), optimizer=5)
    with pytest.raises(InputError, match=r"torch\.optim\.SGD"):
        Step(nn.Linear(4, 4), torch.randn(2, 4), optimizer="sgd")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulation_steps": 2.5}, "accumulation_steps is 2.5; it must be a whole number"),
        ({"accumulation_steps": True}, "accumulation_steps is True"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm is '1'; give a number above 0"),
        ({"clip_grad_norm": -1}, "clip_grad_norm is -1"),
        ({"autocast": "int8"}, "autocast is 'int8'.*'bfloat16', 'float16'"),
        ({"autocast": True}, "autocast is True"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Step(nn.Linear(4, 4), torch.randn(2, 4), **options)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("float16", torch.float16)])
def test_autocast_goes_by_its_name(name: Any, dtype: torch.dtype) -> None:
    assert Step(nn.Linear(4, 4), torch.randn(2, 4), autocast=name).autocast is dtype


@pytest.mark.parametrize("shape", [("8", 3), (8.0, 3), (8, -1), (True,)])
def test_a_shape_is_whole_numbers(shape: Any) -> None:
    with pytest.raises(InputError, match=r"the shape .* has .* in it; write whole numbers"):
        memfit.spec(shape)


def own_loop(model: nn.Module, optimizer: Any, batch: Any) -> None:
    model(batch).sum().backward()


@pytest.mark.parametrize("model", [nn.Linear(4, 4).requires_grad_(False), nn.ReLU()], ids=["frozen", "empty"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": None},
        {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)},
        {"optimizer": None, "run": own_loop},
        {"optimizer": None, "accumulation_steps": 2, "clip_grad_norm": 1.0},
    ],
    ids=["default", "none", "factory", "own", "accumulated"],
)
def test_a_model_with_nothing_to_train_is_refused_in_words(model: nn.Module, options: dict[str, Any]) -> None:
    why = "all 2 are frozen" if list(model.parameters()) else "it has no parameters"
    step = Step(model, torch.randn(2, 4), **{"loss": None if "run" in options else lambda out, _: out.sum(), **options})
    with pytest.raises(InputError, match=rf"no parameter of the model requires a gradient \({why}\).*requires_grad_"):
        memfit.trace(step, target="cpu")


def test_a_loss_that_is_cut_off_from_the_model_is_refused_in_words() -> None:
    step = Step(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda out, _: out.detach().sum())
    with pytest.raises(InputError, match=r"no gradient flows from the loss to the parameters.*\.detach\(\)"):
        memfit.trace(step, target="cpu")


def test_a_frozen_model_is_captured_where_its_input_has_a_gradient() -> None:
    batch = torch.randn(2, 4, requires_grad=True)
    step = Step(nn.Linear(4, 4).requires_grad_(False), batch, loss=lambda out, _: out.sum(), optimizer=None)
    assert any(op.phase.value == "backward" for op in memfit.trace(step, target="cpu").ops)


def with_tensor(**tensors: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.__dict__.update(tensors)
    return model


def fake(build: Callable[[], Any]) -> Any:
    with FakeTensorMode():
        return build()


UNCAPTURABLE: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "sparse batch": (
        lambda: nn.Linear(4, 4),
        lambda: torch.eye(4).to_sparse(),
        "batch has the layout torch.sparse_coo",
    ),
    "nested batch": (lambda: nn.Linear(4, 4), lambda: torch.nested.nested_tensor([torch.rand(2, 4)]), "nested"),
    "fake batch": (lambda: nn.Linear(4, 4), lambda: fake(lambda: torch.rand(4, 4)), "batch is a FakeTensor"),
    "fake model": (lambda: fake(lambda: nn.Linear(4, 4)), lambda: torch.rand(4, 4), "'weight' is a FakeTensor"),
    "lazy model": (lambda: nn.LazyLinear(4), lambda: torch.rand(4, 4), "'weight' has no shape yet"),
    "sparse attribute": (
        lambda: with_tensor(adjacency=torch.eye(4).to_sparse_csr()),
        lambda: torch.rand(4, 4),
        "attribute 'adjacency' has the layout",
    ),
}


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("name", UNCAPTURABLE)
def test_tensors_without_plain_memory_are_refused(name: str, target: str) -> None:
    model, batch, says = UNCAPTURABLE[name]
    with pytest.raises(InputError, match=says):
        memfit.trace(Step(model(), batch(), loss=lambda output, _: output.sum()), target=target)
