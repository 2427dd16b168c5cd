"""Windows onto storages: what is needed to make a tensor again from the bytes behind it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Window(NamedTuple):
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor that lies there."""
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        return made.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]

    @property
    def end_bytes(self) -> int:
        """Where the last element ends in the storage."""
        if 0 in self.size:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize


def window_of(tensor: torch.Tensor) -> Window:
    """Where this tensor lies."""
    return Window(tensor.dtype, tensor.device, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a window onto a storage."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not (
        tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg()
    )
