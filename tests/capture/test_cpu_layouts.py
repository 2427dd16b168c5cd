"""CPU kernels that copy an operand because of its layout: what is captured is what the kernels of this machine do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from memfit.capture import Step
from memfit.capture.arguments import map_tensors, tensors_of
from memfit.capture.kernels import probe_workspace
from memfit.capture.rules import RuleContext, measured_kernels, rules_for
from memfit.memory import Timeline, measured

pytestmark = pytest.mark.usefixtures("frozen_heap")

aten = torch.ops.aten
RULES = rules_for("cpu")


def layouts(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors of one shape in every layout that a step may give to a kernel."""
    *lead, rows, columns = shape

    def filled(*sizes: int) -> Tensor:
        return torch.full(sizes, 0.3, dtype=dtype)

    found = {
        "contiguous": filled(*shape),
        "transposed": filled(*lead, columns, rows).mT,
        "reversed": filled(*reversed(shape)).permute(*reversed(range(len(shape)))),
        "expanded": filled().expand(shape),
        "expanded batch": filled(*shape[1:]).expand(shape),
        "steps": filled(*shape[:-1], 2 * columns)[..., ::2],
        "gaps": filled(*shape[:-1], columns + 3)[..., :columns],
    }
    if len(shape) in (4, 5):
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        found["channels last"] = filled(*shape).contiguous(memory_format=last)
        wide = filled(shape[0], shape[1] + 2, *shape[2:]).contiguous(memory_format=last)
        found["channels last with gaps"] = wide[:, : shape[1]]
    return found


def geometry(result: Any) -> list[Any]:
    return [(t.shape, t.stride() if t.numel() > 1 else (), t.dtype, t.untyped_storage().nbytes()) for t in result]


