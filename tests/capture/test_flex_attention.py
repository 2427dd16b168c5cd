"""`flex_attention`: eager with the bytes of torch's own dense implementation, compiled with those of its kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import memfit
from memfit.capture import CaptureError, Step, check_trace
from memfit.capture.rules.flex_attention import block_density
from memfit.cost.attention import backend_speed
from memfit.cost.roofline import Float32Precision, estimate_work
from memfit.hardware import load_device
from memfit.memory import Timeline, measured
from tests.capture.cuda_helpers import made_bytes

pytestmark = pytest.mark.usefixtures("frozen_heap")

LENGTH, HEADS, WIDTH = 128, 2, 16
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q >= k


def further(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.tanh(score / 20.0) * 20.0 + (q - k) * 0.1


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, k, v)


def scored(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, k, v, score_mod=further)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device=q.device)
    return flex_attention(q, k, v, block_mask=mask)


def masked_by_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    device = "cuda" if q.is_cuda else "cpu"
    mask = create_block_mask(causal, q.shape[0], HEADS, LENGTH, LENGTH, device=device)
    return flex_attention(q, k, v, block_mask=mask, score_mod=further)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


class Model(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.projection = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.projection(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        return self.attend(*split).square().mean()


def a_step(attend: Attend) -> Step:
    return Step(Model(attend), torch.randn(2, LENGTH, HEADS * WIDTH), optimizer=None)


@pytest.mark.parametrize("attend", [plain, scored, masked, masked_by_name, grouped])
def test_it_is_captured_for_a_gpu(attend: Attend) -> None:
    trace = memfit.trace(a_step(attend), target="h100-sxm")
    check_trace(trace)
    scores_bytes = 4 * 2 * HEADS * LENGTH * LENGTH
    timeline = Timeline.of(trace)
    assert timeline.peak_bytes - timeline.start_bytes > 3 * scores_bytes, "whole matrices of scores"
    assert any("without torch.compile" in note for note in trace.notes)


@pytest.mark.parametrize("attend", [plain, masked, grouped])
def test_its_peak_is_that_of_a_real_step(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # the dense backward runs on a CPU if it is let
    step = a_step(attend)
    for _ in range(2):
        step.execute(step.model, None, "cpu")
    with measured() as truth:
        step.execute(step.model, None, "cpu")
    timeline = Timeline.of(memfit.trace(step, target="cpu"))
    assert timeline.peak_bytes - timeline.start_bytes == truth.peak_bytes


def test_torch_refuses_its_backward_on_a_cpu_in_its_own_words() -> None:
    with pytest.raises(CaptureError, match="FlexAttention does not support backward on CPU"):
        memfit.trace(a_step(plain), target="cpu")


# -- compiled ------------------------------------------------------------------------------------------------

KERNEL = "memfit.flex_attention_kernel"
ROWS_BYTES = 4 * 2 * HEADS * LENGTH
compiled = torch.compile(flex_attention)


def through_compiler(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return compiled(q, k, v)


def compiled_inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.compile(flex_attention)(q, k, v)


def a_model(kind: str) -> nn.Module:
    if kind == "model":
        return torch.compile(Model(plain))
    if kind == "in-place":
        model = Model(plain)
        model.compile()
        return model
    return Model({"function": through_compiler, "inside": compiled_inside}[kind])


def kernels(trace) -> list:
    return [op for op in trace.ops if op.name.startswith(KERNEL)]


@pytest.mark.parametrize("kind", ["function", "inside", "model", "in-place"])
def test_compiled_it_makes_no_scores(kind: str) -> None:
    """torch/_inductor/kernel/flex/flex_attention.py: out, log-sum-exp and maxima; delta in the backward."""
    step = Step(a_model(kind), torch.randn(2, LENGTH, HEADS * WIDTH), optimizer=None)
    trace = memfit.trace(step, target="h100-sxm")
    check_trace(trace)
    forward, backward = kernels(trace)
    tensor_bytes = 4 * 2 * HEADS * LENGTH * WIDTH
    assert made_bytes(trace, forward) == [tensor_bytes, ROWS_BYTES]
    assert made_bytes(trace, backward) == [tensor_bytes] * 3
    assert (forward.workspace_bytes, backward.workspace_bytes) == (ROWS_BYTES, ROWS_BYTES)
    pairs = 2 * HEADS * LENGTH * LENGTH
    assert forward.flops == 2 * 2 * pairs * WIDTH
    assert backward.flops == 5 * 2 * pairs * WIDTH
    assert any("Triton" in note for note in trace.notes)
    assert max(trace.storages[ref.storage].bytes for op in trace.ops for ref in op.outputs) < 4 * pairs


def test_compiled_groups_have_gradients_of_their_own_heads() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compiled(q, k[:, :1], v[:, :1], enable_gqa=True)

    _, backward = kernels(trace := memfit.trace(a_step(attend), target="h100-sxm"))
    whole = 4 * 2 * HEADS * LENGTH * WIDTH
    assert made_bytes(trace, backward) == [whole, whole // HEADS, whole // HEADS]


def window(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q >= k) & (q - k < 128)


def by_number(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    assert q.dim() == 0, "one position at a time, as torch calls it"
    return q >= k


@pytest.mark.parametrize(
    ("mask", "blocks"),
    [  # of 8 x 8 blocks of 128
        pytest.param(causal, 8 * 9 // 2, id="causal"),
        pytest.param(window, 8 + 7, id="window"),
        pytest.param(by_number, 64, id="not-known"),
    ],
)
def test_compiled_it_leaves_out_masked_blocks(mask: Callable[..., torch.Tensor], blocks: int) -> None:
    length = 1024
    shape = (1, 1, length, 64)
    query = torch.empty(shape, device="meta")
    density = block_density(query, query, (length, length, None, 128, 128, mask))
    assert (1.0 if density is None else density) == blocks / 64
    assert (density is None) == (mask is by_number)


def test_a_mask_that_is_not_known_has_a_note() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        blocks = create_block_mask(causal, None, None, LENGTH, LENGTH, device=q.device)
        blocks.mask_mod = by_number
        return compiled(q, k, v, block_mask=blocks)

    trace = memfit.trace(a_step(attend), target="h100-sxm")
    assert any("every block is counted" in note for note in trace.notes)


def test_compiled_it_is_slower_than_flash_attention_by_the_published_part() -> None:
    """PyTorch, August 2024: 90 % of FlashAttention-2 in the forward, 85 % in the backward."""
    forward, backward = kernels(memfit.trace(a_step(through_compiler), target="a100-sxm-80gb"))
    device = load_device("a100-sxm-80gb")
    assert backend_speed(forward.name, device) == 0.9
    assert backend_speed(backward.name, device) == 0.85
    works = [estimate_work(op, device, Float32Precision()).family.value for op in (forward, backward)]
    assert works == ["attention", "attention_backward"]
