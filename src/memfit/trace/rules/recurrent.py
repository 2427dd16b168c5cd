"""Recurrent layers: oneDNN's on CPU, cuDNN's on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.trace.arguments import map_tensors
from memfit.trace.errors import PACKED, UnsupportedError
from memfit.trace.probe import probe_workspace, real_execution, real_like, remembered, signature
from memfit.trace.rules import Rule, RuleContext

_aten = torch.ops.aten
_LSTM = 2


_Project = Callable[[Tensor, int], Any]
_Unroll = Callable[[Any, int, bool], tuple[Tensor, Any]]


@dataclass(frozen=True, slots=True)
class _Network:
    """The arguments that `torch.lstm`, `gru` and `rnn_*` share."""

    params: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def weights(self, index: int) -> Sequence[Tensor]:
        """The weights, and biases, of one direction of one layer."""
        count = 4 if self.has_biases else 2
        return self.params[index * count : (index + 1) * count]

    @property
    def projected(self) -> bool:
        return len(self.params) != self.num_layers * self.directions * (4 if self.has_biases else 2)

    def run(self, inputs: Tensor, project: _Project, unroll: _Unroll, *, contiguous: bool = False) -> Tensor:
        """Stack layers (ATen/native/RNN.cpp, `apply_layer_stack` and `FullBidirectionalLayer`).

        A direction's input is projected, then unrolled; what is projected, and the results of the steps, live as
        long as they do there.
        """
        if self.batch_first:
            inputs = inputs.transpose(0, 1)
        if contiguous:
            inputs = inputs.contiguous()
        for number in range(self.num_layers):
            made = []
            for direction in range(self.directions):
                index = number * self.directions + direction
                projected = project(inputs, index)
                made.append(unroll(projected, index, direction == 1))
            inputs = made[0][0] if len(made) == 1 else torch.cat([output for output, _ in made], -1)
            del made, projected
            if self.dropout != 0 and self.train and number < self.num_layers - 1:
                inputs = torch.dropout(inputs, self.dropout, True)
        return inputs.transpose(0, 1) if self.batch_first else inputs


def _network(arguments: Sequence[Any]) -> _Network:
    """The arguments after input and state."""
    if len(arguments) != 7 or not isinstance(arguments[0], (list, tuple)):
        raise UnsupportedError("a recurrent layer on a packed sequence", PACKED)
    return _Network(*arguments)


def _cpu_lstm(context: RuleContext, inputs: Tensor, hx: Any, *rest: Any) -> Any:
    """oneDNN runs float layers without projections (ATen/native/RNN.cpp, `use_mkldnn`; mkldnn/RNN.cpp)."""
    network = _network(rest)
    if network.projected or inputs.numel() == 0:
        return NotImplemented
    if inputs.dtype != torch.float32:
        return _composed_lstm(network, inputs, hx)
    state, cell = hx
    states: list[Tensor] = []
    cells: list[Tensor] = []

    def unroll(layer_input: Tensor, index: int, reverse: bool) -> tuple[Tensor, None]:
        weights = network.weights(index)
        if not network.has_biases:
            weights = (*weights, *map(torch.zeros_like, weights))
        settings = (
            _LSTM,
            state.size(2),
            network.num_layers,
            network.has_biases,
            network.bidirectional,
            False,
        )
        output, last_state, last_cell, _ = _aten.mkldnn_rnn_layer(
            layer_input, *weights, state[index], cell[index], reverse, [], *settings, network.train
        )
        states.append(last_state)
        cells.append(last_cell)
        return output, None

    output = network.run(inputs, lambda layer_input, _: layer_input, unroll, contiguous=True)
    return output, torch.stack(states, 0), torch.stack(cells, 0)


def _unrolled(
    network: _Network, inputs: Tensor, states: list[Any], cell: Callable[[Tensor, Any, Sequence[Tensor]], Any]
) -> tuple[Tensor, list[Any]]:
    """On CPU the inputs of all steps are multiplied at once (ATen/native/RNN.cpp, `FullLayer`)."""
    finals: list[Any] = []

    def project(layer_input: Tensor, index: int) -> Sequence[Tensor]:
        weights = network.weights(index)
        return torch.unbind(F.linear(layer_input, weights[0], weights[2] if network.has_biases else None), 0)

    def unroll(steps: Sequence[Tensor], index: int, reverse: bool) -> tuple[Tensor, list[Tensor]]:
        weights = network.weights(index)
        state = states[index]
        outputs = []
        for step in reversed(steps) if reverse else steps:
            state = cell(step, state, weights)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        finals.append(state)
        return torch.stack(outputs[::-1] if reverse else outputs, 0), outputs

    return network.run(inputs, project, unroll), finals


def _hidden_product(state: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return F.linear(state, weights[1], weights[3] if len(weights) == 4 else None)


def _lstm_cell(step: Tensor, state: tuple[Tensor, Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """RNN.cpp, `LSTMCell`."""
    hidden, cell = state
    gates = _hidden_product(hidden, weights).add_(step).unsafe_chunk(4, 1)
    entry, forget, candidate, exit_ = (
        gates[0].sigmoid_(),
        gates[1].sigmoid_(),
        gates[2].tanh_(),
        gates[3].sigmoid_(),
    )
    cell = (forget * cell).add_(entry * candidate)
    return exit_ * cell.tanh(), cell


def _gru_cell(step: Tensor, state: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """RNN.cpp, `GRUCell`."""
    inputs = step.unsafe_chunk(3, 1)
    hidden = _hidden_product(state, weights).unsafe_chunk(3, 1)
    reset = hidden[0].add_(inputs[0]).sigmoid_()
    update = hidden[1].add_(inputs[1]).sigmoid_()
    candidate = inputs[2].add(hidden[2].mul_(reset)).tanh_()
    return (state - candidate).mul_(update).add_(candidate)


def _composed_lstm(network: _Network, inputs: Tensor, hx: Any) -> Any:
    pairs = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    output, finals = _unrolled(network, inputs, pairs, _lstm_cell)
    return (
        output,
        torch.stack([state for state, _ in finals], 0),
        torch.stack([cell for _, cell in finals], 0),
    )


def _cpu_gru(context: RuleContext, inputs: Tensor, hx: Tensor, *rest: Any) -> Any:
    """RNN.cpp, `gru`: composed on CPU."""
    network = _network(rest)
    output, finals = _unrolled(network, inputs, list(hx.unbind(0)), _gru_cell)
    return output, torch.stack(finals, 0)


def _cpu_rnn(activation: Callable[[Tensor], Tensor]) -> Rule:
    """RNN.cpp, `SimpleCell`: composed on CPU."""

    def cell(step: Tensor, state: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return activation(_hidden_product(state, weights).add_(step))

    def rule(context: RuleContext, inputs: Tensor, hx: Tensor, *rest: Any) -> Any:
        network = _network(rest)
        output, finals = _unrolled(network, inputs, list(hx.unbind(0)), cell)
        return output, torch.stack(finals, 0)

    return rule


def _rnn_layer(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Output, last state, last cell, and the bytes oneDNN keeps for the backward (ATen/native/mkldnn/RNN.cpp)."""
    layer_input, hidden = args[0], args[5]

    def kept_bytes() -> int:
        with real_execution():
            return func(*map_tensors(args, real_like))[3].numel()

    key = ("kept bytes", *signature(func, args, kwargs))
    output = layer_input.new_empty((*layer_input.shape[:2], hidden.size(-1)))
    kept = layer_input.new_empty((remembered(key, kept_bytes),), dtype=torch.uint8)
    return output, torch.empty_like(hidden), torch.empty_like(hidden), kept


