"""CPU rules: what a kernel is said to allocate is what it really allocates, op by op, on this machine."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture import Phase, Step
from memfit.capture.environment import torch_threads
from memfit.capture.kernels import probe_workspace
from memfit.capture.rules import RuleContext, rules_for
from memfit.capture.rules.base import suggested_format
from tests.capture.real_run import real_ops

pytestmark = pytest.mark.usefixtures("frozen_heap")

aten = torch.ops.aten
RULES = rules_for("cpu")


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(*shape).to(dtype)


def channels_last(*shape: int) -> torch.Tensor:
    return torch.rand(*shape).to(memory_format=torch.channels_last)


def norm_arguments(x: torch.Tensor) -> tuple[Any, ...]:
    width = x.size(-1)
    _, mean, deviation = aten.native_layer_norm(x, [width], None, None, 1e-5)
    return (torch.rand(x.shape), x, [width], mean, deviation, torch.rand(width), torch.rand(width), [True, True, True])


BF16 = torch.bfloat16
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    # ATen/TensorIterator.cpp, compute_types: numbers are tensors first, operands of another dtype are copied
    (aten.mul.Tensor, (rand(8, 8), 2.0)),
    (aten.mul.Tensor, (rand(8, 8), rand(8, 8, dtype=BF16))),
    (aten.add.Tensor, (rand(8, 8, dtype=BF16), 1)),
    (aten.add_.Tensor, (rand(8, 8, dtype=BF16), rand(8, 8))),
    (aten.div.Tensor, (torch.ones(8, dtype=torch.int64), 2)),
    (aten.div_.Scalar, (rand(8), 0.9)),
    (aten.eq.Scalar, (rand(8), 3)),
    (aten.gt.Tensor, (torch.ones(8, dtype=torch.int64), rand(8))),
    (aten.where.self, (torch.ones(8, dtype=torch.bool), rand(8), rand(8, dtype=BF16))),
    (aten.pow.Scalar, (10000.0, rand(8))),
    (aten.pow.Tensor_Tensor, (torch.tensor(2.0), torch.arange(8))),
    (aten.lerp_.Scalar, (rand(8), rand(8), 0.1)),
    (aten._foreach_mul_.Scalar, ([rand(8), rand(4)], 0.9)),
    # reductions
    (aten.mean.dim, (rand(8, 8), [-1])),
    (aten.mean.dim, (rand(8, 16, dtype=BF16), [-1])),
    (aten.mean.default, (rand(8, 16, dtype=BF16),)),
    (aten.mean.dim, (rand(8, 16), [0])),
    (aten.sum.default, (torch.ones(8, 8, dtype=torch.bool),)),
    (aten.sum.dim_IntList, (rand(64, 64), [0])),
    (aten.cumsum.default, (torch.ones(8, 8, dtype=torch.bool), -1)),
    (aten.mse_loss.default, (rand(8, 8), rand(8, 8))),
    (aten.smooth_l1_loss.default, (rand(8, 8), rand(8, 8))),
    # softmax and embedding copy what is not contiguous
    (aten._softmax.default, (rand(8, 16).t(), -1, False)),
    (aten._log_softmax.default, (rand(8, 16), -1, False)),
    (aten._safe_softmax.default, (rand(2, 8, 8), -1)),
    (aten.embedding.default, (rand(16, 8), torch.zeros(1, 4, dtype=torch.int64).expand(2, 4))),
    (
        aten.embedding_dense_backward.default,
        (rand(4, 8, 2).permute(1, 2, 0), torch.zeros(8, 2, dtype=torch.int64), 16, -1, False),
    ),
    (aten.roll.default, (rand(4, 8, 8), [1, 1], [1, 2])),
    (aten.roll.default, (rand(4, 8, 8), [1], [1])),
    # normalization
    (aten.native_layer_norm.default, (rand(8, 16).t().contiguous().t(), [16], None, None, 1e-5)),
    (aten.native_layer_norm_backward.default, norm_arguments(rand(8, 16))),
    (aten.native_layer_norm_backward.default, norm_arguments(rand(16, 8).t())),
    (
        aten.native_group_norm_backward.default,
        (rand(2, 8, 16), rand(2, 8, 16), rand(2, 4), rand(2, 4), rand(8), 2, 8, 16, 4, [True, True, True]),
    ),
    *(
        (
            aten.native_group_norm.default,
            (channels_last(2, 8, *size), rand(8), rand(8), 2, 8, size[0] * size[1], 4, 1e-5),
        )
        for size in ((4, 4), (31, 33), (32, 32))
    ),
    *(
        (
            aten.native_group_norm_backward.default,
            (
                channels_last(2, 8, *size),
                channels_last(2, 8, *size),
                rand(2, 4),
                rand(2, 4),
                rand(8),
                2,
                8,
                size[0] * size[1],
                4,
                [True, True, True],
            ),
        )
        for size in ((4, 4), (23, 89), (32, 64))
    ),
    (aten.native_batch_norm.default, (rand(4, 8, 6, 6), rand(8), rand(8), rand(8), rand(8), True, 0.1, 1e-5)),
    (aten.native_batch_norm.default, (channels_last(4, 8, 6, 6), rand(8), rand(8), rand(8), rand(8), True, 0.1, 1e-5)),
    (
        aten.native_batch_norm_backward.default,
        (
            rand(4, 8, 6, 6),
            rand(4, 8, 6, 6),
            rand(8),
            rand(8),
            rand(8),
            rand(8),
            rand(8),
            True,
            1e-5,
            [True, True, True],
        ),
    ),
    # pooling wants the memory format of its input
    (
        aten.adaptive_max_pool2d_backward.default,
        (rand(2, 8, 2, 2), channels_last(2, 8, 8, 8), torch.zeros(2, 8, 2, 2, dtype=torch.int64)),
    ),
    (
        aten.avg_pool2d_backward.default,
        (rand(2, 8, 4, 4), channels_last(2, 8, 8, 8), [2, 2], [2, 2], [0, 0], False, True, None),
    ),
]


def workspace(func: Any, args: tuple[Any, ...]) -> int:
    rule = RULES.workspaces.get(str(func))
    if rule is None:
        return 0
    context = RuleContext(device_type="cpu", compute_capability=None, threads=torch.get_num_threads())
    return rule(context, func, args, {}, func(*args))


@pytest.mark.parametrize(("func", "args"), CALLS, ids=[f"{i}-{func}" for i, (func, _) in enumerate(CALLS)])
def test_workspace_is_what_the_kernel_allocates(func: Any, args: tuple[Any, ...]) -> None:
    assert workspace(func, args) == probe_workspace(func, args, {})


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("elements", [32767, 32768])
@pytest.mark.parametrize("name", ["sum", "amax", "amin", "nansum", "prod"])
def test_a_reduction_to_one_number_has_a_partial_result_for_each_thread(name: str, elements: int, threads: int) -> None:
    with torch_threads(threads):
        values = rand(elements) > 0.5 if name == "sum" else rand(elements)
        func = getattr(aten, name).default
        assert workspace(func, (values,)) == probe_workspace(func, (values,), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("length", "head", "keys"), [(16, 8, 16), (64, 32, 64), (192, 16, 192), (768, 8, 768), (33, 16, 77)]
)
def test_flash_attention_workspaces(dtype: torch.dtype, length: int, head: int, keys: int) -> None:
    """ATen/native/cpu/FlashAttentionKernel.cpp."""
    query, key = rand(1, 2, length, head, dtype=dtype), rand(1, 2, keys, head, dtype=dtype)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    args: tuple[Any, ...] = (query, key, key, 0.0, False)
    assert workspace(forward, args) == probe_workspace(forward, args, {})
    output, statistics = forward(*args)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (torch.rand_like(output), query, key, key, output, statistics, 0.0, False)
    assert workspace(backward, args) == probe_workspace(backward, args, {})


def test_probe_ignores_what_was_allocated_before() -> None:
    """A kernel is charged with what it allocates, not with what happens to be freed meanwhile."""
    kept = [torch.rand(1 << 16)]

    def frees_something(x: torch.Tensor) -> torch.Tensor:
        kept.clear()
        return x + x

    assert probe_workspace(frees_something, (torch.rand(8),), {}) == 0


def forward_ops(model: nn.Module, batch: Any) -> list[str]:
    trace = memfit.trace(Step(model, batch, loss=lambda output, _: output.float().sum()), target="cpu")
    return [op.name for op in trace.ops if op.phase is Phase.FORWARD and not op.view]


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24, bias=False)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value, **self.options)


def test_attention_is_flash_without_and_math_with_dropout() -> None:
    """ATen/native/transformers/sdp_utils_cpp.cpp, `use_flash_attention_cpp`."""
    x = torch.rand(2, 6, 8)
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in forward_ops(Attention(is_causal=True), x)
    composed = forward_ops(Attention(is_causal=True, dropout_p=0.1), x)
    assert "aten._safe_softmax.default" in composed and "aten.add_.Tensor" in composed
    assert not any("flash" in name for name in composed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_lstm_is_one_kernel_a_layer_exactly_where_it_is_on_this_machine(dtype: torch.dtype) -> None:
    """ATen/native/RNN.cpp, `use_mkldnn`: float32, and bfloat16 where oneDNN has it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, num_layers=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    model, x = Model().to(dtype), torch.rand(3, 2, 4).to(dtype)
    ran, _ = real_ops(Step(model, x, loss=lambda output, _: output.float().sum()), model)
    real = sum(str(op.func) == "aten.mkldnn_rnn_layer.default" for op in ran)
    captured = forward_ops(model, x)
    assert real in (0, 2)
    assert captured.count("aten.mkldnn_rnn_layer.default") == real
    gates = 0 if real else 2 * 3 * 3
    assert captured.count("aten.sigmoid_.default") == gates, "three gates, three steps, two layers"


