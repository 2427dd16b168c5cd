"""Recurrent layers: oneDNN's on CPU, cuDNN's on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.trace.arguments import map_tensors
from memfit.trace.probe import probe_workspace, real_execution, real_like, signature
from memfit.trace.rules import RuleContext

_aten = torch.ops.aten
_LSTM = 2


def _cpu_lstm(
    context: RuleContext,
    input: Tensor,
    hx: Any,
    params: Any,
    has_biases: Any,
    num_layers: Any,
    dropout: Any,
    train: Any,
    bidirectional: Any,
    batch_first: Any = None,
) -> Any:
    """oneDNN runs float layers without projections (ATen/native/RNN.cpp, `use_mkldnn`; mkldnn/RNN.cpp)."""
    state, cell = hx if isinstance(hx, (list, tuple)) else (None, None)
    batched = isinstance(params, (list, tuple)) and batch_first is not None
    projected = batched and len(params) != num_layers * (2 if bidirectional else 1) * (4 if has_biases else 2)
    if not batched or projected or input.dtype != torch.float32 or input.numel() == 0:
        return NotImplemented
    if batch_first:
        input = input.transpose(0, 1)
    layer_input = input.contiguous()
    directions = 2 if bidirectional else 1
    per_layer = 4 if has_biases else 2
    states, cells = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = params[index * per_layer : (index + 1) * per_layer]
            if not has_biases:
                zeros = torch.zeros(weights[0].size(0), dtype=input.dtype, device=input.device)
                weights = (*weights, zeros, zeros)
            output, state_out, cell_out, _ = _aten.mkldnn_rnn_layer(
                layer_input,
                *weights,
                state[index],
                cell[index],
                direction == 1,
                [],
                _LSTM,
                state.size(2),
                num_layers,
                has_biases,
                bidirectional,
                False,
                train,
            )
            outputs.append(output)
            states.append(state_out)
            cells.append(cell_out)
        layer_input = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        del outputs, output
        if dropout != 0 and train and layer < num_layers - 1:
            layer_input = torch.dropout(layer_input, dropout, True)
    result = layer_input.transpose(0, 1) if batch_first else layer_input
    return result, torch.stack(states, 0), torch.stack(cells, 0)


def _rnn_layer(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Output, last state, last cell, and the bytes oneDNN keeps for the backward (ATen/native/mkldnn/RNN.cpp)."""
    layer_input, hidden = args[0], args[5]
    key = ("kept bytes", *signature(func, args, kwargs))
    if key not in context.probed:
        with real_execution():
            context.probed[key] = func(*map_tensors(args, real_like))[3].numel()
    output = layer_input.new_empty((*layer_input.shape[:2], hidden.size(-1)))
    kept = layer_input.new_empty((context.probed[key],), dtype=torch.uint8)
    return output, torch.empty_like(hidden), torch.empty_like(hidden), kept


def _rnn_layer_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gradients of the input, the two weights, the two biases, the state and the cell."""
    made = [args[0], *args[1:5], args[5], args[6]]
    return tuple(tensor.new_empty(tensor.shape) for tensor in made)


def _rnn_layer_backward_workspace(
    context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any
) -> int:
    """Measured on what a real forward kept: oneDNN does not survive any other bytes."""
    key = signature(func, args, kwargs)
    if key not in context.probed:
        reverse, mode, hidden, layers, biases, train, bidirectional, batch_sizes, batch_first = args[13:22]
        with real_execution(), torch.enable_grad():
            forward = map_tensors(args[:7], real_like)
            settings = (reverse, batch_sizes, mode, hidden, layers, biases, bidirectional, batch_first, train)
            output, state, cell, kept = _aten.mkldnn_rnn_layer(*forward, *settings)
        gradients = map_tensors(args[10:13], real_like)
        context.probed[key] = probe_workspace(
            func, (*forward, output, state, cell, *gradients, *args[13:22], kept), kwargs
        )
    return context.probed[key]


FUNCTIONS = {"cpu": {"lstm": _cpu_lstm}}
KERNELS = {
    "cpu": {
        "aten.mkldnn_rnn_layer.default": _rnn_layer,
        "aten.mkldnn_rnn_layer_backward.default": _rnn_layer_backward,
    }
}
WORKSPACES = {"cpu": {"aten.mkldnn_rnn_layer_backward.default": _rnn_layer_backward_workspace}}
