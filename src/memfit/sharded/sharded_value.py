"""A tensor of a state dict whose elements lie on several ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from memfit.errors import StateError
from memfit.sharded.comm import ShardComm
from memfit.sharded.flat_param import Box, FlatShard, split_into_boxes
from memfit.sharded.runtime import ShardedRuntime
from memfit.sharded.unit import ShardedUnit, State
from memfit.sharding import FlatLayout, Slot
from memfit.torch_private.dispatch import disabled_torch_function
from memfit.torch_private.storages import make_wrapper_subclass

_TAG = (1 << 28) + 1
_aten = torch.ops.aten


class ShardedValue(torch.Tensor):
    """Has the shape of the whole tensor, and in `local` elements `begin` up to `end` of it, flattened.

    `torch.distributed.checkpoint` saves and loads it without a gather: `local` is a row of boxes. For all else gather
    it first; what would see this rank's elements only is refused.
    """

    local: torch.Tensor
    slot: Slot
    begin: int
    end: int
    _home: tuple[FlatLayout, ShardComm, torch.device]

    __torch_function__ = disabled_torch_function  # pyrefly: ignore[bad-override]

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, slot: Slot, layout: FlatLayout, link: ShardComm, gathered_on: torch.device
    ) -> ShardedValue:
        value = make_wrapper_subclass(cls, slot.shape, dtype=local.dtype, device=local.device)
        part = layout.part(slot, link.rank)
        value.local, value.slot, value._home = local, slot, (layout, link, gathered_on)
        value.begin, value.end = part.begin, part.end
        return value

    def __init__(
        self, local: torch.Tensor, slot: Slot, layout: FlatLayout, link: ShardComm, gathered_on: torch.device
    ) -> None:
        pass

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"ShardedValue(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', "
            f"elements {self.begin}:{self.end} of {self.slot.elements} here)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedValue:
        return self._like(self.local.clone())

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        raise StateError(
            f"{self!r} cannot be pickled: the file would have this rank's elements only. Save with "
            "memfit.sharded.save or torch.distributed.checkpoint.save, or give torch.save the result of "
            "memfit.sharded.full_state_dict(model)"
        )

    def full_tensor(self) -> torch.Tensor:
        """Gather the whole tensor on every rank; all ranks must call it."""
        layout, link, device = self._home
        lengths = [layout.part(self.slot, rank).elements for rank in range(link.ranks)]
        longest = max(lengths)
        buffer = torch.zeros(longest * link.ranks, dtype=self.dtype, device=device)
        link.part(buffer)[: self.end - self.begin].copy_(self.local)
        link.gather(buffer, _TAG, f"gather of {self.slot.names[0]!r}").wait()
        parts = [buffer[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]
        return torch.cat(parts).view(self.slot.shape)

    def local_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a whole tensor."""
        return whole.reshape(-1)[self.begin : self.end]

    def _like(self, local: torch.Tensor) -> ShardedValue:
        return ShardedValue(local, self.slot, *self._home)

    def _boxes(self) -> list[Box]:
        if not self.slot.elements:  # a tensor without elements has one box, on every rank
            return [Box(offsets=(0,) * len(self.slot.shape), sizes=self.slot.shape)]
        return split_into_boxes(self.slot.shape, self.begin, self.end)

    def __create_write_items__(self, fqn: str, value: ShardedValue) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self.local), size=self.shape
                ),
            )
            for box, chunk in zip(self._boxes(), self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        begin = 0
        for box in self._boxes():
            elements = math.prod(box.sizes)
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return self.local[begin : begin + elements].view(box.sizes)
            begin += elements
        raise StateError(f"{self!r} of {index.fqn!r} has no box that begins at {index.offset} on this rank")

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        value = args[0] if args else None
        if isinstance(value, ShardedValue):
            if func in _ALIKE:
                return value._like(func(value.local, *args[1:], **kwargs))
            if func in _IN_PLACE:
                func(value.local, *args[1:], **kwargs)
                return value
            if func is _aten.copy_.default and args[1].shape == value.shape:
                source = args[1]
                value.local.copy_(source.local if isinstance(source, ShardedValue) else value.local_of(source))
                return value
        raise StateError(
            f"{func} would see the elements of this rank only: {next(_sharded(args), value)!r}. Gather first: "
            "value.full_tensor(), memfit.sharded.full_state_dict(model), or `with full_parameters(model):`"
        )


_ALIKE = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
}
_IN_PLACE = {_aten.zero_.default, _aten.fill_.Scalar}


def _sharded(args: Sequence[Any]) -> Any:
    for each in args:
        if isinstance(each, ShardedValue):
            yield each


# -- What `state_dict` and `load_state_dict` of a sharded model give and take, under the original names ---------------
#
# Modules hold one-dimensional pieces, which would look like a state dict of a smaller model. Hooks on every module
# that holds one put a ShardedValue in their place, and take whole tensors.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A parameter that a module holds."""

    attribute: str
    unit: ShardedUnit
    flat: FlatShard
    number: int

    def value(self) -> ShardedValue:
        return sharded_value(self.flat, self.number, self.flat.own(self.number))


def attach_state(runtime: ShardedRuntime) -> None:
    """Make the modules of a sharded model give and take state as those of a plain model do."""
    held: dict[nn.Module, list[_Held]] = defaultdict(list)
    for unit in runtime.units:
        for flat in unit.flats:
            for number, places in enumerate(flat.places):
                for place in places:
                    held[place.module].append(_Held(attribute=place.attribute, unit=unit, flat=flat, number=number))
    for module, parameters in held.items():
        _attach(module, parameters)


def sharded_value(flat: FlatShard, number: int, local: torch.Tensor) -> ShardedValue:
    """Wrap a tensor that is laid out as one parameter of a flat shard, with the parameter's shape."""
    return ShardedValue(local, flat.layout.slots[number], flat.layout, flat.link, flat.device)


def _attach(module: nn.Module, parameters: list[_Held]) -> None:
    def give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for each in parameters:
            key = prefix + each.attribute
            if key in state and each.unit.state is not State.SUMMONED:
                state[key] = each.value()

    def take(
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for each in parameters:
            key = prefix + each.attribute
            given = state.get(key)
            if each.unit.state is State.SUMMONED or not isinstance(given, torch.Tensor):
                continue
            own = each.value()
            if metadata.get("assign_to_params_buffers"):
                errors.append(f"{key} is sharded and cannot be replaced; load without assign=True, which copies")
                metadata["assign_to_params_buffers"] = False
                state[key] = own.local
            elif given.shape != own.shape and not (own.dim() == 0 and given.shape == (1,)):
                errors.append(
                    f"size mismatch for {key}: copying a param with shape {given.shape} from checkpoint, the shape "
                    f"in current model is {own.shape}."
                )
                state[key] = own.local
            elif isinstance(given, ShardedValue):
                state[key] = given.local
            else:
                state[key] = own.local_of(given.full_tensor() if isinstance(given, DTensor) else given)

    module.register_state_dict_post_hook(give)
    module.register_load_state_dict_pre_hook(take)
