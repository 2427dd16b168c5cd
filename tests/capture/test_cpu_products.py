"""Matrix products on CPU: copies of operands that BLAS cannot read, and oneDNN's scratch memory, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step
from memfit.capture.kernels import probe_workspace
from memfit.capture.rules import RuleContext, products, rules_for
from memfit.memory import Timeline, measured

pytestmark = pytest.mark.usefixtures("frozen_heap")

aten = torch.ops.aten
WORKSPACES = rules_for("cpu").workspaces
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def cpu_context() -> RuleContext:
    return RuleContext(device_type="cpu", compute_capability=None, threads=torch.get_num_threads())


def layouts(*shape: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Matrices, or batches of them, of one shape: dense, transposed, expanded, with steps, with gaps."""
    *lead, rows, columns = shape
    yield torch.ones(shape, dtype=dtype)
    yield torch.ones((*lead, columns, rows), dtype=dtype).mT
    yield torch.ones((), dtype=dtype).expand(shape)
    yield torch.ones(columns, dtype=dtype).expand(shape)
    yield torch.ones((*lead, rows, 1), dtype=dtype).expand(shape)
    yield torch.ones((*lead, rows, 2 * columns), dtype=dtype)[..., ::2]
    yield torch.ones((*lead, rows, columns + 3), dtype=dtype)[..., :columns]
    if lead:
        yield torch.ones((rows, columns), dtype=dtype).expand(shape)
        yield torch.ones((rows, *lead, columns), dtype=dtype).transpose(0, 1)
        yield torch.ones((rows, columns, *lead), dtype=dtype).permute(2, 0, 1)


