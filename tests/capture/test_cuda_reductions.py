"""What CUDA's reduction kernel stages (torch 2.13, ATen/native/cuda/Reduce.cuh), computed by hand beside each case.

The blocks that a device aims at are its multiprocessors x (threads of one / 128): 132 x 16 = 2112 on an H100, 108 x 16
= 1728 on an A100, 128 x 12 = 1536 on an RTX 4090. A sum of rows to columns has blocks of 32 x 4 threads and four
columns a thread, so one block covers 128 columns and stages `accumulator x columns x blocks a column x 128` bytes.
"""

from __future__ import annotations

import pytest
import torch

from tests.capture.cuda_helpers import A100, H100, RTX4090, captured, only

BF16, FP32 = torch.bfloat16, torch.float32


def workspace(function, shape, op, *, dtype=FP32, target=H100) -> int:
    return only(captured(function, shape, dtype=dtype, target=target), op).workspace_bytes


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [  # snapshots of real GPUs (evidence, niu_*): the gradient of a norm's weight of 512, 1000 to 2000 tokens
        pytest.param(1000, 0, id="250-values-a-thread"),
        pytest.param(1500, 6_291_456 + 16, id="24-blocks"),  # ceil(375 / 16) = 24 blocks; 4 x 512 x 24 x 128
        pytest.param(2000, 8_388_608 + 16, id="32-blocks"),  # ceil(500 / 16) = 32 blocks
    ],
)
def test_sizes_seen_on_real_gpus(tokens, expected) -> None:
    assert workspace(lambda x: x.sum(0), (tokens, 512), "sum.dim_IntList") == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        pytest.param(H100, 4 * 4096 * 66 * 128, id="h100"),  # 2112 / 32 columns of blocks
        pytest.param(A100, 4 * 4096 * 54 * 128, id="a100"),
        pytest.param(RTX4090, 4 * 4096 * 48 * 128, id="rtx-4090"),
    ],
)
@pytest.mark.parametrize("shape", [(8192, 4096), (4, 2048, 4096)], ids=["rows", "two-dimensions"])
def test_bias_gradients_stage_by_multiprocessors(target, expected, shape) -> None:
    dims = tuple(range(len(shape) - 1))
    found = workspace(lambda x: x.sum(dims), shape, "sum.dim_IntList", dtype=BF16, target=target)
    assert found == expected + 4 * 32


def test_an_extreme_with_its_place_stages_pairs() -> None:
    """528 MiB, as seen on an H100: pairs of 16 bytes."""
    assert workspace(lambda x: x.max(0).values, (8192, 4096), "max.dim") == 528 * 2**20 + 128


@pytest.mark.parametrize(
    ("function", "op", "accumulator"),
    [
        pytest.param(lambda x: x.mean(0), "mean.dim", 4, id="mean"),
        pytest.param(lambda x: x.amax(0), "amax.default", 2, id="amax"),
        pytest.param(lambda x: x.var(0), "var.correction", 16, id="var"),
        pytest.param(lambda x: torch.linalg.vector_norm(x, dim=0), "linalg_vector_norm.default", 4, id="norm"),
        pytest.param(lambda x: x.argmax(0).float() * x.sum(), "argmax.default", 16, id="argmax"),
    ],
)
def test_accumulators(function, op, accumulator) -> None:
    assert workspace(function, (8192, 4096), op, dtype=BF16) == accumulator * 4096 * 66 * 128 + 128


def test_whole_sums_stage_one_value_a_block() -> None:
    """512 threads along the row: 132 x 4 blocks."""
    assert workspace(lambda x: x.sum(), (1 << 24,), "sum.default") == 4 * 528 + 4


def test_few_long_rows() -> None:
    """Blocks of 64 x 8 threads, one row a column of blocks: ceil(528 / 8) = 66 blocks a row."""
    assert workspace(lambda x: x.sum(1), (8, 1 << 22), "sum.dim_IntList") == 4 * 8 * 66 + 4 * 8