def check(func: Any, *args: Any, where: str) -> None:
    """Results and workspace of a captured op are those of the kernel."""

    def meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    context = RuleContext(device_type="cpu", compute_capability=None, threads=torch.get_num_threads())
    captured = map_tensors(args, meta)
    kernel, workspace = RULES.kernels.get(str(func)), RULES.workspaces.get(str(func))
    result = kernel(context, func, captured, {}) if kernel else func(*captured)
    assert geometry(tensors_of((result,))) == geometry(tensors_of((func(*args),))), (func, where)
    said = workspace(context, func, captured, {}, result) if workspace else 0
    assert said == probe_workspace(func, args, {}), (func, where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim"), [((6, 10), 1), ((2, 3, 4, 5), 1)])
def test_softmax(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    outputs = layouts(*shape, dtype=dtype)
    for name, tensor in outputs.items():
        check(aten._softmax.default, tensor, dim, False, where=name)
        check(aten._log_softmax.default, tensor, dim, False, where=name)
        for other in ("contiguous", "transposed"):
            for func in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
                check(func, tensor, outputs[other], dim, dtype, where=f"{name} gradient, {other} output")


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions(groups: int) -> None:
    weight = torch.full((4, 4 // groups, 3, 3), 0.3)
    for name, tensor in layouts(2, 4, 6, 8).items():
        rest: tuple[Any, ...] = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
        captured = torch.empty_strided(tensor.size(), tensor.stride(), device="meta")
        context = RuleContext(device_type="cpu", compute_capability=None, threads=torch.get_num_threads())
        kernel = RULES.kernels["aten.convolution.default"]
        found = kernel(context, aten.convolution.default, (captured, weight.to("meta"), *rest), {})
        assert found.stride() == aten.convolution.default(tensor, weight, *rest).stride(), name


GRADIENTS = ("contiguous", "transposed", "expanded", "channels last")


def test_pools() -> None:
    shape = (2, 3, 8, 10)
    window: tuple[Any, ...] = ([2, 2], [2, 2])
    for name, tensor in layouts(*shape).items():
        check(aten.max_pool2d_with_indices.default, tensor, *window, where=name)
        check(aten.avg_pool2d.default, tensor, *window, where=name)
        check(aten._adaptive_avg_pool2d.default, tensor, [2, 3], where=name)
        check(aten.adaptive_max_pool2d.default, tensor, [2, 3], where=name)
        pooled, indices = aten.max_pool2d_with_indices.default(tensor, *window)
        _, places = aten.adaptive_max_pool2d.default(tensor, [2, 3])
        for other, grad in layouts(*pooled.shape).items():
            if other in GRADIENTS:
                where = f"{name} input, {other} gradient"
                rest = ([0, 0], [1, 1], False, indices)
                check(aten.max_pool2d_with_indices_backward.default, grad, tensor, *window, *rest, where=where)
                rest = ([0, 0], False, True, None)
                check(aten.avg_pool2d_backward.default, grad, tensor, *window, *rest, where=where)
        for other, grad in layouts(*places.shape).items():
            if other in GRADIENTS:
                where = f"{name} input, {other} gradient"
                check(aten._adaptive_avg_pool2d_backward.default, grad, tensor, where=where)
                check(aten.adaptive_max_pool2d_backward.default, grad, tensor, places, where=where)


@pytest.mark.parametrize("size", [[12, 14], [5, 4]])
def test_upsampling(size: list[int]) -> None:
    shape = (2, 3, 6, 7)
    modes = {"upsample_nearest2d": (), "upsample_bilinear2d": (False,), "upsample_bicubic2d": (False,)}
    for kind, rest in modes.items():
        for name, tensor in layouts(*shape).items():
            check(getattr(aten, kind).default, tensor, size, *rest, where=name)
        for name, grad in layouts(*shape[:2], *size).items():
            check(getattr(aten, f"{kind}_backward").default, grad, size, list(shape), *rest, where=name)


def test_pools_of_three_dimensions() -> None:
    window: tuple[Any, ...] = ([2, 2, 2], [2, 2, 2])
    for name, tensor in layouts(2, 3, 4, 6, 4).items():
        check(aten.max_pool3d_with_indices.default, tensor, *window, where=name)
        check(aten.avg_pool3d.default, tensor, *window, where=name)
        for other, grad in layouts(2, 3, 2, 3, 2).items():
            if other in GRADIENTS[1::2]:
                rest = ([0, 0, 0], False, True, None)
                check(aten.avg_pool3d_backward.default, grad, tensor, *window, *rest, where=f"{name}, {other}")


LARGE: dict[Any, Callable[[], tuple[Any, ...]]] = {
    aten.convolution.default: lambda: (
        torch.rand(24, 6, 12, 12), torch.rand(8, 6, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
    ),
    aten.convolution_backward.default: lambda: (
        torch.rand(24, 8, 12, 12), torch.rand(24, 6, 12, 12), torch.rand(8, 6, 3, 3), None, [1, 1], [1, 1], [1, 1],
        False, [0, 0], 1, [True, True, False],
    ),
    aten.upsample_bilinear2d.default: lambda: (torch.rand(24, 6, 1, 1).expand(24, 6, 12, 12), [24, 24], False),
    aten.upsample_bilinear2d_backward.default: lambda: (
        torch.ones(()).expand(24, 6, 24, 24), [24, 24], [24, 6, 12, 12], False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("func", LARGE, ids=str)
def test_a_call_that_is_too_large_is_measured_on_fewer_samples(func: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is lowered, so that the whole call can still be run beside it."""
    args = LARGE[func]()
    context = RuleContext(device_type="cpu", compute_capability=None, threads=torch.get_num_threads())
    monkeypatch.setattr(measured_kernels, "_PROBE_LIMIT_BYTES", 1 << 17)
    said = RULES.workspaces[str(func)](context, func, args, {}, func(*args))
    assert not any("not counted" in note for note in context.notes)
    assert said == probe_workspace(func, args, {}) or context.notes, "a number that is not exact has a note"


def ctc(output: Tensor, _: Any) -> Tensor:
    """Log probabilities of a batch-first model: a transposed gradient comes back."""
    log_probabilities = output.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_probabilities, torch.randint(1, 64, (4, 5)), [12] * 4, [5] * 4)


def linear_step(loss: Callable[[Tensor, Any], Tensor], *batch: int) -> Step:
    return Step(nn.Linear(16, 64), torch.rand(*batch, 16), loss=loss)


def image_step(*modules: nn.Module, loss: Callable[[Tensor, Any], Tensor]) -> Step:
    return Step(nn.Sequential(nn.Conv2d(3, 8, 3), *modules), torch.rand(2, 3, 18, 18), loss=loss)


class Classes(nn.Module):
    """A model that takes classes, as one-hot vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 64)

    def forward(self, classes: Tensor) -> Tensor:
        return self.head(F.one_hot(classes, 16).float())


def unread_number(output: Tensor, _: Any) -> Tensor:
    """A loss beside which something is computed that it does not depend on."""
    (output * 0.5).exp()
    return output.square().mean()


STEPS: dict[str, Callable[[], Step]] = {
    "one-hot": lambda: Step(Classes(), torch.randint(0, 16, (32, 8)), loss=lambda output, _: output.square().mean()),
    "log_softmax, sum": lambda: linear_step(lambda output, _: output.log_softmax(-1).sum(), 32),
    "softmax, transposed": lambda: linear_step(lambda output, _: output.softmax(-1).t().reshape(-1).pow(2).sum(), 32),
    "ctc": lambda: linear_step(ctc, 4, 12),
    "prod": lambda: linear_step(lambda output, _: output.sigmoid().prod(), 32),
    "prod of a dimension": lambda: linear_step(lambda output, _: output.sigmoid().prod(1).sum(), 32),
    "prod, kept dimension": lambda: linear_step(lambda output, _: output.sigmoid().prod(0, keepdim=True).sum(), 32),
    "prod in another dtype": lambda: linear_step(
        lambda output, _: output.sigmoid().prod(1, dtype=torch.float64).sum(), 32
    ),
    "cumprod": lambda: linear_step(lambda output, _: output.sigmoid().cumprod(-1).sum(), 32),
    "quantile": lambda: linear_step(lambda output, _: output.quantile(0.3, dim=-1).sum(), 32),
    "quantiles": lambda: linear_step(lambda output, _: output.nanquantile(torch.tensor([0.1, 0.9])).sum(), 32),
    "known places": lambda: linear_step(
        lambda output, _: output.take_along_dim(torch.arange(32).view(32, 1), dim=1).sum(), 32
    ),
    "max pool, sum": lambda: image_step(nn.MaxPool2d(2), loss=lambda output, _: output.sum()),
    "average pool, mean": lambda: image_step(nn.AdaptiveAvgPool2d(1), loss=lambda output, _: output.mean()),
    "binary cross-entropy": lambda: linear_step(
        lambda output, _: F.binary_cross_entropy_with_logits(output, torch.ones_like(output)), 32
    ),
    "binary cross-entropy, weights": lambda: linear_step(
        lambda output, _: F.binary_cross_entropy_with_logits(
            output * 2, torch.ones(32, 64), weight=torch.ones(64), pos_weight=torch.ones(64)
        ),
        32,
    ),
    "binary cross-entropy, computed target": lambda: linear_step(
        lambda output, _: F.binary_cross_entropy_with_logits(output * 2, output.sigmoid()), 32
    ),
    "upsampling, sum": lambda: image_step(
        nn.Upsample(scale_factor=2, mode="bilinear"), loss=lambda output, _: output.sum()
    ),
    "a number that no backward reads": lambda: linear_step(unread_number, 32),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_peak_of_a_step_is_that_of_a_real_one(name: str) -> None:
    step = STEPS[name]()
    model = step.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step.execute(model, optimizer, "cpu")
    with measured() as truth:
        step.execute(model, optimizer, "cpu")
    timeline = Timeline.of(memfit.trace(Step(model, step.batch, loss=step.loss, optimizer=optimizer), target="cpu"))
    assert timeline.peak_bytes - timeline.start_bytes == truth.peak_bytes


def test_one_hot_vectors_of_a_batch_without_values_are_those_of_a_real_one() -> None:
    given = STEPS["one-hot"]()
    traces = [
        memfit.trace(Step(Classes, batch, loss=given.loss, optimizer=torch.optim.SGD), target="cpu")
        for batch in (given.batch, memfit.spec((32, 8), torch.int64))
    ]
    assert traces[0].fingerprint == traces[1].fingerprint
    assert any(op.name == "aten.scatter_.value" for op in traces[1].ops)


@pytest.mark.parametrize("layout", layouts(4, 6, 16))
def test_a_batch_has_the_layout_that_it_was_given(layout: str) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = layouts(4, 6, 16)[layout]
    step = Step(model, batch, loss=lambda output, _: output.square().mean(), optimizer=optimizer)
    step.execute(model, optimizer, "cpu")
    with measured() as truth:
        step.execute(model, optimizer, "cpu")
    trace = memfit.trace(step, target="cpu")
    timeline = Timeline.of(trace)
    assert timeline.peak_bytes - timeline.start_bytes == truth.peak_bytes
    held = [each.bytes for each in trace.storages if each.category == "input"]
    assert held == [batch.untyped_storage().nbytes()]


def test_a_copy_of_the_batch_to_a_gpu_has_no_gaps() -> None:
    step = Step(nn.Linear(16, 4), torch.rand(64, 24)[:, :16], loss=lambda output, _: output.sum())
    trace = memfit.trace(step, target="h100-sxm")
    assert [each.bytes for each in trace.storages if each.category == "input"] == [64 * 16 * 4]


def test_a_product_of_elements_says_that_it_was_captured_without_zeros() -> None:
    step = linear_step(lambda output, _: output.sigmoid().prod(1).sum(), 8)
    assert any(note.startswith("prod: captured as without zeros") for note in memfit.trace(step, target="cpu").notes)
