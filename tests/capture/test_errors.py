"""Bad input gets an error that names the op, the module and the line, and says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

import memfit
from memfit.capture import CaptureError, Step
from memfit.errors import InputError, MemfitError


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


def test_custom_op_without_a_known_cost_has_a_note() -> None:
    library = torch.library.Library("memfit_test", "FRAGMENT")
    library.define("halved(Tensor x) -> Tensor")
    library.impl("halved", lambda x: x / 2, "CompositeExplicitAutograd")
    library.define("product(Tensor x, Tensor y) -> Tensor")
    library.impl("product", lambda x, y: x @ y, "CompositeExplicitAutograd")
    register_flop_formula(torch.ops.memfit_test.product)(lambda x, y, **_: 2 * x[0] * x[1] * y[1])

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x + torch.ops.memfit_test.halved(x.detach()) + torch.ops.memfit_test.product(x.detach(), x.detach())

    step = Step(Model(4, 4), torch.randn(4, 4), loss=lambda y, _: y.sum())
    try:
        traces = [memfit.trace(step, target=target) for target in ("cpu", "h100-sxm")]
    finally:
        del flop_registry[torch.ops.memfit_test.product]
    for trace in traces:
        notes = {note.split(":")[0]: note for note in trace.notes if note.startswith("memfit_test")}
        assert set(notes) == {"memfit_test.halved.default", "memfit_test.product.default"}
        assert "register_flop_formula" in notes["memfit_test.halved.default"]
        assert "register_flop_formula" not in notes["memfit_test.product.default"]
        assert all("is not counted" in note for note in notes.values())
        (product,) = [op for op in trace.ops if op.name == "memfit_test.product.default"]
        assert product.flops == 2 * 4 * 4 * 4


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


class OwnError(Exception):
    """As a library raises it: with more than a message."""

    def __init__(self, wanted: int, got: int) -> None:
        super().__init__(wanted, got)

    def __str__(self) -> str:
        return f"wanted {self.args[0]}, got {self.args[1]}\nand much more about it"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error in an error")


def asserts(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[-1] == 5, "the width must be 5"
    return x


def raises(x: torch.Tensor) -> torch.Tensor:
    raise OwnError(5, x.shape[-1])


def looks_up(x: torch.Tensor) -> torch.Tensor:
    return {}["gelu"](x)


def divides(x: torch.Tensor) -> torch.Tensor:
    return x * (1 // 0)


def says_nothing(x: torch.Tensor) -> torch.Tensor:
    raise Unspeakable


def stops(x: torch.Tensor) -> torch.Tensor:
    raise StopIteration


def reads_attribute(x: torch.Tensor) -> torch.Tensor:
    return x.shap


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (asserts, AssertionError, "AssertionError: the width must be 5"),
        (raises, OwnError, "OwnError: wanted 5, got 4"),
        (looks_up, KeyError, "KeyError: 'gelu'"),
        (divides, ZeroDivisionError, "ZeroDivisionError: "),
        (says_nothing, Unspeakable, "Unspeakable"),
        (stops, StopIteration, "StopIteration"),
        (reads_attribute, AttributeError, "AttributeError: 'Tensor' object has no attribute 'shap'"),
    ],
)
def test_what_the_model_raises_is_told_with_its_module_and_line(function, kind: type, said: str, target: str) -> None:
    error = refused(function, target)
    assert isinstance(error.__cause__, kind)
    lines = str(error).split("\n")
    assert lines[0].startswith(said) and len(lines) == 3
    assert error.op == "" and error.source.endswith(function.__name__)
    assert "module inner at" in lines[1]


def failing_loss(output: torch.Tensor, _: object) -> torch.Tensor:
    raise KeyError("labels")


class FailingOptimizer(torch.optim.SGD):
    def step(self, closure: object = None) -> None:
        raise ValueError("a sparse gradient")


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise LookupError("no gradient today")


def failing_factory(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, nesterov=True)


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize(
    ("options", "kind", "place", "function"),
    [
        ({"loss": failing_loss}, KeyError, "the loss", "failing_loss"),
        ({"optimizer": FailingOptimizer}, ValueError, "the optimizer's step", "step"),
        ({"optimizer": failing_factory}, ValueError, "the making of the optimizer", "failing_factory"),
        ({"loss": lambda o, _: FailingBackward.apply(o).sum()}, LookupError, "the backward", "backward"),
    ],
)
def test_what_the_step_raises_outside_of_modules(options, kind, place: str, function: str, target: str) -> None:
    model = nn.Linear(4, 4)
    options = {"loss": lambda output, _: output.sum(), **options}
    with pytest.raises(CaptureError) as caught:
        memfit.trace(Step(model, torch.randn(2, 4), **options), target=target)
    error = caught.value
    assert isinstance(error.__cause__, kind) and error.module == place
    assert str(error).startswith(f"{kind.__name__}: ") and f"where: {place} at " in str(error)
    assert "test_errors.py" in error.source and error.source.endswith(function)
    model(torch.randn(2, 4)).sum().backward()


def test_an_interrupt_is_nobodys_error() -> None:
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    model = Outer(interrupted)
    with pytest.raises(KeyboardInterrupt):
        memfit.trace(Step(model, torch.randn(2, 4)), target="cpu")
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_an_exception_that_the_model_catches_is_its_own_affair() -> None:
    def recovers(x: torch.Tensor) -> torch.Tensor:
        try:
            return divides(x)
        except ZeroDivisionError:
            return x * 2

    assert memfit.trace(Step(Outer(recovers), torch.randn(2, 4)), target="cpu").ops


def test_a_model_factory_that_raises() -> None:
    with pytest.raises(InputError, match="the model factory raised KeyError: 'hidden'") as caught:
        memfit.trace(Step(lambda: {}["hidden"], torch.randn(2, 4)), target="cpu")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_dtype_without_a_kernel_is_no_fault_of_the_batch() -> None:
    error = refused(lambda x: x * torch.histc(torch.arange(4), bins=4))
    assert error.op == "aten.histc.default" and "convert the tensor" in error.advice