def test_gru_multiplies_the_inputs_of_all_steps_at_once() -> None:
    """ATen/native/RNN.cpp, `FullLayer`: only on CPU."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gru(x)[0]

    assert forward_ops(Model(), torch.rand(5, 2, 4)).count("aten.addmm.default") == 1 + 5


def test_convolution_keeps_channels_last() -> None:
    """ATen/native/ConvUtils.h, `mkldnn_conv_use_channels_last`."""
    model = nn.Conv2d(4, 8, 3)
    trace = memfit.trace(Step(model, channels_last(2, 4, 8, 8), loss=lambda o, _: o.sum()), target="cpu")
    convolution = next(op for op in trace.ops if op.name == "aten.convolution.default")
    assert convolution.outputs[0].stride == model(channels_last(2, 4, 8, 8)).stride()


def test_group_norm_keeps_channels_last_through_the_backward() -> None:
    """ATen/native/group_norm.cpp, `group_norm`: meta tensors would be copied to contiguous ones."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3))
    step = Step(model, channels_last(2, 4, 8, 8), loss=lambda o, _: o.sum())
    ops = {op.name: op for op in memfit.trace(step, target="cpu").ops}
    assert "aten.clone.default" not in ops
    forward, backward = ops["aten.native_group_norm.default"], ops["aten.native_group_norm_backward.default"]
    assert forward.outputs[0].stride == backward.outputs[0].stride == channels_last(2, 8, 6, 6).stride()