def test_rows_of_usual_width_stage_nothing() -> None:
    assert workspace(lambda x: x.mean(-1), (8192, 4096), "mean.dim") == 0
    assert workspace(lambda x: x.t().sum(0), (4096, 8192), "sum.dim_IntList") == 0


def test_columns_that_are_not_fours() -> None:
    """Two of 4,098 columns a thread, 64 a block of 32 x 8: 65 columns of ceil(132 x 8 / 65) = 17 blocks."""
    found = workspace(lambda x: x.sum(0), (8192, 4098), "sum.dim_IntList")
    assert found == 4 * 4098 * 17 * 32 * 2 + 4 * 65


def test_reduced_dimensions_that_lie_apart() -> None:
    """Maps of 56 x 56: 32 x 16 threads along them, ceil(528 / 64) = 9 blocks a channel."""
    assert workspace(lambda x: x.sum((0, 2, 3)), (256, 64, 56, 56), "sum.dim_IntList") == 4 * 64 * 9 + 4 * 64
    assert workspace(lambda x: x.sum((0, 2, 3)), (32, 64, 56, 56), "sum.dim_IntList") == 0


def test_more_than_two_gibibytes_are_reduced_in_parts() -> None:
    """Two parts of 2**19 rows: 2**17 values a thread, so at least 2**17 / 256 = 512 blocks a column."""
    assert workspace(lambda x: x.sum(0), (1 << 20, 1024), "sum.dim_IntList") == 4 * 1024 * 512 * 128 + 4 * 8
    # 16 bits cannot hold the sum of parts: float32 for each result beside
    found = workspace(lambda x: x.sum(0), (1 << 21, 1024), "sum.dim_IntList", dtype=BF16)
    assert found == 4 * 1024 * 1024 * 128 + 4 * 8 + 4 * 1024


def test_sums_of_other_dtypes_are_converted_first() -> None:
    """ReduceOpsUtils.h, `make_reduction`: `self.to(in_dtype)`; 16 bits to float32 inside the kernel."""
    trace = captured(lambda x: (x > 0).sum(-1).float() * x.sum(-1), (64, 64))
    assert [op.workspace_bytes for op in trace.ops if op.name == "aten.sum.dim_IntList"] == [64 * 64 * 8, 0]
    assert workspace(lambda x: x.sum(-1, dtype=FP32), (64, 64), "sum.dim_IntList", dtype=BF16) == 0


def test_logsumexp_holds_the_exponentials() -> None:
    """ReduceOps.cpp, `logsumexp_out_impl`: maxima, and `(self - maxes).exp_()`."""
    assert workspace(lambda x: x.logsumexp(-1), (512, 1000), "logsumexp.default") == 512 * 4 + 512 * 1000 * 4


def test_bias_of_a_channels_last_convolution() -> None:
    """Convolution.cpp sums the gradient over samples and positions: rows of 256 channels, 2112 / 2 blocks each."""

    def convolve(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        image = image.contiguous(memory_format=torch.channels_last)
        return torch.nn.functional.conv2d(image, weight, bias).square()

    trace = captured(convolve, (64, 64, 56, 56), (256, 64, 1, 1), (256,), dtype=BF16)
    found = only(trace, "convolution_backward.default").workspace_bytes
    assert found == 4 * 256 * 1056 * 128 + 4 * 2  # 200,704 / 4 values a thread; more blocks than 50,176 / 256 = 196


def test_layer_norm_of_many_short_rows_sums_its_partial_sums() -> None:
    """layer_norm_kernel.cu: 32768 / 8 = 4096 partial sums, then `sum(0)`: 1024 values a thread, 64 blocks of 32 x 4."""
    trace = captured(
        lambda x, w, b: torch.nn.functional.layer_norm(x, (256,), w, b).square(), (1 << 18, 256), (256,), (256,)
    )
    partial = (2 * 4096 + 1) * 256 * 2
    staged = 4 * 256 * 64 * 128 + 4 * 2
    assert only(trace, "native_layer_norm_backward.default").workspace_bytes == partial + staged
