"""How long the ops of a joint graph take, by the figures of the device: the same graph gives the same times everywhere.

A kernel of its own takes the longer of its arithmetic and its memory traffic. An op that Inductor fuses takes its
arithmetic; what a fused kernel reads and writes is counted with its buffers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from memfit.hardware import Device
from memfit.torch_private.dispatch import OpOverload
from memfit.torch_private.pytree import tree_leaves, tree_map_only

_FUNCTIONS = frozenset({"cos", "erf", "exp", "expm1", "gelu", "log", "log1p", "pow", "sigmoid", "sin", "tanh"})
_FUNCTIONS |= frozenset({"inductor_random", "rsqrt", "sqrt", "div", "reciprocal"})
_FUNCTION_FLOPS = 16
"""What a function that is a polynomial in the kernel counts for, beside 1 for an addition."""
_EFFICIENCY = 0.5
"""The part of the device's arithmetic that products of ordinary sizes reach."""


class OpTimes:
    """Milliseconds of the nodes of a joint graph on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.ms_per_byte = 1e3 / device.memory_bandwidth_bytes_per_s

    def __call__(self, node: fx.Node, is_extern: bool) -> float:
        """Return the milliseconds of a node that is a kernel of its own, or of its arithmetic in a fused one."""
        results = [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, torch.Tensor)]
        if not results:
            return 0.0
        rate = self._device.peak_flops_per_s(results[0].dtype if results[0].is_floating_point() else torch.float32)
        ms_per_flop = 1e3 / (rate * _EFFICIENCY)
        operands = [each.meta.get("val") for each in node.all_input_nodes]
        tensors = [each for each in operands if isinstance(each, torch.Tensor)]
        if is_extern:
            moved = sum(each.numel() * each.element_size() for each in (*tensors, *results))
            return max(_flops(node, tensors) * ms_per_flop, moved * self.ms_per_byte)
        each_flops = _FUNCTION_FLOPS if _name(node) in _FUNCTIONS else 1
        return max((each.numel() for each in (*tensors, *results)), default=0) * each_flops * ms_per_flop


def _name(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else str(node.target)


def _flops(node: fx.Node, tensors: list[torch.Tensor]) -> float:
    """Count with torch's own formulas, and attention on the CPU, for which it has none, by its products."""
    target: Any = node.target
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is not None:
        args, kwargs = tree_map_only(fx.Node, lambda each: each.meta.get("val"), (node.args, node.kwargs))
        return float(formula(*args, **kwargs, out_val=node.meta["val"]))
    if "scaled_dot_product" in _name(node):
        backward = "backward" in _name(node)
        query, key = tensors[1:3] if backward else tensors[:2]
        return (10 if backward else 4) * math.prod(query.shape) * key.shape[-2]
    return 0.0
