"""What real models do with masks, generators, transforms and numbers of the batch, on both targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture import CaptureError, Step, check_trace
from memfit.memory import Timeline, measured

pytestmark = pytest.mark.usefixtures("frozen_heap")

WIDTH = 64


class Of(nn.Module):
    """A linear layer, and a function of its weights and its output."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear, self.linear(x)).float().pow(2).sum()


def mask(h: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(h.shape, dtype=torch.bool, device=h.device)
    found[:, ::3] = True
    return found


def masked_write(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[mask(h)] = 0.5
    return h


def masked_write_of_parameters(linear: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[mask(h)[:, 0]] = linear.bias.to(h.dtype)
    return h


def masked_sum(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[mask(h)] += 1
    return h


def masked_rows(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[:, mask(h)[0]] = 1.0
    return h


def selected(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    return h.masked_select(mask(h)) * 2


def selected_by_row(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(h, torch.arange(WIDTH, device=h.device) > 7)


def noise_of_a_generator(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(device=h.device)
    assert isinstance(generator, torch.Generator)
    assert generator.device.type == h.device.type
    generator.manual_seed(3)
    return h + torch.randn(h.shape, generator=generator, device=h.device)


def inner_gradient(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: (x.sin() * x).sum())(h)


def inner_update(linear: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    parameters = dict(linear.named_parameters())

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(linear, values, (x,)).pow(2).mean()

    gradients = torch.func.grad(loss)(parameters, h)
    updated = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
    return torch.func.functional_call(linear, updated, (h,))


def gradient_of_each_sample(linear: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    parameters = dict(linear.named_parameters())

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(linear, values, (x[None],)).pow(2).mean()

    gradients = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, h)
    return torch.cat([each.flatten(1) for each in gradients.values()], 1)


def mapped(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row * torch.ones(WIDTH, device=row.device))(h)


def written_into_zeros(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(h.shape, device=h.device)
    out[:, 3] = h[:, 3]
    out[:, 5] += h[:, 5]
    out.index_add_(0, torch.arange(len(h), device=h.device), h)
    return out


def written_through_a_view(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(h.shape, device=h.device)
    first, second = out[:4], out[4:]
    flat = out.view(-1)
    first += h[: len(first)]
    assert flat.requires_grad and out.requires_grad
    return flat * second.sum()


def bins_of_integers(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
    kinds = torch.arange(100, device=h.device) % 8
    return h * torch.histc(kinds, bins=8, min=0, max=7).sum()


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    function.__name__.replace("_", " "): function
    for function in (
        masked_write,
        masked_write_of_parameters,
        masked_sum,
        masked_rows,
        selected,
        selected_by_row,
        noise_of_a_generator,
        inner_gradient,
        inner_update,
        gradient_of_each_sample,
        mapped,
        written_into_zeros,
        written_through_a_view,
    )
}
FUNCTIONS |= {
    "normal of a size": lambda _, h: h + torch.normal(0.0, 1.0, h.shape, device=h.device),
    "new zeros": lambda _, h: h + h.new_zeros(h.shape, device=h.device),
    "new full": lambda _, h: h + h.new_full(h.shape, 2.0, device=h.device),
    "new tensor": lambda _, h: h + h.new_tensor([1.0] * WIDTH, device=h.device),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_captured_for_a_gpu(name: str) -> None:
    trace = memfit.trace(Step(Of(FUNCTIONS[name]), torch.randn(8, WIDTH)), target="h100-sxm")
    check_trace(trace)
    assert not trace.notes


MEASURED = [
    "masked write",
    "masked sum",
    "selected",
    "inner update",
    "gradient of each sample",
    "written into zeros",
    "written through a view",
]


@pytest.mark.parametrize("name", MEASURED)
def test_its_peak_on_the_cpu_is_the_measured_one(name: str) -> None:
    step = Step(Of(FUNCTIONS[name]), torch.randn(32, WIDTH))
    model = step.build_model()
    optimizer = step.build_optimizer(model)
    step.execute(model, optimizer, "cpu")
    with measured() as truth:
        step.execute(model, optimizer, "cpu")
    timeline = Timeline.of(memfit.trace(Step(model, step.batch, optimizer=optimizer), target="cpu"))
    numbers = 8 if name == "inner update" else 0  # what `0.1 * gradient` keeps for a derivative of the derivative
    assert abs(timeline.peak_bytes - timeline.start_bytes - truth.peak_bytes) <= numbers


def test_integers_are_counted_into_bins_on_a_gpu_as_no_cpu_does() -> None:
    step = Step(Of(bins_of_integers), torch.randn(8, WIDTH))
    assert any("histc" in op.name for op in memfit.trace(step, target="h100-sxm").ops)
    with pytest.raises(CaptureError, match="not implemented for 'Long'"):
        memfit.trace(step, target="cpu")


class Boxes(nn.Module):
    """Keeps the features of boxes that are large enough, as a detector does with those that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        sizes = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0)
        if (sizes < 0).any():
            raise ValueError("a box ends before it begins")
        kept = torch.where(sizes.prod(1) > 0.1)[0]
        return self.linear(features[kept]).sum()


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
def test_numbers_of_the_batch_keep_their_values(target: str) -> None:
    boxes = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.1, 0.1], [0.0, 0.5, 1.0, 1.0]])
    trace = memfit.trace(Step(Boxes(), (torch.randn(3, WIDTH), boxes)), target=target)
    assert any(ref.shape == (2, WIDTH) for op in trace.ops for ref in op.outputs)


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
def test_values_that_nothing_reads_leave_the_trace_as_it_is(target: str) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(1, 4, 3)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (x - x.mean()) / x.std()
            return F.gelu(self.norm(self.convolution(x[:, None]))).mean()

    model = Small()
    batches = (torch.zeros(4, 100), torch.randn(4, 100), memfit.spec((4, 100)))
    assert len({memfit.trace(Step(model, batch), target=target).fingerprint for batch in batches}) == 1


@pytest.mark.parametrize("by", ["attribute", "method"])
@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
def test_an_input_that_the_model_makes_take_gradients_is_captured(target: str, by: str) -> None:
    class Extractor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            x = x[:, None]
            if by == "attribute":
                x.requires_grad = True
            else:
                x.requires_grad_()
            return self.linear(x).sum()

    batch = torch.randn(8, WIDTH)
    traces = [memfit.trace(Step(Extractor(), given), target=target) for given in (batch, memfit.spec((8, WIDTH)))]
    assert traces[0].fingerprint == traces[1].fingerprint
    assert not batch.requires_grad and not batch.is_meta


def test_a_test_for_infinite_numbers_in_a_module_is_answered_and_noted() -> None:
    def clamped(_: nn.Linear, h: torch.Tensor) -> torch.Tensor:
        return h if torch.isfinite(h).all() else h.clamp(-1, 1)

    trace = memfit.trace(Step(Of(clamped), torch.randn(8, WIDTH)), target="h100-sxm")
    assert not any("clamp" in op.name for op in trace.ops)
    assert any("answered with True" in note for note in trace.notes)


@pytest.mark.parametrize("name", ["max", "min", "median"])
@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
def test_extremes_of_known_values_are_known(target: str, name: str) -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if getattr(labels, name)() >= WIDTH:
                raise ValueError("a label is too large")
            return self.linear(x).sum()

    batch = (torch.randn(8, WIDTH), torch.arange(8))
    notes = memfit.trace(Step(Checked(), batch), target=target).notes
    said = [note for note in notes if "docs/ops.md" not in note]
    assert [note.startswith("values of the batch decide") for note in said] == [True]
