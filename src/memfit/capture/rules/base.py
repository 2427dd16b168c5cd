"""What every rule is given, and the questions about layouts that many rules ask.

The layout questions are those of c10/core/TensorImpl.h and c10/core/MemoryFormat.h in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memfit.hardware import Device

Rule = Callable[..., Any]
LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """What a rule may know of the target, workspaces measured for it, and notes of what is estimated.

    `compiled` says that torch.compile has wrapped the whole model, `several_ranks` that the step is captured on a mesh.
    """

    device_type: str
    compute_capability: tuple[int, int] | None
    threads: int
    multiprocessors: int = 0
    vendor: str = "NVIDIA"
    compiled: bool = False
    several_ranks: bool = False
    notes: dict[str, None] = field(default_factory=dict)

    @classmethod
    def of(cls, device: Device, *, compiled: bool = False, several_ranks: bool = False) -> RuleContext:
        """Return what rules may know of a device."""
        return cls(
            device_type=device.type,
            compute_capability=device.compute_capability,
            threads=device.threads or torch.get_num_threads(),
            multiprocessors=device.multiprocessors or 0,
            vendor=device.vendor,
            compiled=compiled,
            several_ranks=several_ranks,
        )

    def note(self, text: str) -> None:
        """Say once, in the trace's notes, what is not exact."""
        self.notes[text] = None


def run_unchanged(context: RuleContext, *args: Any, **kwargs: Any) -> Any:
    """Let a torch function run as it is, once its arguments are meta tensors.

    For functions that compare the devices of their operands in C++: a strided view of known values and a signal without
    any, say. When a rule is called, all of them are meta tensors.
    """
    return NotImplemented


def input_gradient(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the gradient of an op's input, the second argument, where torch has no meta kernel for the backward."""
    return torch.empty(args[1].shape, dtype=args[1].dtype, device="meta")


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the tensor's elements, wherever they are."""
    return tensor.numel() * tensor.element_size()


def fills_its_memory(tensor: Tensor) -> bool:
    """Return whether the elements fill one block without gaps or overlap (c10, `is_non_overlapping_and_dense`)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions."""
_CHANNELS_LAST_ORDER = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}
"""Dimensions from the smallest stride to the largest."""


def suggested_format(tensor: Tensor) -> torch.memory_format:
    """Channels-last for strides in that order, with gaps or without (c10/core/MemoryFormat.h)."""
    order = _CHANNELS_LAST_ORDER.get(tensor.dim(), ())
    layout = CHANNELS_LAST.get(tensor.dim(), torch.contiguous_format)
    sizes, strides = tensor.size(), tensor.stride()
    least = 0
    for dim in order:
        if sizes[dim] == 0 or strides[dim] < least or strides[1] == 0 or (dim == 0 and least == strides[1]):
            return torch.contiguous_format
        least = strides[dim] * max(1, sizes[dim])
    return layout


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """Channels-last for what is, else contiguous (c10/core/TensorImpl.h, `suggest_memory_format`)."""
    layout = CHANNELS_LAST.get(tensor.dim())
    if layout is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=layout):
        return torch.contiguous_format
    return layout


def contiguous_copy(tensor: Tensor) -> int:
    """Return the bytes of the copy that `tensor.contiguous()` makes, 0 when it is contiguous already."""
    return 0 if tensor.is_contiguous() else bytes_of(tensor)


def format_copy(tensor: Tensor, layout: torch.memory_format) -> int:
    """Return the bytes of the copy that `tensor.contiguous(memory_format=layout)` makes, 0 when it has that layout."""
    return 0 if tensor.is_contiguous(memory_format=layout) else bytes_of(tensor)
