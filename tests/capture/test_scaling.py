"""Traces of sizes between captures are those that a capture gives, or there are none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture import Step, Trace, check_trace, fit_traces


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2)).softmax(-1)  # a number that is quadratic in the sequence
        return x + self.out((scores @ value).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, *, long_from: int | None = None) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(100, 64), nn.Sequential(Block(), Block())
        self.head, self.long_from = nn.Linear(64, 100), long_from

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.dropout(self.embedding(tokens), 0.1, self.training))
        if self.long_from is not None and tokens.shape[1] >= self.long_from:
            x = x.tanh()
        return self.head(x)


def mean_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + logits.square().mean()


def captured(batch: int, seq: int, *, target: str = "h100-sxm", **options: int) -> Trace:
    step = Step(lambda: Model(**options), memfit.spec((batch, seq), torch.int64), loss=mean_loss)
    return memfit.trace(step, target=target)


@pytest.mark.parametrize("target", ["h100-sxm", "cpu"])
def test_a_trace_between_two_batch_sizes_is_the_captured_one(target: str) -> None:
    fit = fit_traces({batch: captured(batch, 96, target=target) for batch in (2, 9)})
    assert fit is not None
    for batch in (3, 6):
        given, real = fit.at(batch), captured(batch, 96, target=target)
        assert given is not None and fit.agrees(batch, real)
        assert given.fingerprint == real.fingerprint and given.model_calls == real.model_calls
        check_trace(given)


def test_a_sequence_length_is_fitted_by_three_captures_since_attention_is_quadratic() -> None:
    traces = {seq: captured(2, seq) for seq in (128, 256, 640)}
    fit = fit_traces(traces)
    assert fit is not None and fit.agrees(384, captured(2, 384))
    line = fit_traces({seq: traces[seq] for seq in (128, 640)})
    assert line is not None and not line.agrees(256, traces[256])


def test_sizes_at_which_other_ops_run_are_not_fitted() -> None:
    assert fit_traces({seq: captured(2, seq, long_from=200) for seq in (128, 256)}) is None
    same = fit_traces({seq: captured(2, seq, long_from=200) for seq in (256, 384, 512)})
    assert same is not None and not same.agrees(128, captured(2, 128, long_from=200))


def test_a_number_that_would_be_a_fraction_has_no_trace() -> None:
    fit = fit_traces({1: captured(2, 64), 3: captured(3, 64)})  # half a sample more for each
    assert fit is not None and fit.at(2) is None
