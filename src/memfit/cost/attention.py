"""Fused attention on a GPU, by backend: what short sequences, masks and idle multiprocessors cost."""

from __future__ import annotations

import math

from memfit.capture import Op
from memfit.cost.products import count_waves
from memfit.hardware import Device, kernel_figures

_HOPPER, _BLACKWELL, _CONSUMER = (9, 0), (10, 0), (12, 0)
_BLOCK_ROWS = 128
_DIMS = 4


def attention_ms(op: Op, flops: int, device: Device, flops_per_s: float, *, causal: bool) -> float:
    """Milliseconds at the rate of long sequences with FlashAttention-2; a family says what part of the peak that is."""
    if not flops:
        return 0.0
    figures, backward = kernel_figures().attention, "backward" in op.name
    compute_ms = flops / (flops_per_s * backend_speed(op.name, device)) * 1e3
    if causal:
        compute_ms /= figures.causal_backward if backward else figures.causal
    place = 1 if backward else 0
    if len(op.inputs) < place + 2 or len(op.inputs[place].shape) != _DIMS:
        return compute_ms
    query, keys = op.inputs[place].shape, op.inputs[place + 1].shape[-2]
    compute_ms *= 1 + (figures.length_backward if backward else figures.length) / max(1, keys)
    if device.multiprocessors:
        blocks = query[0] * query[1] * math.ceil(query[2] / _BLOCK_ROWS)
        tail = kernel_figures().tensor.tail
        compute_ms *= count_waves(blocks, device.multiprocessors, tail) / (blocks / device.multiprocessors)
    return compute_ms


def backend_speed(name: str, device: Device) -> float:
    """How fast the backend of an op is beside FlashAttention-2 on the same device."""
    figures, backward = kernel_figures().attention, "backward" in name
    capability = device.compute_capability or (0, 0)
    if "flex_attention" in name:
        return figures.flex_backward if backward else figures.flex
    if "efficient" in name:
        return figures.efficient_hopper if capability >= _HOPPER else figures.efficient
    if "cudnn" not in name or device.vendor != "NVIDIA" or capability < _HOPPER or capability >= _CONSUMER:
        return figures.cudnn if "cudnn" in name else 1.0
    if capability >= _BLACKWELL:
        return figures.cudnn_blackwell
    return figures.cudnn_hopper_backward if backward else figures.cudnn_hopper