def said_and_real(func: Any, *args: torch.Tensor) -> tuple[int, int]:
    return WORKSPACES[str(func)](cpu_context(), func, args, {}, func(*args)), probe_workspace(func, args, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth", "columns"), [(33, 17, 25), (1, 80, 96), (16, 1, 8)])
def test_a_product_of_any_layout_takes_what_the_kernel_takes(
    dtype: torch.dtype, rows: int, depth: int, columns: int
) -> None:
    right = list(layouts(depth, columns, dtype=dtype))
    for number, first in enumerate(layouts(rows, depth, dtype=dtype)):
        second = right[number * 3 % len(right)]
        for func, args in ((aten.mm.default, ()), (aten.addmm.default, (torch.ones(columns, dtype=dtype),))):
            said, real = said_and_real(func, *args, first, second)
            assert said == real, (func, first.stride(), second.stride())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth", "columns"), [(33, 17, 25), (5, 5, 5)])
def test_a_batched_product_of_any_layout_takes_what_the_kernel_takes(
    dtype: torch.dtype, rows: int, depth: int, columns: int
) -> None:
    right = list(layouts(3, depth, columns, dtype=dtype))
    for number, first in enumerate(layouts(3, rows, depth, dtype=dtype)):
        second = right[number * 3 % len(right)]
        added = torch.ones((3, rows, columns), dtype=dtype)
        for func, args in ((aten.bmm.default, ()), (aten.baddbmm.default, (added,))):
            said, real = said_and_real(func, *args, first, second)
            assert said == real, (func, first.stride(), second.stride())


@pytest.mark.parametrize("shape", [(640, 96, 512), (1, 2048, 2048), (512, 320, 4), (6, 128, 96, 256)])
def test_the_scratch_of_a_large_product_is_scaled_from_a_smaller_one(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered, so that the product that is scaled can still be run beside it."""
    *lead, rows, depth, columns = shape
    func = aten.bmm.default if lead else aten.mm.default
    first = torch.ones((*lead, rows, depth), dtype=torch.bfloat16)
    second = torch.ones((*lead, columns, depth), dtype=torch.bfloat16).mT
    real = probe_workspace(func, (first, second), {})
    monkeypatch.setattr(products, "_CHEAP_FLOPS", 1 << 20)
    monkeypatch.setattr(products, "_AFFORDABLE_FLOPS", 1 << 22)
    context = cpu_context()
    said = WORKSPACES[str(func)](context, func, (first, second), {}, func(first, second))
    assert said == real or context.notes, "a number that is not exact has a note"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(260, 256, 704), (704, 260, 256), (260, 512, 1408), (1, 8192, 4224)])
def test_a_product_that_is_not_cheap_takes_what_the_kernel_takes_whatever_its_depth(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """oneDNN's blocks of operands grow with the depth, too: a product of half of it takes less."""
    rows, depth, columns = shape
    assert 2 * rows * depth * columns > products._CHEAP_FLOPS
    context, func = cpu_context(), aten.mm.default
    for first in (torch.ones((rows, depth), dtype=dtype), torch.ones((depth, rows), dtype=dtype).mT):
        for second in (torch.ones((depth, columns), dtype=dtype), torch.ones((columns, depth), dtype=dtype).mT):
            said = WORKSPACES[str(func)](context, func, (first, second), {}, func(first, second))
            assert said == probe_workspace(func, (first, second), {})
    assert not context.notes


STEPS: dict[str, Callable[[], Step]] = {
    "sum": lambda: Step(nn.Linear(256, 4096), torch.rand(64, 256), loss=lambda output, _: output.sum()),
    "mean of a transposed batch": lambda: Step(
        nn.Linear(64, 512), torch.rand(64, 128).t(), loss=lambda output, _: output.mean()
    ),
    "bfloat16": lambda: Step(
        nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).bfloat16(),
        torch.rand(96, 64).bfloat16(),
        loss=lambda output, _: output.sum(),
    ),
    "autocast": lambda: Step(
        nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)),
        torch.rand(8, 12, 64),
        loss=lambda output, _: output.float().pow(2).mean(),
        autocast=torch.bfloat16,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_peak_of_a_step_is_that_of_a_real_one(name: str) -> None:
    step = STEPS[name]()
    model = step.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step.execute(model, optimizer, "cpu")
    with measured() as truth:
        step.execute(model, optimizer, "cpu")
    trace = memfit.trace(
        Step(model, step.batch, loss=step.loss, optimizer=optimizer, autocast=step.autocast), target="cpu"
    )
    timeline = Timeline.of(trace)
    assert timeline.peak_bytes - timeline.start_bytes == truth.peak_bytes


class Transposed(nn.Module):
    """Linear layers on a batch that is not contiguous, whose gradients meet at it."""

    def __init__(self, layers: int, *, attention: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True) if attention else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.attention is not None:
            return self.attention(x, x, x, need_weights=False)[0].square().mean()
        x = x.transpose(0, 1)
        total = self.layers[0](x)
        for layer in self.layers[1:]:
            total = total * layer(x)
        return total.square().mean()


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: Transposed(1), id="one"),
        pytest.param(lambda: Transposed(3), id="three-gradients-meet"),
        pytest.param(lambda: Transposed(0, attention=True), id="attention"),
    ],
)
def test_a_bias_is_added_in_place_to_a_strided_batch(model: Callable[[], nn.Module]) -> None:
    """ATen/native/Linear.cpp: `output.add_(*bias)`, which a dispatch mode turns into an `add`."""
    step = Step(model(), torch.randn(16, 128, 64), optimizer=None)
    for _ in range(2):
        step.execute(step.model, None, "cpu")
    with measured() as truth:
        step.execute(step.model, None, "cpu")
    trace = memfit.trace(step, target="cpu")
    timeline = Timeline.of(trace)
    assert timeline.peak_bytes - timeline.start_bytes == truth.peak_bytes
    for found in (trace, memfit.trace(step, target="h100-sxm")):
        names = [op.name for op in found.ops if op.phase.value == "forward"]
        assert "aten.add_.Tensor" in names
        assert "aten.add.Tensor" not in names


def test_under_a_transform_a_bias_is_added_out_of_place() -> None:
    """`vmap` over weights and biases cannot write to a product of fewer elements, and torch does not."""

    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 8))
            self.bias = nn.Parameter(torch.randn(3, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            each = torch.func.vmap(nn.functional.linear, in_dims=(None, 0, 0))(
                x.transpose(0, 1), self.weight, self.bias
            )
            return each.square().mean()

    trace = memfit.trace(Step(Mapped(), torch.randn(2, 4, 8), optimizer=None), target="cpu")
    assert "aten.add.Tensor" in [op.name for op in trace.ops if op.phase.value == "forward"]
