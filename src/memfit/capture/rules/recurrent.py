"""Recurrent layers: oneDNN's and ATen's own on CPU, cuDNN's on CUDA.

Covers `torch.lstm`, `torch.gru`, `torch.rnn_tanh`, `torch.rnn_relu`, `aten.mkldnn_rnn_layer`, `aten._cudnn_rnn` and
their backwards. Defined in torch by ATen/native/RNN.cpp, mkldnn/RNN.cpp and cudnn/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.capture.arguments import map_tensors
from memfit.capture.errors import PACKED, UnsupportedError
from memfit.capture.kernels import measured_once, probe_workspace, real_execution, real_like, signature, vendor_has
from memfit.capture.rules.base import Rule, RuleContext
from memfit.capture.rules.measured_kernels import probed

_aten = torch.ops.aten


_LSTM = 2


def _pack(context: RuleContext, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("a sequence is packed", PACKED)


# -- CPU -----------------------------------------------------------------------------------------------------


class _Weights(NamedTuple):
    """What one direction of one layer multiplies with and adds (RNN.cpp, `CellParams`)."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None

    def hidden_product(self, state: Tensor) -> Tensor:
        return F.linear(state, self.hidden, self.hidden_bias)

    def projected(self, state: Tensor) -> Tensor:
        return state if self.projection is None else torch.matmul(state, self.projection.t())


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

    @property
    def projected(self) -> bool:
        """Whether each direction has one more weight, which makes its states narrower than its cells."""
        return len(self.params) != self.num_layers * self.directions * self._parts

    @property
    def _parts(self) -> int:
        return 4 if self.has_biases else 2

    def weights(self, index: int) -> _Weights:
        """Return the weights and biases of one direction of one layer."""
        count = self._parts + self.projected
        values = self.params[index * count : (index + 1) * count]
        input_bias, hidden_bias = values[2:4] if self.has_biases else (None, None)
        return _Weights(values[0], values[1], input_bias, hidden_bias, values[-1] if self.projected else None)

    def turned(self, tensor: Tensor) -> Tensor:
        """Input or output between the order that the user wants and steps first."""
        return tensor.transpose(0, 1) if self.batch_first else tensor

    def dropped(self, output: Tensor, number: int) -> Tensor:
        """Return what the next layer is given; the last one has none."""
        if self.dropout == 0 or not self.train or number == self.num_layers - 1:
            return output
        return torch.dropout(output, self.dropout, True)


def _network(arguments: Sequence[Any]) -> _Network:
    """Return the arguments after input and state."""
    if len(arguments) != 7 or not isinstance(arguments[0], (list, tuple)):
        raise UnsupportedError("a recurrent layer on a packed sequence", PACKED)
    return _Network(*arguments)


def _cpu_lstm(context: RuleContext, inputs: Tensor, hx: Any, *rest: Any) -> Any:
    """oneDNN runs layers without projections, of dtypes that it has kernels for."""
    network = _network(rest)
    if inputs.numel() == 0:
        return NotImplemented
    if network.projected or not _vendor_runs(inputs.dtype):
        return _composed_lstm(network, inputs, hx)
    return _vendor_lstm(network, inputs, *hx)


def _vendor_runs(dtype: torch.dtype) -> bool:
    """Ask torch whether oneDNN runs a recurrent layer of this dtype here (ATen/native/RNN.cpp, `use_mkldnn`)."""
    return vendor_has(dtype) and (dtype != torch.float16 or not torch.is_grad_enabled())


