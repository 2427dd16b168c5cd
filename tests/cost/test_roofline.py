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
from memfit.cost.products import count_waves
from memfit.cost.roofline import (
    Float32Precision,
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
from memfit.hardware import Family, HostTimes, kernel_figures, load_device

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


def test_a_large_product_takes_a_little_more_than_its_flops_at_the_reached_rate() -> None:
    factors = H100.efficiency[Family.MATRIX_LARGE]
    least = 2 * 8192**3 / (989.4e12 * factors.compute) * 1e3 + factors.overhead_ms
    assert least < kernel_ms(mm(8192, 8192, 8192), H100) < 1.15 * least


def test_float32_products_use_tensor_cores_only_with_tf32() -> None:
    plain = kernel_ms(mm(8192, 8192, 8192, "float32"), H100, Float32Precision(matmul_tf32=False))
    fast = kernel_ms(mm(8192, 8192, 8192, "float32"), H100, Float32Precision(matmul_tf32=True))
    assert plain / fast == pytest.approx(494.7 / 66.9, rel=0.3)


def test_one_block_more_than_multiprocessors_begins_another_wave() -> None:
    assert count_waves(132, 132, 0.4) == 1.0
    assert count_waves(133, 132, 0.4) > 1.5
    assert count_waves(264, 132, 0.4) == 2.0
    assert count_waves(1, 132, 0.4) == 1.0


def test_an_elementwise_op_takes_its_bytes_at_the_reached_bandwidth() -> None:
    add = op("aten.add.Tensor", (1 << 26,), (1 << 26,), out=(1 << 26,))
    factors = H100.efficiency[Family.ELEMENTWISE]
    reached = 3350e9 * H100.sustained.bandwidth * factors.bandwidth
    assert kernel_ms(add, H100) == pytest.approx(3 * (1 << 27) / reached * 1e3 + factors.overhead_ms)


def test_tensors_that_the_cache_holds_are_faster() -> None:
    def rate(elements: int) -> float:
        work = estimate_work(op("aten.add.Tensor", (elements,), (elements,), out=(elements,)), H100, Float32Precision())
        return elements / work.memory_ms

    assert rate(1 << 21) == pytest.approx(rate(1 << 26) * kernel_figures().cache.gain)


@pytest.mark.parametrize(
    ("recorded", "family"),
    [
        (mm(4096, 4096, 4096), Family.MATRIX_LARGE),
        (mm(128, 4096, 1024), Family.MATRIX_SMALL),
        (mm(4096, 4095, 4096), Family.MATRIX_UNALIGNED),
        (mm(4096, 4095, 4096, "float32"), Family.MATRIX_SIMT),
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
        (op("torch_attn._varlen_attn.default", (8, 1, 8), out=(8, 1, 8)), Family.ATTENTION),
        (op("torch_attn._varlen_attn_backward.default", (8, 1, 8), out=(8, 1, 8)), Family.ATTENTION_BACKWARD),
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
    one, many = mm(64, 1 << 10, 64), mm(64 * 66, 1 << 10, 64)
    times = [estimate_work(each, H100, Float32Precision()).compute_ms for each in (one, many)]
    assert times[1] < 4 * times[0]


def test_causal_attention_counts_half_of_the_scores_at_a_lower_rate() -> None:
    name = "aten._scaled_dot_product_flash_attention.default"
    shape = (1, 32, 8192, 128)
    flops = 4 * 32 * 8192**2 * 128
    full = op(name, shape, shape, shape, out=shape, flops=flops, arguments='[[{"t":0},{"t":1},{"t":2},0.0,false],{}]')
    causal = msgspec.structs.replace(full, arguments='[[{"t":0},{"t":1},{"t":2},0.0,true],{}]')
    assert is_causal(causal) and not is_causal(full)
    times = [estimate_work(each, H100, Float32Precision()).compute_ms for each in (full, causal)]
    assert times[1] == pytest.approx(times[0] / 2 / kernel_figures().attention.causal)


def test_attention_is_as_fast_as_its_backend_on_the_architecture() -> None:
    shape, flops = (1, 32, 8192, 128), 4 * 32 * 8192**2 * 128

    def tflops(backend: str, device: str) -> float:
        name = f"aten._scaled_dot_product_{backend}_attention.default"
        return flops / kernel_ms(op(name, shape, shape, shape, out=shape, flops=flops), load_device(device)) / 1e9

    assert tflops("cudnn", "h100-sxm") > 1.4 * tflops("flash", "h100-sxm") > 400
    assert tflops("cudnn", "a100-sxm-80gb") == pytest.approx(tflops("flash", "a100-sxm-80gb"))
    assert tflops("efficient", "a100-sxm-80gb") < 0.7 * tflops("flash", "a100-sxm-80gb")
    assert tflops("cudnn", "b200") > 2 * tflops("flash", "b200")


def convolution(batch: int, channels: int, filters: int, size: int, stride: int = 1, dtype: str = "float32") -> Op:
    out = size // stride
    arguments = f'[[{{"t":0}},{{"t":1}},null,[{stride},{stride}],[1,1],[1,1],false,[0,0],1],{{}}]'
    shapes = (batch, channels, size, size), (filters, channels, 3, 3)
    flops = 2 * batch * out * out * filters * channels * 9
    result = (batch, filters, out, out)
    return op("aten.convolution.default", *shapes, out=result, dtype=dtype, flops=flops, arguments=arguments)


def test_winograd_makes_dense_3x3_convolutions_faster_than_their_flops_at_the_peak() -> None:
    v100, exact = load_device("v100-pcie-32gb"), Float32Precision(convolution_tf32=False)
    dense, strided = convolution(64, 512, 512, 28), convolution(64, 512, 512, 56, stride=2)
    assert dense.flops == strided.flops
    assert kernel_ms(dense, v100, exact) < peak_ms(dense, v100, exact) < kernel_ms(strided, v100, exact)


def test_convolutions_of_few_channels_are_far_from_the_peak() -> None:
    a100, exact = load_device("a100-pcie-80gb"), Float32Precision(convolution_tf32=False)
    narrow = convolution(32, 3, 32, 112)
    assert kernel_ms(narrow, a100, exact) > 2 * peak_ms(narrow, a100, exact)


def test_a_backward_convolution_takes_as_many_passes_as_gradients_are_asked_for() -> None:
    a100 = load_device("a100-pcie-80gb")
    forward = convolution(32, 256, 256, 28)
    grad, image, weight = (32, 256, 28, 28), (32, 256, 28, 28), (256, 256, 3, 3)
    arguments = '[[{"t":0},{"t":1},{"t":2},null,[1,1],[1,1],[1,1],false,[0,0],1,[true,true,false]],{}]'
    backward = op(
        "aten.convolution_backward.default", grad, image, weight, out=image, dtype="float32",
        flops=2 * forward.flops, arguments=arguments,
    )  # fmt: skip
    overhead = a100.efficiency[Family.CONVOLUTION].overhead_ms
    once, twice = (kernel_ms(each, a100) - overhead for each in (forward, backward))
    assert twice == pytest.approx(2 * once)


def test_rows_that_leave_the_cache_are_read_again() -> None:
    a100 = load_device("a100-pcie-40gb")

    def rate(columns: int) -> float:
        shape = (1 << 28 >> columns.bit_length(), columns)
        norm = op("aten.native_layer_norm.default", shape, (columns,), (columns,), out=shape, dtype="float32")
        return 2 * norm.written_bytes / kernel_ms(norm, a100)

    assert rate(2048) > 1.25 * rate(8192)
    assert rate(768) < 0.9 * rate(1024)  # a block's 512 elements fit one and a half times


def test_a_group_norm_of_few_groups_leaves_multiprocessors_idle() -> None:
    b200 = load_device("b200")

    def norm(groups: int) -> Op:
        arguments = f'[[{{"t":0}},{{"t":1}},{{"t":2}},1,512,65536,{groups},1e-5],{{}}]'
        shape = (1, 512, 256, 256)
        return op("aten.native_group_norm.default", shape, (512,), (512,), out=shape, arguments=arguments)

    assert kernel_ms(norm(8), b200) > 3 * kernel_ms(norm(512), b200)


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
    deep, shallow = (estimate_work(mm(768, depth, 768), H100, Float32Precision()).compute_ms for depth in (65536, 128))
    assert deep < 1.5 * peak_ms(mm(768, 65536, 768), H100, Float32Precision())
    assert shallow > 1.6 * peak_ms(mm(768, 128, 768), H100, Float32Precision())


def test_the_setting_of_torch_decides_on_tf32() -> None:
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    try:
        matmul.fp32_precision, convolution.fp32_precision = "tf32", "ieee"
        assert Float32Precision.of_torch() == Float32Precision(matmul_tf32=True, convolution_tf32=False)
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


def test_a_cpu_computes_16_bit_numbers_in_float32_and_copies_them_as_they_are() -> None:
    cpu, shape = load_device("cpu"), (512, 1024)
    for name, factor in (("aten.mul.Tensor", 1.0), ("aten.tanh.default", 1.0), ("aten.clone.default", 0.5)):
        half, whole = (
            estimate_work(op(name, shape, out=shape, dtype=dtype), cpu, Float32Precision())
            for dtype in ("bfloat16", "float32")
        )
        assert half.memory_ms == pytest.approx(factor * whole.memory_ms)


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
