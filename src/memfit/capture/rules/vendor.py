"""CPU kernels whose internal allocations change with the machine, or are many small ones: measured once on this one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from memfit.capture.arguments import map_tensors, tensors_of
from memfit.capture.probe import probe_workspace, remembered, signature, vendor_has
from memfit.capture.rules import RuleContext
from memfit.capture.rules.layout import bytes_of
from memfit.torch_private.dispatch import schema_of

_PROBE_LIMIT_BYTES = 1 << 28
_PROBE_LIMIT_FLOPS = 1 << 35
_SVD_FLOPS = 20
"""For each element and each of the smaller side: as many as the slowest decomposition takes."""
_WEIGHTS = {"aten::convolution": 1, "aten::convolution_backward": 2}
"""The position of an operand without samples."""
DEPENDS_ON_VALUES = "{}: what it allocates inside itself may depend on values; measured on small ones"


def probed(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """oneDNN reorders operands into layouts that depend on the instruction set (ATen/native/mkldnn).

    A call that is too large or takes too long is measured on fewer samples.
    """
    return _probed(context, func, args, kwargs, result, _flops(func, args, kwargs, result))


def _probed(
    context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any, flops: int, matrix_dims: int = 0
) -> int:
    size = sum(map(bytes_of, tensors_of((*args, result))))
    share = max(size / _PROBE_LIMIT_BYTES, flops / _PROBE_LIMIT_FLOPS)
    if share <= 1:
        return _measured(func, args, kwargs)
    samples = args[0].size(0) if isinstance(args[0], Tensor) and args[0].dim() > matrix_dims else 0
    fewer = int(samples / share) // 4 * 4
    if fewer < 4:
        context.note(f"{func}: too large to run once here; what it allocates inside itself is not counted")
        return 0
    context.note(f"{func}: too large to run once here; what it allocates inside itself is scaled from fewer samples")
    whole, half = (_measured(func, _with_samples(func, args, fewer // part), kwargs) for part in (1, 2))
    return whole + math.ceil((whole - half) * (samples - fewer) / (fewer - fewer // 2))


def _measured(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    return remembered(signature(func, args, kwargs), lambda: probe_workspace(func, args, kwargs))


def _flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula is not None else 0


def _with_samples(func: Any, args: Any, count: int) -> tuple[Any, ...]:
    """The same call on the first `count` samples of every operand that has them."""
    samples, sizes = args[0].size(0), args[0].dim()

    def fewer(position: int, value: Any) -> Any:
        if position == _WEIGHTS.get(schema_of(func).name):
            return value
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == samples:
            return value[:count]
        whole_size = schema_of(func).arguments[position].name == "input_size" and len(value) == sizes
        return [count, *value[1:]] if whole_size else value

    return tuple(fewer(position, value) for position, value in enumerate(args))


def _not_counted(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    context.note(f"{func}: what the library allocates inside it is not counted")
    return 0


def _decomposition(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    context.note(DEPENDS_ON_VALUES.format(func))
    args = map_tensors(args, _valid_pivots)
    dims = 0 if "fft" in schema_of(func).name else 2
    return _probed(context, func, args, kwargs, result, _decomposition_flops(func, args), dims)


def is_slow_decomposition(func: Any, args: Any) -> bool:
    """Tell whether a decomposition has more to compute than a measurement of its workspace may take."""
    return _decomposition_flops(func, args) > _PROBE_LIMIT_FLOPS


def _decomposition_flops(func: Any, args: Any) -> int:
    if "fft" in schema_of(func).name:
        return 0
    matrices = (each for each in tensors_of(args) if each.dim() >= 2)
    return max((_SVD_FLOPS * each.numel() * min(each.shape[-2:]) for each in matrices), default=0)


def _valid_pivots(tensor: Tensor) -> Tensor:
    """Row numbers from 1, as the kernels check; other tensors are left to the probe."""
    return torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.dtype == torch.int32 else tensor


DECOMPOSITIONS = {"cpu": _decomposition, "cuda": _not_counted}


def _convolution(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Channels-last in, channels-last out (ATen/native/ConvUtils.h, `mkldnn_conv_use_channels_last`).

    ATen's own kernels for three dimensions are contiguous.
    """
    result = func(*args, **kwargs)
    vendor = result.dim() != 5 or _vendor_convolves(context, *args)
    if vendor and any(map(_channels_last, args[:2])):
        return torch.empty_like(result, memory_format=_FORMATS[result.dim()])
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _vendor_convolves(
    context: RuleContext, source: Tensor, weight: Tensor, _: Any, stride: Any, padding: Any, dilation: Any, *rest: Any
) -> bool:
    """Whether oneDNN convolves (ATen/native/Convolution.cpp, `ConvParams::use_mkldnn`)."""
    if source.dtype in _LOW:
        return vendor_has(source.dtype)
    plain = all(step == 1 for step in (*stride, *dilation)) and weight.shape[-2:] == (1, 1)
    wide = weight.size(-1) > 3 and weight.size(-2) > 3
    samples, groups = source.size(0), rest[-1]
    return (
        vendor_has(source.dtype)
        and (not plain or samples >= 16 or context.threads > 1)
        and (groups > 1 or wide or samples > 1 or math.prod(source.shape[:4]) > 20480)
    )


_LOW = (torch.bfloat16, torch.float16)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _channels_last(tensor: Tensor) -> bool:
    memory_format = _FORMATS.get(tensor.dim())
    return (
        memory_format is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format)
    )


_RESAMPLING = """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa max_pool3d_with_indices avg_pool3d
_adaptive_avg_pool3d adaptive_max_pool3d"""
"""Forward and backward: positions and weights of each output, and copies, by format and instruction set."""

KERNELS = {"cpu": {"aten.convolution.default": _convolution}}
WORKSPACES = {
    "cpu": {
        "aten.convolution.default": probed,
        "aten.convolution_backward.default": probed,
        "aten.mkldnn_rnn_layer.default": probed,
        **{f"aten.{name}{suffix}.default": probed for name in _RESAMPLING.split() for suffix in ("", "_backward")},
        "aten.sort.default": probed,
        "aten.sort.stable": probed,
        "aten._trilinear.default": probed,
        "aten.binary_cross_entropy.default": probed,
        "aten.binary_cross_entropy_backward.default": probed,
        "aten.soft_margin_loss.default": probed,
        "aten.soft_margin_loss_backward.default": probed,
    }
}
