"""FLOP counts of ops that torch's own counter (torch/utils/flop_counter.py) does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

FlopCounter = Callable[..., int]
_MATRIX_DIMS = 2


def grouped_mm_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Each row of `a`, or of the summed dimension, is in one group, so the total does not depend on the
    offsets.
    """
    if a.dim() > b.dim():
        return 2 * a.size(1) * b.numel()
    return 2 * a.numel() * b.size(-1)


def cudnn_rnn_flops(input: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """Every weight matrix meets every step of every sequence once."""
    steps = input.numel() // max(1, input.size(-1))
    return 2 * steps * sum(weight.numel() for weight in weights if weight.dim() == _MATRIX_DIMS)


def cudnn_rnn_backward_flops(input: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """Once for the gradients of inputs, once for those of weights."""
    return 2 * cudnn_rnn_flops(input, weights)


FLOPS: dict[str, FlopCounter] = {
    "aten._grouped_mm": grouped_mm_flops,
    "aten._cudnn_rnn": cudnn_rnn_flops,
    "aten._cudnn_rnn_backward": cudnn_rnn_backward_flops,
}
