"""Attention on CUDA targets. Sources are files of torch 2.13 under aten/src/ATen/native/transformers unless
said otherwise.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from memfit.capture.capture import trace as trace_step
from memfit.capture.rules.attention import AttentionCall, choose_backend
from memfit.capture.rules.efficient_attention import efficient_kernel
from memfit.capture.rules.flash_attention import flash_splits
from memfit.capture.step import Step, spec
from tests.capture.cuda_helpers import A100, B200, H100, RTX4090, T4, V100, captured, made_bytes, names, only

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
MATH = "_safe_softmax"
SHAPE = (2, 4, 64, 64)


def attend(shape=SHAPE, key=None, value=None, *, dtype=BF16, target=H100, mask=None, **options):
    """A trace of one attention and its gradient, of a loss whose gradient is dense."""

    def run(q, k, v):
        bias = None if mask is None else torch.zeros(mask[0], dtype=mask[1], device="cuda")
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options).square()

    key = key or shape
    return captured(run, shape, key, value or key, dtype=dtype, target=target)


WIDE = (2, 4, 64, 256)
GROUPED = (2, 2, 64, 64)
LONGER = (2, 4, 96, 64)
MASK = ((64, 64), torch.bool)

CHOICES = [
    # cuda/sdp_utils.cpp, check_prefer_cudnn_attention: cuDNN first on sm90 and sm100
    pytest.param(CUDNN, {}, id="cudnn-first-on-hopper"),
    pytest.param(CUDNN, {"target": B200}, id="cudnn-first-on-blackwell"),
    pytest.param(FLASH, {"target": A100}, id="flash-first-on-ampere"),
    pytest.param(FLASH, {"target": RTX4090}, id="flash-first-on-ada"),
    # check_dtypes_low_precision, can_use_mem_efficient_attention
    pytest.param(EFFICIENT, {"dtype": FP32}, id="float32-is-efficient"),
    pytest.param(EFFICIENT, {"dtype": FP16, "target": V100}, id="no-flash-before-sm80"),
    pytest.param(EFFICIENT, {"dtype": FP16, "target": T4}, id="no-flash-on-turing"),
    pytest.param(MATH, {"dtype": BF16, "target": V100}, id="no-fused-bfloat16-before-sm80"),
    # check_for_attn_mask, check_attn_mask_shape
    pytest.param(CUDNN, {"mask": MASK}, id="cudnn-takes-a-mask"),
    pytest.param(EFFICIENT, {"mask": MASK, "target": A100}, id="flash-takes-no-mask"),
    pytest.param(EFFICIENT, {"mask": ((4, 64, 64), BF16), "target": A100}, id="three-dimensional-mask"),
    # check_flash_causal_non_square_seqlens
    pytest.param(EFFICIENT, {"key": LONGER, "is_causal": True, "target": A100}, id="causal-not-square"),
    pytest.param(FLASH, {"key": LONGER, "target": A100}, id="not-square-not-causal"),
    # check_cudnn_tensor_shapes, check_head_dim_size_flash
    pytest.param(CUDNN, {"shape": WIDE}, id="hopper-cudnn-to-256"),
    pytest.param(FLASH, {"shape": WIDE, "target": B200}, id="blackwell-cudnn-to-128"),
    pytest.param(EFFICIENT, {"shape": (2, 4, 64, 264), "target": A100}, id="flash-to-256"),
    pytest.param(FLASH, {"shape": (2, 4, 64, 60)}, id="cudnn-wants-multiples-of-8"),
    pytest.param(EFFICIENT, {"value": (2, 4, 64, 32), "target": A100}, id="flash-wants-equal-heads"),
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    pytest.param(FLASH, {"shape": WIDE, "target": RTX4090}, id="ada-256-without-dropout"),
    pytest.param(EFFICIENT, {"shape": WIDE, "dropout_p": 0.5, "target": RTX4090}, id="ada-256-with-dropout"),
    pytest.param(EFFICIENT, {"shape": (2, 4, 64, 208), "target": RTX4090}, id="ada-between-192-and-224"),
    # check_cudnn_dropout: a multiple of 1/16
    pytest.param(CUDNN, {"dropout_p": 0.25}, id="cudnn-dropout-in-sixteenths"),
    pytest.param(FLASH, {"dropout_p": 0.1}, id="other-dropout-is-flash"),
    # check_batch_size_and_num_heads_dense: efficient has no grouped heads in 2.13, and math comes before
    # cuDNN
    pytest.param(CUDNN, {"key": GROUPED, "enable_gqa": True}, id="grouped-heads-on-hopper"),
    pytest.param(FLASH, {"key": GROUPED, "enable_gqa": True, "target": A100}, id="grouped-heads-on-ampere"),
    pytest.param(MATH, {"key": GROUPED, "enable_gqa": True, "mask": MASK, "target": A100}, id="grouped-heads-masked"),
    # check_tensor_shapes: four dimensions
    pytest.param(MATH, {"shape": (4, 64, 64)}, id="three-dimensions-are-math"),
]


@pytest.mark.parametrize(("backend", "case"), CHOICES)
def test_the_backend_is_the_one_that_torch_would_choose(backend: str, case: dict) -> None:
    assert backend in names(attend(**case))


def test_the_users_choice_of_backend_is_respected() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert MATH in names(attend())
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert EFFICIENT in names(attend())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert FLASH in names(attend())


B, H, L, D = SHAPE
ROWS = B * H * L
TENSOR = ROWS * D * 2

RESULTS = [
    # cuda/flash_attn/flash_api.cpp, mha_fwd: output, log-sum-exp [B,H,L] float32, rng_state uint64[2], unused
    # uint64
    pytest.param(FLASH, {"target": A100}, [TENSOR, ROWS * 4, 16, 8, 0], id="flash"),
    # cudnn/MHA.cpp, run_cudnn_SDP_fprop and cuda/attention.cu: statistics [B,H,L,1], seed and offset int64
    pytest.param(CUDNN, {}, [TENSOR, ROWS * 4, 8, 8], id="cudnn"),
    # cuda/attention.cu, _efficient_attention_forward: rows padded to kAlignLSE = 32; seed and offset on the
    # host
    pytest.param(EFFICIENT, {"dtype": FP32}, [2 * TENSOR, ROWS * 4, 0, 0], id="efficient"),
    pytest.param(
        EFFICIENT,
        {"shape": (2, 4, 40, 64), "dtype": FP32},
        [2 * 4 * 40 * 64 * 4, 2 * 4 * 64 * 4, 0, 0],
        id="padded-rows",
    ),
]


@pytest.mark.parametrize(("backend", "case", "expected"), RESULTS)
def test_forward_allocates_what_the_kernel_returns(backend: str, case: dict, expected: list[int]) -> None:
    trace = attend(**case)
    assert made_bytes(trace, only(trace, backend + ".default")) == expected


WORKSPACES = [
    # flash_api.cpp, mha_bwd: softmax_d and dq_accum, rows rounded to 128 and head size to 32; here gradient
    # and output
    # are [B,H,L,D] in memory, and _flash_attention_backward copies both to [B,L,H,D]
    pytest.param(FLASH, {"target": A100}, B * H * 128 * 4 * (1 + 64) + 2 * TENSOR, id="flash"),
    pytest.param(
        FLASH,
        {"shape": (1, 2, 130, 200), "target": A100},
        2 * 256 * 4 * (1 + 256) + 2 * (2 * 130 * 200 * 2),
        id="flash-rounds-200-to-256",
    ),
    pytest.param(
        FLASH,
        {"shape": (1, 2, 130, 136), "target": A100},
        2 * 256 * 4 * (1 + 192) + 2 * (2 * 130 * 136 * 2),
        id="flash-rounds-136-to-192",  # multiples of 64 above 128
    ),
    # mha_bwd: keys and values of every query head
    pytest.param(
        FLASH,
        {"key": GROUPED, "enable_gqa": True, "target": A100},
        B * H * 128 * 4 * (1 + 64) + 2 * TENSOR + 2 * TENSOR,
        id="flash-grouped-heads",
    ),
    # cudnn-frontend, CompositeSDPABackwardNode: dQ_accum and softmax sum in float32
    pytest.param(CUDNN, {}, ROWS * (64 + 1) * 4, id="cudnn"),
    # mem_eff_attention/kernel_backward.h, workspace_size: 64x64 tiles with 16 bytes of lock, and delta
    pytest.param(EFFICIENT, {"dtype": FP32}, B * H * (64 * 64 + 4) * 4 + ROWS * 4, id="efficient-float32"),
    # half with 128 < head size: gK and gV accumulate outside the registers, 128x64 tiles
    pytest.param(
        EFFICIENT,
        {"shape": (2, 4, 64, 264), "target": A100},
        8 * (1 * 64 * 2 * 384 + 1 * 5 * (128 * 64 + 4)) * 4 + ROWS * 4,
        id="efficient-wide-heads",
    ),
]


@pytest.mark.parametrize(("backend", "case", "expected"), WORKSPACES)
def test_backward_needs_the_accumulators_of_the_kernel(backend: str, case: dict, expected: int) -> None:
    assert only(attend(**case), backend + "_backward.default").workspace_bytes == expected


def test_a_packed_projection_is_not_copied_in_backward() -> None:
    """Heads split from [B,L,3,H,D] are [B,L,H,D] in memory, as `_flash_attention_backward` wants."""

    def run(projected):
        query, key, value = (part.view(B, L, H, D).transpose(1, 2) for part in projected.unbind(2))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(B, L, H * D).square()

    trace = captured(run, (B, L, 3, H * D), target=A100)
    assert only(trace, FLASH + "_backward.default").workspace_bytes == B * H * 128 * 4 * (1 + 64)


def test_wide_half_heads_accumulate_the_efficient_forward_in_float32() -> None:
    """kernel_forward.h, `kNeedsOutputAccumulatorBuffer`."""
    trace = attend(shape=(2, 4, 64, 264), target=A100)
    assert only(trace, EFFICIENT + ".default").workspace_bytes == 8 * 64 * 264 * 4


def test_flash_pads_the_head_size_and_slices_the_result() -> None:
    """attention.cpp, `pad_last_dim` and `post_process_flash_output`."""
    trace = attend(shape=(2, 4, 64, 60), target=A100)
    assert names(trace) == ["constant_pad_nd"] * 3 + [FLASH, "pow.Tensor_Scalar"]
    assert made_bytes(trace, only(trace, FLASH + ".default"))[0] == TENSOR


def test_efficient_attention_pads_a_mask_with_unaligned_rows() -> None:
    """attention.cpp, `preprocess_mask`: strides of multiples of 8, then expanded."""
    trace = attend(key=(2, 4, 65, 64), mask=((64, 65), BF16), target=A100)
    assert names(trace)[:3] == ["zeros", "constant_pad_nd", EFFICIENT]
    assert made_bytes(trace, only(trace, "constant_pad_nd.default")) == [64 * 72 * 2]


def test_math_attention_uses_the_fused_dropout_with_a_byte_mask() -> None:
    """attention.cpp, `_scaled_dot_product_attention_math` and Dropout.cpp: float32 inside, a bool mask."""
    trace = attend(shape=SHAPE, dropout_p=0.1, target=V100)
    assert made_bytes(trace, only(trace, "native_dropout.default")) == [B * H * L * L * 4, B * H * L * L]


def test_few_heads_split_the_keys_on_the_device() -> None:
    """flash_api.cpp, `num_splits_heuristic`: one block of queries does not fill 108 multiprocessors."""
    assert flash_splits(64, 108, 1) == 1
    assert flash_splits(200, 108, 64) == 1
    trace = attend(shape=(1, 1, 64, 64), key=(1, 1, 4096, 64), target=A100)
    splits = 16
    assert only(trace, FLASH + ".default").workspace_bytes == splits * 64 * (64 + 1) * 4


@pytest.mark.parametrize(
    ("dtype", "width", "dropout", "capability", "tile"),
    [  # mem_eff_attention/kernels/cutlassB.h
        (BF16, 64, False, (8, 0), (64, 64)),
        (BF16, 96, False, (8, 6), (128, 64)),
        (BF16, 96, True, (8, 6), (64, 64)),
        (BF16, 128, False, (9, 0), (128, 128)),
        (BF16, 128, False, (8, 9), (64, 64)),
        (FP32, 128, False, (8, 0), (128, 64)),
        (FP32, 128, False, (7, 5), (64, 64)),
    ],
)
def test_the_efficient_backward_kernel_depends_on_the_device(dtype, width, dropout, capability, tile) -> None:
    kernel = efficient_kernel(dtype, width, dropout, capability)
    assert (kernel.queries, kernel.keys) == tile


# -- which cuDNN ---------------------------------------------------------------------------------------------


def chosen(
    capability: tuple[int, int], cudnn: int, *, width: int = 64, value_width: int | None = None, dropout=0.0
) -> int:
    query = torch.empty(2, 4, 64, width, dtype=BF16, device="meta")
    value = torch.empty(2, 4, 64, value_width or width, dtype=BF16, device="meta")
    call = AttentionCall(query, query, value, None, dropout, is_causal=False, enable_gqa=False)
    return choose_backend(call, capability, cudnn=cudnn)


MATH_CHOICE, FLASH_CHOICE, EFFICIENT_CHOICE, CUDNN_CHOICE = range(4)


@pytest.mark.parametrize(
    ("expected", "capability", "cudnn", "case"),
    [  # cuda/sdp_utils.cpp, check_prefer_cudnn_attention: newer than 9.15.0, on sm90, sm100 and sm103
        pytest.param(CUDNN_CHOICE, (9, 0), 91501, {}, id="wheels-for-cuda-13"),
        pytest.param(FLASH_CHOICE, (9, 0), 91002, {}, id="wheels-for-cuda-12"),
        pytest.param(FLASH_CHOICE, (9, 0), 91500, {}, id="not-yet-fixed"),
        pytest.param(CUDNN_CHOICE, (10, 3), 92000, {}, id="sm103"),
        pytest.param(FLASH_CHOICE, (10, 1), 92000, {}, id="not-sm101"),
        pytest.param(FLASH_CHOICE, (12, 0), 92000, {}, id="not-sm120"),
        pytest.param(FLASH_CHOICE, (9, 0), 0, {}, id="no-cudnn"),
        # check_cudnn_tensor_shapes: what flash attention cannot run is composed with an older cuDNN
        pytest.param(CUDNN_CHOICE, (10, 0), 91501, {"width": 192, "value_width": 128}, id="deepseek"),
        pytest.param(EFFICIENT_CHOICE, (10, 0), 91002, {"width": 192, "value_width": 128}, id="deepseek-before"),
    ],
)
def test_cudnn_runs_where_it_is_new_enough(expected, capability, cudnn, case) -> None:
    assert chosen(capability, cudnn, **case) == expected


def test_cudnn_before_9_14_has_no_dropout() -> None:
    """can_use_cudnn_attention: 9.11 to 9.13; asked for alone, nothing else can run."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert chosen((9, 0), 91400, dropout=0.5) == CUDNN_CHOICE
        with pytest.raises(RuntimeError, match="no attention backend"):
            chosen((9, 0), 91200, dropout=0.5)


