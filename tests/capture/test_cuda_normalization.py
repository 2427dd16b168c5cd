"""Normalization on CUDA targets. Sources are files of torch 2.13 under aten/src/ATen/native."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.capture.cuda_helpers import A100, H100, captured, made_bytes, names, only

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def rms(x, weight):
    return F.rms_norm(x, (32,), weight).square()


def layer(x, weight, bias):
    return F.layer_norm(x, (32,), weight, bias).square()


def group(x, weight, bias):
    return F.group_norm(x, 4, weight, bias).square()


def batch(x, weight, bias):
    mean, variance = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    return F.batch_norm(x, mean, variance, weight, bias, True).square()


def test_rms_norm_is_one_kernel_that_keeps_a_float32_factor_per_row() -> None:
    """layer_norm.cpp, `rms_norm_symint`; cuda/layer_norm_kernel.cu, `_fused_rms_norm_cuda`."""
    trace = captured(rms, (4, 6, 32), (32,))
    assert names(trace) == ["_fused_rms_norm", "pow.Tensor_Scalar"]
    assert made_bytes(trace, only(trace, "_fused_rms_norm.default")) == [4 * 6 * 32 * 2, 4 * 6 * 4]
    backward = only(trace, "_fused_rms_norm_backward.default")
    assert made_bytes(trace, backward) == [4 * 6 * 32 * 2, 32 * 2]
    assert backward.workspace_bytes == 0


def test_what_rms_norm_keeps_for_backward() -> None:
    """tools/autograd/derivatives.yaml, `_fused_rms_norm`: input, weight and the factor, not the result."""
    trace = captured(lambda x, w: F.rms_norm(x * 2, (32,), w).sum(), (4, 32), (32,))
    kept = sorted(s.bytes for s in trace.storages if s.saved_by and s.alloc_at >= 0)
    assert kept == [4 * 4, 4 * 32 * 2]


def test_rms_norm_of_mixed_dtypes_is_composed() -> None:
    """layer_norm.cpp, `rms_norm_symint`: "Cannot dispatch to fused implementation"."""
    trace = captured(lambda x, w: F.rms_norm(x, (32,), w.float()), (4, 32), (32,))
    assert "_fused_rms_norm" not in names(trace)
    assert "rsqrt" in names(trace)


def test_autocast_runs_rms_norm_in_float32() -> None:
    """ATen/autocast_mode.h lists rms_norm as fp32: input and weight are converted, and the kernel still
    fuses.
    """
    trace = captured(rms, (4, 32), (32,), autocast=BF16)
    assert names(trace)[:3] == ["_to_copy", "_to_copy", "_fused_rms_norm"]
    assert made_bytes(trace, only(trace, "_fused_rms_norm.default")) == [4 * 32 * 4, 4 * 4]


LARGE = (65 * 1024, 32)
BLOCKS = 65 * 1024 // 32

STATISTICS_AND_WORKSPACES = [
    # cuda/layer_norm_kernel.cu, layer_norm_cuda: mean and rstd in float32 for 16-bit inputs
    pytest.param(layer, (4, 32), "native_layer_norm", [4 * 32 * 2, 4 * 4, 4 * 4], 0, id="layer-norm"),
    # cuda/group_norm_kernel.cu, GroupNormKernelImplInternal: statistics in the input's dtype; mean_acc,
    # rstd_acc; a, b
    pytest.param(
        group,
        (2, 8, 5),
        "native_group_norm",
        [2 * 8 * 5 * 2, 2 * 4 * 2, 2 * 4 * 2],
        (2 * 2 * 4 + 2 * 2 * 8) * 4,
        id="group-norm",
    ),
]


@pytest.mark.parametrize(("function", "shape", "name", "made", "workspace"), STATISTICS_AND_WORKSPACES)
def test_forward_statistics(function, shape, name, made, workspace) -> None:
    width = (shape[-1],) if function is layer else (shape[1],)
    trace = captured(function, shape, width, width)
    op = only(trace, name + ".default")
    assert made_bytes(trace, op) == made
    assert op.workspace_bytes == workspace


BACKWARDS = [
    # cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: nothing but for many short rows
    pytest.param(layer, (4, 32), (32,), "native_layer_norm", 0, id="layer-norm"),
    pytest.param(layer, LARGE, (32,), "native_layer_norm", (2 * BLOCKS + 1) * 32 * 2, id="layer-norm-many-rows"),
    # cuda/group_norm_kernel.cu, GroupNormBackwardKernelImplInternal: ds, db, c1 [N,C] and c2, c3 [N,G] in
    # float32
    pytest.param(group, (2, 8, 5), (8,), "native_group_norm", (3 * 2 * 8 + 2 * 2 * 4) * 4, id="group-norm"),
    # GroupNorm1dBackward: c2 and c3 only
    pytest.param(group, (2, 8), (8,), "native_group_norm", 2 * 2 * 4 * 4, id="group-norm-of-vectors"),
]


@pytest.mark.parametrize(("function", "shape", "parameter", "name", "workspace"), BACKWARDS)
def test_backward_workspaces(function, shape, parameter, name, workspace) -> None:
    trace = captured(function, shape, parameter, parameter)
    assert only(trace, name + "_backward.default").workspace_bytes == workspace


def test_rms_norm_backward_of_many_rows_sums_in_parts() -> None:
    """The same launcher with one parameter (`RMSNormBackwardKernelImpl`)."""
    trace = captured(rms, LARGE, (32,))
    assert only(trace, "_fused_rms_norm_backward.default").workspace_bytes == (BLOCKS + 1) * 32 * 2


def test_an_expanded_gradient_is_copied_inside_the_backward_kernel() -> None:
    """`LayerNormBackwardKernelImpl` takes `dY.contiguous()`."""
    trace = captured(lambda x, w, b: F.layer_norm(x, (32,), w, b).sum(), (4, 32), (32,), (32,))
    assert only(trace, "native_layer_norm_backward.default").workspace_bytes == 4 * 32 * 2


IMAGE = (2, 8, 4, 4)
BATCH_NORMS = [
    # Normalization.cpp, _select_batch_norm_backend
    pytest.param(FP32, "cudnn_batch_norm", id="float32"),
    pytest.param(BF16, "native_batch_norm", id="bfloat16-is-native"),
    pytest.param(FP16, "native_batch_norm", id="float16-with-float16-weights-is-native"),
]


@pytest.mark.parametrize(("dtype", "name"), BATCH_NORMS)
def test_cudnn_normalizes_what_it_can(dtype, name) -> None:
    trace = captured(batch, IMAGE, (8,), (8,), dtype=dtype)
    assert name in names(trace)
    assert name + "_backward" in names(trace, "backward")


def test_cudnn_batch_norm_keeps_statistics_and_an_empty_reserve() -> None:
    """cudnn/BatchNorm.cpp: save_mean and save_var in the weight's dtype; reserve is cuDNN's own, 0 for plain
    batch norm.
    """
    trace = captured(batch, IMAGE, (8,), (8,), dtype=FP32)
    assert made_bytes(trace, only(trace, "cudnn_batch_norm.default")) == [256 * 4, 8 * 4, 8 * 4, 0]
    assert made_bytes(trace, only(trace, "cudnn_batch_norm_backward.default")) == [256 * 4, 8 * 4, 8 * 4]


def test_cudnn_batch_norm_can_be_switched_off() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        assert "native_batch_norm" in names(captured(batch, IMAGE, (8,), (8,), dtype=FP32))


def test_batch_norm_of_channels_last_images_stays_channels_last() -> None:
    def run(x, weight, bias):
        return batch(x.to(memory_format=torch.channels_last), weight, bias)

    trace = captured(run, IMAGE, (8,), (8,), dtype=FP32, target=A100)
    assert only(trace, "cudnn_batch_norm.default").outputs[0].stride == (128, 1, 32, 8)


def test_targets_differ_in_multiprocessors() -> None:
    """The launcher compares the width with half of the multiprocessors: 132 on an H100, 108 on an A100."""
    width = 32 * 60
    rows = 64 * 1024 + 32

    def run(x, weight):
        return F.rms_norm(x, (width,), weight).square()

    found = [
        only(captured(run, (rows, width), (width,), target=target), "_fused_rms_norm_backward.default").workspace_bytes
        for target in (H100, A100)
    ]
    assert found == [(32 * 1024 // 60 + 1) * width * 2, 0]