def _vendor_lstm(network: _Network, inputs: Tensor, state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Call one kernel for each direction of each layer (ATen/native/mkldnn/RNN.cpp, `mkldnn_rnn`)."""
    inputs = network.turned(inputs).contiguous()
    state, cell = state.contiguous(), cell.contiguous()
    settings = (_LSTM, state.size(2), network.num_layers, network.has_biases, network.bidirectional)
    outputs: list[Tensor] = [inputs] * network.directions
    states: list[Tensor] = []
    cells: list[Tensor] = []
    for number in range(network.num_layers):
        for direction in range(network.directions):
            index = number * network.directions + direction
            weights = network.weights(index)
            first, first_cell = state[index], cell[index]
            biases = weights[2:4]
            if not network.has_biases:
                biases = _no_biases(weights)
            outputs[direction], last, last_cell, _ = _aten.mkldnn_rnn_layer(
                inputs, *weights[:2], *biases, first, first_cell, direction == 1, [], *settings,
                network.batch_first, network.train,
            )  # fmt: skip
            states.append(last)
            cells.append(last_cell)
        inputs = outputs[0] if network.directions == 1 else torch.cat(outputs, -1)
        inputs = network.dropped(inputs, number)
    last, last_cell = torch.stack(states, 0), torch.stack(cells, 0)
    return network.turned(inputs), last, last_cell


def _no_biases(weights: _Weights) -> Sequence[Tensor]:
    """Zeros, the second argument first as C++ evaluates them."""
    second, first = (
        torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        for weight in (weights.hidden, weights.input)
    )
    return first, second


def _composed_lstm(network: _Network, inputs: Tensor, hx: Any) -> Any:
    inputs = network.turned(inputs)
    pairs = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    output, finals = _unrolled(network, inputs, pairs, _lstm_cell)
    cell = torch.stack([cell for _, cell in finals], 0)
    state = torch.stack([state for state, _ in finals], 0)
    return network.turned(output), state, cell


def _composed(cell: Callable[[Tensor, Any, _Weights], Any]) -> Rule:
    """RNN.cpp, `ONE_HIDDEN_RNN`: networks whose only state is their output are composed on CPU."""

    def rule(context: RuleContext, inputs: Tensor, hx: Tensor, *rest: Any) -> Any:
        network = _network(rest)
        inputs = network.turned(inputs)
        output, finals = _unrolled(network, inputs, hx.unbind(0), cell)
        state = torch.stack(finals, 0)
        return (output.transpose_(0, 1) if network.batch_first else output), state

    rule.composed = True  # type: ignore[attr-defined]
    return rule


def _unrolled(
    network: _Network, inputs: Tensor, states: Sequence[Any], cell: Callable[[Tensor, Any, _Weights], Any]
) -> tuple[Tensor, list[Any]]:
    """Run layers step by step (ATen/native/RNN.cpp, `apply_layer_stack`, `FullLayer`, `FullBidirectionalLayer`).

    On CPU the inputs of all steps are multiplied at once. That product, and the results of the steps, live as long as
    they do there.
    """
    finals: list[Any] = []
    for number in range(network.num_layers):
        made: list[tuple[Tensor, list[Tensor]]] = []
        steps: Sequence[Tensor] = ()
        for direction in range(network.directions):
            index = number * network.directions + direction
            weights = network.weights(index)
            steps = torch.unbind(F.linear(inputs, weights.input, weights.input_bias), 0)
            state = states[index]
            outputs = []
            for step in reversed(steps) if direction else steps:
                state = cell(step, state, weights)
                outputs.append(state[0] if isinstance(state, tuple) else state)
            finals.append(state)
            made.append((torch.stack(outputs[::-1] if direction else outputs, 0), outputs))
        inputs = made[0][0] if len(made) == 1 else torch.cat([output for output, _ in made], -1)
        del made, steps, step, outputs
        inputs = network.dropped(inputs, number)
    return inputs, finals


def _lstm_cell(step: Tensor, state: tuple[Tensor, Tensor], weights: _Weights) -> tuple[Tensor, Tensor]:
    """RNN.cpp, `LSTMCell`."""
    hidden, cell = state
    gates = weights.hidden_product(hidden).add_(step).unsafe_chunk(4, 1)
    entry, forget, candidate, exit_ = (
        gates[0].sigmoid_(),
        gates[1].sigmoid_(),
        gates[2].tanh_(),
        gates[3].sigmoid_(),
    )
    cell = (forget * cell).add_(entry * candidate)
    return weights.projected(exit_ * cell.tanh()), cell


def _gru_cell(step: Tensor, state: Tensor, weights: _Weights) -> Tensor:
    """RNN.cpp, `GRUCell`."""
    inputs = step.unsafe_chunk(3, 1)
    hidden = weights.hidden_product(state).unsafe_chunk(3, 1)
    reset = hidden[0].add_(inputs[0]).sigmoid_()
    update = hidden[1].add_(inputs[1]).sigmoid_()
    candidate = inputs[2].add(hidden[2].mul_(reset)).tanh_()
    return (state - candidate).mul_(update).add_(candidate)


def _simple_cell(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, _Weights], Tensor]:
    """RNN.cpp, `SimpleCell`."""
    return lambda step, state, weights: activation(weights.hidden_product(state).add_(step))


def _rnn_layer(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Output, last state, last cell, and the bytes oneDNN keeps for the backward (ATen/native/mkldnn/RNN.cpp)."""
    layer_input, hidden = args[0], args[5]

    def kept_bytes() -> int:
        with real_execution():
            return func(*map_tensors(args, real_like))[3].numel()

    key = ("kept bytes", *signature(func, args, kwargs))
    output = layer_input.new_empty((*layer_input.shape[:2], hidden.size(-1)))
    kept = layer_input.new_empty((measured_once(key, kept_bytes),), dtype=torch.uint8)
    return output, torch.empty_like(hidden), torch.empty_like(hidden), kept


def _rnn_layer_backward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gradients of the input, the two weights, the two biases, the state and the cell, in float32 for every dtype."""
    biases = [args[1].new_empty(args[1].size(0), dtype=torch.float32) for _ in range(2)]
    made = [tensor.new_empty(tensor.shape, dtype=torch.float32) for tensor in (*args[:3], *args[5:7])]
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

    return measured_once(signature(func, args, kwargs), probe)


# -- CUDA: cuDNN runs all layers, steps and directions as one op -----------------------------------------------


_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_RESERVED = {0: 1, 1: 1, 2: 6, 3: 5}
"""Values kept per hidden unit and step: gates, cell and hidden states."""
_RESERVE_NOTE = (
    "recurrent layers: cuDNN's reserve space is its own choice; "
    "it is estimated as the gates and states of every layer and step"
)


def _cudnn_recurrent(name: str) -> Any:
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
        context.note(_RESERVE_NOTE)
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


FUNCTIONS = {
    "cpu": {
        "_pack_padded_sequence": _pack,
        "lstm": _cpu_lstm,
        "gru": _composed(_gru_cell),
        "rnn_tanh": _composed(_simple_cell(torch.tanh)),
        "rnn_relu": _composed(_simple_cell(torch.relu)),
    },
    "cuda": {"_pack_padded_sequence": _pack, **{name: _cudnn_recurrent(name) for name in _MODES}},
}
KERNELS = {
    "cpu": {
        "aten.mkldnn_rnn_layer.default": _rnn_layer,
        "aten.mkldnn_rnn_layer_backward.default": _rnn_layer_backward,
    },
    "cuda": {
        "aten._cudnn_rnn.default": _cudnn_rnn,
        "aten._cudnn_rnn_backward.default": _cudnn_rnn_gradients,
    },
}
WORKSPACES = {
    "cpu": {
        "aten.mkldnn_rnn_layer.default": probed,
        "aten.mkldnn_rnn_layer_backward.default": _rnn_layer_backward_workspace,
    }
}
