"""Tensors as strided views of storages, and the tensors that an op writes to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from memfit.plans import is_fully_sharded
from memfit.torch_private.dispatch import schema_of
from memfit.torch_private.storages import storage_key
from memfit.torch_private.wrappers import fully_shard_parameters
from memfit.tradeoff import UPDATES


class StridedView(NamedTuple):
    """Where a tensor lies in its storage, from which it can be made anew."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that lies there."""
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        return made.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]

    @property
    def end_bytes(self) -> int:
        """Where the last element ends in the storage."""
        if 0 in self.size:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize


def strided_view_of(tensor: torch.Tensor) -> StridedView:
    """Return where this tensor lies."""
    return StridedView(tensor.dtype, tensor.device, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def is_strided(value: Any) -> bool:
    """Return whether a value is a tensor with strides, which sparse ones do not have."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but a strided view of a storage."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not (
        tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg()
    )


# -- What an op writes to, also where its schema does not say so -------------------------------------------------------


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an op writes to, running statistics included."""
    found: list[Any] = []
    if schema_of(func).is_mutable:
        for position, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                found += value if isinstance(value, list | tuple) else [value]
    elif str(func) in UPDATES:
        positions, training = UPDATES[str(func)]
        if training is None or args[training]:
            found += [args[position] for position in positions]
    return [each for each in found if isinstance(each, torch.Tensor) and each.layout is torch.strided]


def gathered_parameters(unit: nn.Module) -> set[int]:
    """Return the storages into which `fully_shard` gathers parameters of a unit and of modules in it.

    They are kept from step to step, empty between gathers, and every run of the unit gathers anew.
    """
    found: set[int] = set()
    for module in unit.modules():
        if is_fully_sharded(module):
            for parameter in fully_shard_parameters(module):
                found.update(storage_key(each) for each in parameter.all_gather_outputs)
    return found
