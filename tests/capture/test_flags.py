"""Flags of ops that depend on more than the op's name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import memfit
from memfit.capture import Op, Phase, Step, Trace
from tests.capture.cuda_helpers import H100, V100, captured

SHAPE = (2, 4, 64, 32)


def attention_ops(trace: Trace) -> list[Op]:
    return [op for op in trace.ops if "attention" in op.name]


def attention(dropout: float, backend: SDPBackend | None, dtype: torch.dtype, target: str) -> list[Op]:
    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)

    ops = attention_ops(captured(run, SHAPE, SHAPE, SHAPE, dtype=dtype, target=target))
    assert ops
    return ops


CUDA = [
    (SDPBackend.FLASH_ATTENTION, torch.bfloat16, H100),
    (SDPBackend.EFFICIENT_ATTENTION, torch.float32, V100),
    (SDPBackend.CUDNN_ATTENTION, torch.bfloat16, H100),
]


@pytest.mark.parametrize(("backend", "dtype", "target"), [*CUDA, (None, torch.float32, "cpu")])
def test_attention_without_dropout_is_not_random(backend: SDPBackend | None, dtype: torch.dtype, target: str) -> None:
    assert not any(op.random for op in attention(0.0, backend, dtype, target))


@pytest.mark.parametrize(("backend", "dtype", "target"), CUDA)
def test_attention_with_dropout_is_random(backend: SDPBackend, dtype: torch.dtype, target: str) -> None:
    ops = attention(0.25, backend, dtype, target)
    assert any(op.random for op in ops if op.phase is Phase.FORWARD)


def test_dropout_beside_attention_is_random_and_the_attention_is_not() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(SHAPE))

        def forward(self) -> torch.Tensor:
            plain = F.scaled_dot_product_attention(self.weight, self.weight, self.weight)
            dropped = F.dropout(plain, 0.5)
            return (dropped + F.dropout(plain, 0.5)).sum()

    trace = memfit.trace(Step(Beside(), None), target="cpu")
    random = {op.name for op in trace.ops if op.random}
    assert random == {"aten.bernoulli_.float"}
    assert [op.name for op in attention_ops(trace) if op.phase is Phase.FORWARD] == [
        "aten._scaled_dot_product_flash_attention_for_cpu.default"
    ]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_recurrent_op_is_random_only_with_dropout(dropout: float) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=dropout)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0].sum()

    trace = memfit.trace(Step(Recurrent(), torch.ones(4, 2, 16)), target=H100)
    (recurrent,) = [op for op in trace.ops if op.name == "aten._cudnn_rnn.default"]
    assert recurrent.random == (dropout > 0)
