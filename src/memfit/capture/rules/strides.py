"""Layouts that torch's meta kernels get wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import RuleContext

_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "atan2")
_LOW = (torch.float16, torch.bfloat16)


def _expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.size(), strict=True))


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in _LOW:
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=torch.float32, device="meta")


def _binary(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """An expanded operand has no say in the result's layout (ATen/TensorIterator.cpp, `reorder_dimensions`).

    The meta kernel converts 16-bit operands to float32, which makes an expanded one contiguous, and lets it
    decide.
    """
    result = func(*args, **kwargs)
    operands = [value for value in args if isinstance(value, Tensor)]
    if result.dtype in _LOW and len(operands) > 1 and any(map(_expanded, operands)):
        strides = func(*map(_widened, args), **kwargs).stride()
        if strides != result.stride():
            return torch.empty_strided(result.size(), strides, dtype=result.dtype, device="meta")
    return result


KERNELS = {device: {f"aten.{name}.Tensor": _binary for name in _BINARY} for device in ("cpu", "cuda")}
