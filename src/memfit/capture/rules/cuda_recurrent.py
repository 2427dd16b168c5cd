"""Recurrent layers on CUDA: cuDNN runs all layers, steps and directions as one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext

_aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_RESERVED = {0: 1, 1: 1, 2: 6, 3: 5}
"""Values kept per hidden unit and step: gates, cell and hidden states."""

_NOTE = (
    "recurrent layers: cuDNN's reserve space is its own choice; "
    "it is estimated as the gates and states of every layer and step"
)


def _recurrent(name: str) -> Any:
    mode = _MODES[name]

    def rule(context: RuleContext, input: Tensor, *arguments: Any) -> Any:
        """`at::_cudnn_rnn` on the flat weights (ATen/native/cudnn/RNN.cpp, `_cudnn_impl`)."""
        if len(arguments) != 8 or isinstance(arguments[0], Tensor) is (mode == 2):
            return NotImplemented
        hx, params, has_biases, layers, dropout, train, bidirectional, batch_first = arguments
        if not torch.backends.cudnn.enabled or input.numel() == 0 or not isinstance(params, (list, tuple)):
            return NotImplemented
        state, cell = hx if mode == 2 else (hx, None)
        hidden = (cell if cell is not None else state).size(2)
        projection = state.size(2) if state.size(2) != hidden else 0
        per_layer = (4 if has_biases else 2) + bool(projection)
        buffer = params[0]
        if torch.is_autocast_enabled("cuda"):
            low = torch.get_autocast_dtype("cuda")
            input, state = input.to(low), state.to(low)
            cell = None if cell is None else cell.to(low)
            params = [param.to(low) for param in params]
            buffer = params[0]
        output, state_out, cell_out, _, _ = _aten._cudnn_rnn(
            input, list(params), per_layer, buffer.detach(), state, cell, mode, hidden, projection, layers,
            batch_first, dropout, train, bidirectional, [], None,
        )  # fmt: skip
        return (output, state_out, cell_out) if mode == 2 else (output, state_out)

    return rule


def _cudnn_rnn(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Torch's meta kernel has no reserve space; the weights are one buffer already (`try_get_weight_buf`)."""
    output, state, cell, reserve, weights = func(*args, **kwargs)
    source, mode, hidden, layers, train, bidirectional = (
        args[0],
        args[6],
        args[7],
        args[9],
        args[12],
        args[13],
    )
    if train:
        context.note(_NOTE)
        steps = source.numel() // source.size(-1)
        units = steps * hidden * layers * (2 if bidirectional else 1) * _RESERVED[mode]
        reserve = source.new_empty(units * source.element_size(), dtype=torch.uint8)
    return output, state, cell if args[5] is not None else source.new_empty(0), reserve, weights


def _cudnn_rnn_gradients(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The weights' gradients are views of one buffer (cudnn/RNN.cpp, `_cudnn_rnn_backward_weight`)."""
    source, weights, state, cell, mask = args[0], args[1], args[4], args[5], args[-1]
    gradients: list[Tensor] = []
    if mask[3]:
        buffer = weights[0].new_empty(sum(weight.numel() for weight in weights))
        offset = 0
        for weight in weights:
            gradients.append(buffer[offset : offset + weight.numel()].view(weight.shape))
            offset += weight.numel()
    cell_gradient = source.new_empty(0) if cell is None else cell.new_empty(cell.shape)
    return source.new_empty(source.shape), state.new_empty(state.shape), cell_gradient, gradients


FUNCTIONS = {"cuda": {name: _recurrent(name) for name in _MODES}}
KERNELS = {
    "cuda": {
        "aten._cudnn_rnn.default": _cudnn_rnn,
        "aten._cudnn_rnn_backward.default": _cudnn_rnn_gradients,
    }
}
