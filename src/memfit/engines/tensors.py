"""Tensors as strided views of storages, and the tensors that an op writes to.

Note [Distributed tensors]: a DTensor, and the result of a collective that nobody has waited for, are around a tensor of
this rank. Plans are made from the ops on those, so a mode leaves an op on the outer ones to them (`is_outer`) and sees
what they run. What autograd packs is the outer tensor: whose storage it is, where it lies and what values it has is
asked of the local one, and what is given back is of the outer kind again. Collectives of a unit are ops like others:
one that is recomputed runs on all ranks in the order of the forward, because these have the same policies
(`mesh_agreement.py`); one that is saved is answered for. That a result has arrived is none of a plan's ops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from memfit.torch_private.dispatch import DisableTorchDispatch, schema_of
from memfit.torch_private.distributed_tensors import is_distributed, local_tensor, without_graph
from memfit.torch_private.storages import storage_key
from memfit.torch_private.wrappers import fully_shard_parameters, is_fully_sharded
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
    tensor = local_tensor(tensor)
    return StridedView(tensor.dtype, tensor.device, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def local_key(tensor: torch.Tensor) -> int:
    """Return the key of the storage that this rank holds of a tensor."""
    return storage_key(local_tensor(tensor))


def is_outer(types: Any) -> bool:
    """Return whether an op is on distributed tensors, which run others on what they hold."""
    return bool(types) and any(map(is_distributed, types))


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor cut off from its graph, by an op that no mode sees."""
    if is_distributed(type(tensor)):
        return without_graph(tensor)
    guard = DisableTorchDispatch()
    try:
        return tensor.detach()
    finally:
        del guard


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