@pytest.mark.parametrize("dims", [4, 5])
def test_suggested_format_is_the_one_that_kernels_keep(dims: int) -> None:
    """c10/core/MemoryFormat.h, `is_channels_last_strides`: gaps and dimensions of one element included."""
    generator = random.Random(0)
    for _ in range(200):
        sizes = [generator.choice((1, 2, 3)) for _ in range(dims)]
        order = generator.sample(range(dims), dims)
        tensor = torch.rand([sizes[dim] * generator.choice((1, 1, 2)) for dim in order])
        for place, dim in enumerate(order):
            tensor = tensor.narrow(place, 0, sizes[dim])
        tensor = tensor.permute([order.index(dim) for dim in range(dims)])
        kept = torch.empty_like(tensor, memory_format=suggested_format(tensor))
        assert kept.stride() == torch.group_norm(tensor, 1).stride(), (sizes, tensor.stride())


def test_the_result_of_an_op_is_not_what_it_writes_to() -> None:
    """`rrelu_with_noise` writes its noise and returns something else."""
    trace = memfit.trace(
        Step(nn.Sequential(nn.Linear(8, 8), nn.RReLU()), rand(4, 8), loss=lambda o, _: o.sum()), target="cpu"
    )
    activation = next(op for op in trace.ops if "rrelu_with_noise." in op.name)
    total = next(op for op in trace.ops if op.name == "aten.sum.default")
    assert total.inputs[0].storage == activation.outputs[0].storage


def test_threads_are_the_targets() -> None:
    from memfit.hardware import load_device

    device = load_device("cpu")
    model = nn.LayerNorm(64)
    step = Step(model, torch.rand(8, 64), loss=lambda o, _: o.sum())
    workspaces = {}
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        trace = memfit.trace(step, target="cpu")
        workspaces[threads] = next(op.workspace_bytes for op in trace.ops if "layer_norm_backward" in op.name)
    torch.set_num_threads(before)
    assert device.threads is None
    assert workspaces[2] - workspaces[1] == 2 * 64 * 4, "one more pair of rows of partial sums"
