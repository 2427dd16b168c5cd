"""Layouts and storages of ops on images that torch's meta kernels get wrong, or do not know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext
from memfit.capture.rules.layout import bytes_of, suggested_format

_FORMAT_KEEPERS = (
    "pixel_shuffle",
    "pixel_unshuffle",
    "max_unpool2d",
    "reflection_pad2d",
    "replication_pad2d",
    "replication_pad3d",
)


def _keeps_format(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """On CPU the result is laid out as the input suggests (ATen/native/PixelShuffle.cpp, ReflectionPad.cpp, ...)."""
    result = func(*args, **kwargs)
    return torch.empty_like(result, memory_format=suggested_format(args[0]))


def _resized(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The result is first made as large as the input; shrinking it keeps that storage (ATen/native/Col2Im.cpp)."""
    result = func(*args, **kwargs)
    if bytes_of(result) >= bytes_of(args[0]):
        return result
    return result.new_empty(args[0].numel()).as_strided(result.shape, result.stride())


def _resized_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> int:
    """What is too small for the result is freed once that has its own memory (ATen/native/Im2Col.cpp)."""
    return bytes_of(args[0]) if bytes_of(args[0]) < bytes_of(result) else 0


def _gradient_of_second(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The gradient of the op's input, for which torch has no meta kernel."""
    return args[1].new_empty(args[1].shape)


def _on_one_device(context: RuleContext, *args: Any, **kwargs: Any) -> Any:
    """A window of known values meets a signal without any: by now neither has."""
    return NotImplemented


_RESIZED = ("aten.im2col.default", "aten.col2im.default")
_WITHOUT_META = ("aten.fractional_max_pool3d_backward.default", "aten.multi_margin_loss_backward.default")

FUNCTIONS = {device: dict.fromkeys(("stft", "istft"), _on_one_device) for device in ("cpu", "cuda")}
KERNELS = {
    device: {**dict.fromkeys(_RESIZED, _resized), **dict.fromkeys(_WITHOUT_META, _gradient_of_second)}
    for device in ("cpu", "cuda")
}
KERNELS["cpu"] |= {f"aten.{name}.default": _keeps_format for name in _FORMAT_KEEPERS}
WORKSPACES = {device: dict.fromkeys(_RESIZED, _resized_workspace) for device in ("cpu", "cuda")}
