"""FLOP counts of ops that torch's own counter (torch/utils/flop_counter.py) does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

FlopCounter = Callable[..., int]
_MATRIX_DIMS = 2


def grouped_mm_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Count a grouped product. Each row of `a`, or of the summed dimension, is in one group, whatever the offsets."""
    if a.dim() > b.dim():
        return 2 * a.size(1) * b.numel()
    return 2 * a.numel() * b.size(-1)


def cudnn_rnn_flops(input: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """Count every weight matrix once for every step of every sequence."""
    steps = input.numel() // max(1, input.size(-1))
    return 2 * steps * sum(weight.numel() for weight in weights if weight.dim() == _MATRIX_DIMS)


def cudnn_rnn_backward_flops(input: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """Count the forward twice: for the gradients of inputs and for those of weights."""
    return 2 * cudnn_rnn_flops(input, weights)


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count scores and their product with the values, all positions counted as torch's own counter does."""
    pairs = query.size(0) * query.size(1) * query.size(2) * key.size(2)
    return 2 * pairs * (query.size(3) + value.size(3))


def attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count five products: the scores again, the gradients of values and scores, and those of queries and keys."""
    pairs = query.size(0) * query.size(1) * query.size(2) * key.size(2)
    return 2 * pairs * (3 * query.size(3) + 2 * value.size(3))


def flex_attention_flops(query: Tensor, key: Tensor, value: Tensor, density: float, **_: Any) -> int:
    """Count the blocks of scores that a mask leaves."""
    return round(density * attention_flops(query, key, value))


def flex_attention_backward_flops(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, density: float, **_: Any
) -> int:
    """Count the same blocks as for any backward; that the kernel computes some scores twice is in its speed."""
    return round(density * attention_backward_flops(grad, query, key, value))


def onednn_rnn_flops(input: Tensor, weight: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    """Count both weight matrices once for every step of every sequence."""
    steps = input.numel() // max(1, input.size(-1))
    return 2 * steps * (weight.numel() + recurrent.numel())


def onednn_rnn_backward_flops(input: Tensor, weight: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    """Count the forward twice: for the gradients of inputs and for those of weights."""
    return 2 * onednn_rnn_flops(input, weight, recurrent)


def chunked_cross_entropy_flops(input: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """Count the logits, and a product of the same size for the gradient of the input and for that of the weight."""
    gradients = rest[10:12]  # `compute_input_grad`, `compute_linear_weight_grad`
    return 2 * input.numel() * weight.size(0) * (1 + sum(map(bool, gradients)))


def added_product_flops(_: Tensor, a: Tensor, b: Tensor, *__: Any, **___: Any) -> int:
    """Count a product that is added in place."""
    return 2 * a.numel() * b.size(-1)


def convolution_backward_flops(
    grad: Tensor, input: Tensor, weight: Tensor, _bias: Any, _stride: Any, _padding: Any, _dilation: Any,
    transposed: bool, _output_padding: Any, _groups: int, output_mask: list[bool], **__: Any,
) -> int:  # fmt: skip
    """Count the forward once for the input's gradient and once for the weight's; torch forgets groups there."""
    positions = (input if transposed else grad)[:, :1].numel()
    return 2 * positions * weight.numel() * sum(output_mask[:2])


FLOPS: dict[str, FlopCounter] = {
    "aten.convolution_backward": convolution_backward_flops,
    "memfit.flex_attention_kernel": flex_attention_flops,
    "memfit.flex_attention_kernel_backward": flex_attention_backward_flops,
    "aten.addmm_": added_product_flops,
    "aten.baddbmm_": added_product_flops,
    "torch_nn._linear_cross_entropy_batch_chunked": chunked_cross_entropy_flops,
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction": chunked_cross_entropy_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu": attention_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_flops,
    "aten.mkldnn_rnn_layer": onednn_rnn_flops,
    "aten.mkldnn_rnn_layer_backward": onednn_rnn_backward_flops,
    "aten._grouped_mm": grouped_mm_flops,
    "aten._cudnn_rnn": cudnn_rnn_flops,
    "aten._cudnn_rnn_backward": cudnn_rnn_backward_flops,
}