def _rnn_layer_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gradients of the input, the two weights, the two biases, the state and the cell."""
    biases = [args[1].new_empty(args[1].size(0)) for _ in range(2)]
    made = [tensor.new_empty(tensor.shape) for tensor in (*args[:3], *args[5:7])]
    return (*made[:3], *biases, *made[3:])


def _rnn_layer_backward_workspace(
    context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any
) -> int:
    """Measured on what a real forward kept: oneDNN does not survive any other bytes."""

    def probe() -> int:
        reverse, mode, hidden, layers, biases, train, bidirectional, batch_sizes, batch_first = args[13:22]
        with real_execution(), torch.enable_grad():
            forward = map_tensors(args[:7], real_like)
            settings = (reverse, batch_sizes, mode, hidden, layers, biases, bidirectional, batch_first, train)
            output, state, cell, kept = _aten.mkldnn_rnn_layer(*forward, *settings)
        gradients = map_tensors(args[10:13], real_like)
        return probe_workspace(func, (*forward, output, state, cell, *gradients, *args[13:22], kept), kwargs)

    return remembered(signature(func, args, kwargs), probe)


def _pack(context: RuleContext, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("a sequence is packed", PACKED)


FUNCTIONS = {
    "cuda": {"_pack_padded_sequence": _pack},
    "cpu": {
        "_pack_padded_sequence": _pack,
        "lstm": _cpu_lstm,
        "gru": _cpu_gru,
        "rnn_tanh": _cpu_rnn(torch.tanh),
        "rnn_relu": _cpu_rnn(torch.relu),
    },
}
KERNELS = {
    "cpu": {
        "aten.mkldnn_rnn_layer.default": _rnn_layer,
        "aten.mkldnn_rnn_layer_backward.default": _rnn_layer_backward,
    }
}
WORKSPACES = {"cpu": {"aten.mkldnn_rnn_layer_backward.default": _rnn_layer_backward_workspace}}