def test_cudnn_can_be_asked_to_stand_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert chosen((9, 0), 92000) == FLASH_CHOICE
    assert names(attend()) == ["_scaled_dot_product_flash_attention", "pow.Tensor_Scalar"]


# -- packed sequences ----------------------------------------------------------------------------------------


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor([0, 1000, 2048], dtype=torch.int32, device="cuda")
    return varlen_attn(query, key, value, offsets, offsets, 1048, 1048, window_size=(-1, 0), enable_gqa=True).square()


@pytest.mark.parametrize(
    ("heads", "keys", "width", "expected"),
    [  # flash_api.cpp, mha_varlen_bwd: two sequences of 2048 tokens in all, 128 rows more for each
        pytest.param(32, 32, 128, (2048 + 256) * 32 * 4 * (1 + 128), id="heads-of-their-own"),
        pytest.param(32, 8, 128, (2048 + 256) * 32 * 4 * (1 + 128) + 2 * 2048 * 32 * 128 * 2, id="grouped"),
        pytest.param(4, 4, 136, (2048 + 256) * 4 * 4 * (1 + 192), id="rounded-to-64"),
    ],
)
def test_packed_sequences_accumulate_by_tokens(heads: int, keys: int, width: int, expected: int) -> None:
    trace = captured(packed, (2048, heads, width), (2048, keys, width), (2048, keys, width))
    (forward,) = [op for op in trace.ops if op.name == "torch_attn._varlen_attn.default"]
    (backward,) = [op for op in trace.ops if op.name == "torch_attn._varlen_attn_backward.default"]
    assert backward.workspace_bytes == expected
    assert forward.flops == 2 * 2 * (1000**2 + 1048**2) * heads * width
    assert backward.flops == 5 * 2 * (1000**2 + 1048**2) * heads * width
    assert not any("varlen" in note for note in trace.notes)


def test_packed_sequences_of_unknown_length_have_a_note() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Parameter(torch.empty(2048, 4, 64, dtype=BF16, device="meta"))

        def forward(self, offsets: torch.Tensor) -> torch.Tensor:
            return varlen_attn(self.tokens, self.tokens, self.tokens, offsets, offsets, 1048, 1048).sum()

    step = Step(Model(), (spec((3,), torch.int32),), loss=lambda output, _: output, optimizer=None)
    assert any(note.startswith("varlen_attn") for note in trace_step(step, target=H100).notes)
