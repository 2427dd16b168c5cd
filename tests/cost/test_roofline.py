"""The roofline: what an op needs at the rates its family reaches, and how host and device share the time."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from llama import Shape, training_step
from torch import nn

import memfit
from memfit import Step, spec
from memfit.capture import Op, Phase, TensorRef, Trace
from memfit.cost import Roofline, Runtime
from memfit.cost.roofline import (
    Precision,
    Product,
    classify_op,
    estimate_work,
    index_bound,
    is_causal,
    kernel_ms,
    moved_bytes,
    peak_ms,
    with_host,
)
from memfit.errors import InputError
from memfit.hardware import Family, HostTimes, load_device

H100 = load_device("h100-sxm")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def op(name: str, *shapes: tuple[int, ...], out: tuple[int, ...], dtype: str = "bfloat16", flops: int = 0, **kw) -> Op:
    def ref(shape: tuple[int, ...]) -> TensorRef:
        stride = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        return TensorRef(storage=0, shape=shape, stride=stride, offset=0, dtype=dtype)

    def size(shape: tuple[int, ...]) -> int:
        return int(np.prod(shape)) * BYTES[dtype]

    fields = {
        "name": name,
        "phase": Phase.FORWARD,
        "call": -1,
        "inputs": tuple(map(ref, shapes)),
        "outputs": (ref(out),),
        "arguments": "[[],{}]",
        "flops": flops,
        "read_bytes": sum(map(size, shapes)),
        "written_bytes": size(out),
        "workspace_bytes": 0,
        "view": False,
        "random": False,
        "saved": False,
        "mutates": (),
        "mutated_op": -1,
        "forward_op": -1,
        "source": 0,
    }
    return Op(**{**fields, **kw})


def mm(m: int, k: int, n: int, dtype: str = "bfloat16") -> Op:
    return op("aten.mm.default", (m, k), (k, n), out=(m, n), dtype=dtype, flops=2 * m * k * n)


def test_a_large_product_takes_its_flops_at_the_reached_rate() -> None:
    factors = H100.efficiency[Family.MATRIX_LARGE]
    expected = 2 * 8192**3 / (989.4e12 * factors.compute) * 1e3 + factors.overhead_ms
    assert kernel_ms(mm(8192, 8192, 8192), H100) == pytest.approx(expected)


def test_float32_products_use_tensor_cores_only_with_tf32() -> None:
    plain = kernel_ms(mm(8192, 8192, 8192, "float32"), H100, Precision(matmul_tf32=False))
    fast = kernel_ms(mm(8192, 8192, 8192, "float32"), H100, Precision(matmul_tf32=True))
    assert plain / fast == pytest.approx(494.7 / 66.9, rel=0.01)


def test_an_elementwise_op_takes_its_bytes_at_the_reached_bandwidth() -> None:
    add = op("aten.add.Tensor", (1 << 26,), (1 << 26,), out=(1 << 26,))
    factors = H100.efficiency[Family.ELEMENTWISE]
    expected = 3 * (1 << 27) / (3350e9 * factors.bandwidth) * 1e3 + factors.overhead_ms
    assert kernel_ms(add, H100) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("recorded", "family"),
    [
        (mm(4096, 4096, 4096), Family.MATRIX_LARGE),
        (mm(128, 4096, 1024), Family.MATRIX_SMALL),
        (mm(4096, 4095, 4096), Family.MATRIX_UNALIGNED),
        (mm(4096, 4095, 4096, "float32"), Family.MATRIX_LARGE),
        (op("aten.gelu.default", (8,), out=(8,)), Family.TRANSCENDENTAL),
        (op("aten.mul.Tensor", (8,), (8,), out=(8,)), Family.ELEMENTWISE),
        (op("aten.mul_.Tensor", (8,), (8,), out=(8,), phase=Phase.OPTIMIZER), Family.OPTIMIZER),
        (op("aten._fused_adamw_.default", (8,), out=(8,), phase=Phase.OPTIMIZER), Family.OPTIMIZER),
        (op("aten.sum.dim_IntList", (8, 8), out=(8,)), Family.REDUCTION),
        (op("aten._softmax.default", (8,), out=(8,)), Family.NORM),
        (op("aten.native_layer_norm.default", (8,), out=(8,)), Family.NORM),
        (op("aten.embedding.default", (8, 8), (4,), out=(4, 8)), Family.EMBEDDING),
        (op("aten.cat.default", (8,), (8,), out=(16,)), Family.COPY),
        (op("aten.native_dropout.default", (8,), out=(8,)), Family.RANDOM),
        (op("aten._scaled_dot_product_flash_attention.default", (1, 1, 8, 8), out=(1, 1, 8, 8)), Family.ATTENTION),
        (
            op("aten._scaled_dot_product_flash_attention_backward.default", (1, 1, 8, 8), out=(1, 1, 8, 8)),
            Family.ATTENTION_BACKWARD,
        ),
        (op("aten.convolution.default", (1, 3, 8, 8), out=(1, 8, 8, 8)), Family.CONVOLUTION),
        (op("mine.unheard_of.default", (8,), out=(8,)), Family.OTHER),
    ],
)
def test_ops_belong_to_families(recorded: Op, family: Family) -> None:
    item_bytes = BYTES[recorded.inputs[0].dtype]
    assert classify_op(recorded, multiprocessors=132, item_bytes=item_bytes) is family


def test_every_device_has_figures_for_every_family() -> None:
    for device in memfit.hardware.list_devices():
        assert {each.family for each in device.efficiency.families} == set(Family)


def test_an_embedding_does_not_read_its_whole_table() -> None:
    small = op("aten.embedding.default", (1000, 64), (16,), out=(16, 64))
    large = op("aten.embedding.default", (1_000_000, 64), (16,), out=(16, 64))
    assert kernel_ms(small, H100) == kernel_ms(large, H100)


def test_a_product_with_few_tiles_leaves_multiprocessors_idle() -> None:
    one, many = mm(128, 1 << 10, 128), mm(128 * 66, 1 << 10, 128)
    assert Product.of(one).tiles == 1 and Product.of(many).tiles == 66
    assert estimate_work(one, H100, Precision()).compute_ms == pytest.approx(
        estimate_work(many, H100, Precision()).compute_ms
    )


def test_causal_attention_counts_half() -> None:
    name = "aten._scaled_dot_product_flash_attention.default"
    shape = (1, 32, 8192, 128)
    flops = 4 * 32 * 8192**2 * 128
    full = op(name, shape, shape, shape, out=shape, flops=flops, arguments='[[{"t":0},{"t":1},{"t":2},0.0,false],{}]')
    causal = msgspec.structs.replace(full, arguments='[[{"t":0},{"t":1},{"t":2},0.0,true],{}]')
    assert is_causal(causal) and not is_causal(full)
    overhead = H100.efficiency[Family.ATTENTION].overhead_ms
    assert kernel_ms(full, H100) - overhead == pytest.approx(2 * (kernel_ms(causal, H100) - overhead))


@pytest.fixture(scope="module")
def llama() -> Trace:
    return memfit.trace(training_step(Shape(layers=6), length=4096), target="h100-sxm")


def test_equal_layers_have_equal_times(llama: Trace) -> None:
    runtime = Runtime.of(llama, Roofline())
    modules = runtime.modules
    assert len({modules[f"layers.{i}"].forward_ms for i in range(1, 6)}) == 1
    assert len({modules[f"layers.{i}"].backward_ms for i in range(1, 5)}) == 1


def test_a_step_is_the_sum_of_its_phases_and_the_root_of_its_modules(llama: Trace) -> None:
    runtime = Runtime.of(llama, Roofline())
    assert sum(runtime.by_phase_ms.values()) == pytest.approx(runtime.total_ms)
    root = runtime.modules[""]
    children = [m for path, m in runtime.modules.items() if path and "." not in path]
    assert 0 < sum(m.forward_ms for m in children) <= root.forward_ms
    assert root.forward_ms == pytest.approx(runtime.by_phase_ms[Phase.FORWARD], rel=0.01)


def test_utilisation_of_a_large_model_is_plausible(llama: Trace) -> None:
    """Published trainings of dense models on H100 reach 35 to 60 % of the peak; the estimate must not be off by two."""
    runtime = Runtime.of(llama, Roofline())
    reached = sum(each.flops for each in llama.ops) / (runtime.total_ms / 1e3) / 989.4e12
    assert 0.3 < reached < 0.7


def tiny_trace(target: str) -> Trace:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    return memfit.trace(Step(model, spec((2, 8)), loss=lambda out, _: out.sum()), target=target)


def test_a_small_step_on_a_gpu_takes_what_the_host_needs() -> None:
    trace = tiny_trace("h100-sxm")
    host = HostTimes(forward_ms=1.0, backward_ms=1.0, optimizer_ms=1.0, view_ms=0.5, call_ms=0.25)
    device = dataclasses.replace(H100, efficiency=dataclasses.replace(H100.efficiency, host=host))
    kernels = sum(not each.view for each in trace.ops)
    views = len(trace.ops) - kernels
    calls = sum(call.begin < call.end for call in trace.calls)
    expected = kernels + 0.5 * views + 0.25 * calls
    assert Runtime.of(trace, Roofline(device=device)).total_ms == pytest.approx(expected, rel=0.02)


def test_a_large_step_on_a_gpu_hides_the_host(llama: Trace) -> None:
    kernels = Roofline().kernel_ms(llama.ops, H100)
    assert Runtime.of(llama, Roofline()).total_ms == pytest.approx(float(kernels.sum()), rel=0.02)


def test_host_and_kernels_take_turns_on_a_cpu() -> None:
    trace = tiny_trace("cpu")
    kernel = np.full(len(trace.ops), 1.0)
    host = HostTimes(forward_ms=1.0, backward_ms=1.0, optimizer_ms=1.0, view_ms=1.0, call_ms=1e-9)
    assert with_host(trace, kernel, host, False).sum() == pytest.approx(2 * len(trace.ops), rel=1e-4)


def test_attention_and_recurrent_ops_of_the_cpu_count_their_flops() -> None:
    query = torch.randn(2, 4, 16, 8, requires_grad=True)
    step = Step(
        nn.Identity(),
        query,
        loss=lambda out, _: nn.functional.scaled_dot_product_attention(out, out, out).sum(),
        optimizer=None,
        zero_grad=False,
    )
    flops = {each.name: each.flops for each in memfit.trace(step, target="cpu").ops if "attention" in each.name}
    forward = 4 * 2 * 4 * 16 * 16 * 8
    assert flops == {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": forward,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": forward * 5 // 2,
    }


def test_a_deep_product_with_few_tiles_is_split_to_fill_the_device() -> None:
    deep = estimate_work(mm(768, 65536, 768), H100, Precision()).compute_ms
    assert deep == pytest.approx(peak_ms(mm(768, 65536, 768), H100, Precision()))


def test_the_setting_of_torch_decides_on_tf32() -> None:
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    try:
        matmul.fp32_precision, convolution.fp32_precision = "tf32", "ieee"
        assert Precision.of_torch() == Precision(matmul_tf32=True, convolution_tf32=False)
        Roofline().kernel_ms([mm(8, 8, 8)], H100)
    finally:
        matmul.fp32_precision, convolution.fp32_precision = before


def test_ops_on_empty_tensors_take_the_fixed_time() -> None:
    empty = op("aten.mm.default", (0, 8), (8, 8), out=(0, 8))
    assert kernel_ms(empty, H100) == pytest.approx(H100.efficiency[Family.MATRIX_SMALL].overhead_ms, rel=0.01)


def test_equal_shapes_of_other_dtypes_have_times_of_their_own() -> None:
    v100 = load_device("v100-sxm2-16gb")
    half, brain = mm(4096, 4096, 4096, "float16"), mm(4096, 4096, 4096, "bfloat16")
    together = Roofline().kernel_ms([half, brain], v100)
    assert together.tolist() == [kernel_ms(half, v100), kernel_ms(brain, v100)]
    assert together[1] > 4 * together[0], "a V100 has no bf16 units"


def test_double_precision_has_its_own_rate() -> None:
    card = load_device("rtx-4090")
    single, double = mm(4096, 4096, 4096, "float32"), mm(4096, 4096, 4096, "float64")
    assert kernel_ms(double, card) > 30 * kernel_ms(single, card)


@pytest.mark.parametrize(
    ("name", "shapes", "out", "expected"),
    [
        ("aten.index.Tensor", [(1_000_000, 128), (64,)], (64, 128), 2 * 64 * 128 * 4 + 64 * 4),
        ("aten.nll_loss_forward.default", [(8192, 100_000), (8192,)], (1,), 2 * 4 + 8192 * 4),
        ("aten.nll_loss_backward.default", [(1,), (64, 1000), (64,)], (64, 1000), 64 * 1000 * 4),
        ("aten.index_add_.default", [(1_000_000, 8), (16,), (16, 8)], (1_000_000, 8), 2 * (16 * 4 + 16 * 8 * 4)),
        ("aten.copy_.default", [(1000,), (1000,)], (1000,), 8000),
        ("aten.zero_.default", [(1000,)], (1000,), 4000),
        ("aten.add_.Tensor", [(1000,), (1000,)], (1000,), 12000),
    ],
)
def test_ops_move_only_what_they_touch(name: str, shapes: list, out: tuple, expected: int) -> None:
    assert moved_bytes(op(name, *shapes, out=out, dtype="float32")) == expected


def test_gradients_of_grouped_convolutions_count_their_groups() -> None:
    for groups in (1, 4, 16):
        step = Step(nn.Conv2d(16, 16, 3, groups=groups), torch.randn(2, 16, 8, 8, requires_grad=True))
        step = dataclasses.replace(step, loss=lambda out, _: out.sum())
        flops = {each.name: each.flops for each in memfit.trace(step, target="h100-sxm").ops if each.flops}
        assert flops["aten.convolution_backward.default"] == 2 * flops["aten.convolution.default"]


def test_a_device_of_another_kind_is_refused(llama: Trace) -> None:
    with pytest.raises(InputError, match="captured for h100-sxm"):
        Roofline.of(load_device("cpu")).op_ms(llama)


def test_indices_are_drawn_within_their_dimension() -> None:
    gather = op("aten.gather.default", (4, 7), (4, 2), out=(4, 2), arguments='[[{"t":0},1,{"t":1}],{}]')
    assert index_bound(gather, 1) == 7
    index = op("aten.index.Tensor", (4, 7), (3,), out=(4, 3), arguments='[[{"t":0},[null,{"t":1}]],{}]')
    assert index_bound(index, 1) == 7
