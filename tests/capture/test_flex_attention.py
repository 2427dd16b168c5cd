"""Eager `flex_attention` is captured with the bytes of torch's own dense implementation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import memfit
from memfit.capture import CaptureError, Step, check_trace
from memfit.memory import Timeline, measured

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
