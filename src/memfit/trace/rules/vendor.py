"""CPU kernels whose internal allocations change with the machine: measured once on this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.trace.arguments import tensors_of
from memfit.trace.probe import probe_workspace, remembered, signature
from memfit.trace.rules import RuleContext
from memfit.trace.rules.layout import bytes_of

_PROBE_LIMIT_BYTES = 1 << 28


def _probed(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """oneDNN reorders operands into layouts that depend on the instruction set (ATen/native/mkldnn)."""
    if sum(map(bytes_of, tensors_of((*args, result)))) > _PROBE_LIMIT_BYTES:
        context.note(f"{func}: too large to run once here; what it allocates inside itself is not counted")
        return 0
    return remembered(signature(func, args, kwargs), lambda: probe_workspace(func, args, kwargs))


def _not_counted(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    context.note(f"{func}: what the library allocates inside it is not counted")
    return 0


def _decomposition(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    context.note(f"{func}: what it allocates inside itself may depend on values; measured on small ones")
    return _probed(context, func, args, kwargs, result)


DECOMPOSITIONS = {"cpu": _decomposition, "cuda": _not_counted}


def _convolution(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Channels-last in, channels-last out (ATen/native/ConvUtils.h, `mkldnn_conv_use_channels_last`)."""
    result = func(*args, **kwargs)
    if any(map(_channels_last, args[:2])):
        return torch.empty_like(result, memory_format=_FORMATS[result.dim()])
    return torch.empty_like(result, memory_format=torch.contiguous_format)


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _channels_last(tensor: Tensor) -> bool:
    memory_format = _FORMATS.get(tensor.dim())
    return (
        memory_format is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format)
    )


KERNELS = {"cpu": {"aten.convolution.default": _convolution}}
WORKSPACES = {
    "cpu": {
        "aten.convolution.default": _probed,
        "aten.convolution_backward.default": _probed,
        "aten.mkldnn_rnn_layer.default": _probed,
        "aten.upsample_bilinear2d.default": _probed,
        "aten.upsample_bicubic2d.default": _probed,
        "aten._upsample_bilinear2d_aa.default": _probed,
        "aten._upsample_bicubic2d_aa.default": _probed,
        "aten.avg_pool2d_backward.default": _probed,
        "aten.sort.default": _probed,
        "aten.sort.stable": _probed,
    }
}
