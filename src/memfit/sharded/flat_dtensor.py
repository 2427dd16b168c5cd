"""A parameter, gradient or optimizer state of a sharded model: a DTensor whose local tensor is flat.

Note [Flat DTensors]
To the optimizer, to `clip_grad_norm_`, to `torch.distributed.checkpoint` and to users it is a DTensor with the shape of
the whole tensor, sharded over the mesh. What it holds are elements `begin` up to `end` of the flattened tensor, a view
of the flat shard of its unit (docs/design/sharded.md says why), and not rows, as the placement `Shard(0)` would have
it: its placement is `FlatPlacement`. So DTensor's own rules do not run on it. Every op is one of these, or is refused:

- elementwise (`torch.Tag.pointwise`, `torch._foreach_*`, fused optimizers): on the local tensors
- a reduction over all elements: on the local tensors, then over the ranks; the result is a plain tensor
- `copy_`, from a whole tensor, from a DTensor of any placement, from another of its kind
- random numbers in its place or like it: those of the whole tensor are drawn on every rank, which keeps its own, so
  that a seed that all ranks share gives what one device would get

Anything else would see this rank's elements only. `full_tensor()`, and `redistribute` to placements of PyTorch's, give
what any op can run on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from memfit.errors import StateError
from memfit.sharded.boxes import Box, split_into_boxes
from memfit.sharded.comm import ShardComm
from memfit.sharded.flat_methods import attach_methods
from memfit.sharded.flat_ops import find_rule
from memfit.sharded.model_parallel import ModelParallelSpec
from memfit.sharding import FlatLayout, Slot
from memfit.torch_private.dispatch import DisableTorchFunction, disabled_torch_function
from memfit.torch_private.dtensor import DTensorSpec, LocalDTensor, make_spec, support_foreach

GATHER_TAG = (1 << 28) + 1


class FlatPlacement(Replicate):
    """The placement of a tensor whose flattened elements are divided between ranks, which no placement of PyTorch's is.

    To PyTorch's own functions it is `Replicate`, that is, they give and take the whole tensor: `distribute_tensor` like
    such a tensor is a whole one on every rank, and `copy_` takes it. They never take this rank's elements for rows.
    """

    def __repr__(self) -> str:
        return "FlatPlacement()"

    __str__ = __repr__


class LocalElements(torch.Tensor):
    """What `to_local` gives: this rank's elements, flat, into which a whole tensor can be copied, too.

    `torch.distributed.checkpoint.state_dict` loads a whole state so: `value.to_local().copy_(whole)`.
    """

    flat_spec: FlatSpec

    @classmethod
    def of(cls, local: torch.Tensor, spec: FlatSpec) -> LocalElements:
        """Return the same memory."""
        found = local.as_subclass(cls)
        found.flat_spec = spec
        return found

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle as a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy as a plain tensor."""
        made = memo[id(self)] = self.as_subclass(torch.Tensor).clone()
        return made

    @classmethod
    def __torch_function__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunction():
            if func is torch.Tensor.copy_ and isinstance(args[0], cls):
                spec = args[0].flat_spec
                if args[1].shape == spec.shape:
                    args = (args[0], spec.own(args[1]), *args[2:])
                elif args[1].shape == spec.slot.shape:  # the block of a tensor parallel rank
                    args = (args[0], spec.own_of_block(args[1]), *args[2:])
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatSpec:
    """Where the elements of a flat DTensor are: which ones are here, and how the others are reached.

    `device` is that of compute, where tensors are gathered; shards may be on the host. Where tensor or expert parallel
    has divided the tensor before, `inner` says how: then elements `begin` up to `end` are those of the flattened block
    of this rank, and `mesh` covers both (Note [Two meshes]).
    """

    slot: Slot
    layout: FlatLayout
    link: ShardComm
    mesh: DeviceMesh
    device: torch.device
    begin: int
    end: int
    inner: ModelParallelSpec | None = None
    dtensor_specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        slot: Slot,
        layout: FlatLayout,
        link: ShardComm,
        mesh: DeviceMesh,
        device: torch.device,
        inner: ModelParallelSpec | None = None,
    ) -> FlatSpec:
        """Return that of one parameter of a flat layout; `mesh` is the one that shards it."""
        part = layout.part(slot, link.rank)
        mesh = mesh if inner is None else inner.covering
        return cls(
            slot=slot, layout=layout, link=link, mesh=mesh, device=device, begin=part.begin, end=part.end, inner=inner
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatSpec:
        """Return itself: copies of a tensor are sharded over the same ranks."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor; that of the slot is of this rank's block."""
        return self.slot.shape if self.inner is None else self.inner.shape

    @property
    def links(self) -> tuple[ShardComm, ...]:
        """The groups along which other ranks have other elements."""
        return (self.link,) if self.inner is None else (self.link, *self.inner.links)

    def dtensor_spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Return what such a DTensor says of itself: replicas, then shards."""
        found = self.dtensor_specs.get(dtype)
        if found is None:
            found = make_spec(self.mesh, self.placements, self.shape, dtype)
            self.dtensor_specs[dtype] = found
        return found

    @property
    def placements(self) -> tuple[Placement, ...]:
        inner = () if self.inner is None else self.inner.placements
        return (*(Replicate() for _ in range(self.mesh.ndim - len(inner) - 1)), FlatPlacement(), *inner)

    def wrap(self, local: torch.Tensor) -> FlatDTensor:
        """Make a tensor of this rank's elements the DTensor that they are a part of."""
        made = FlatDTensor(local, self.dtensor_spec(local.dtype), requires_grad=False)  # pyrefly: ignore
        made.flat_spec = self
        return made

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a whole tensor."""
        return self.own_of_block(whole if self.inner is None else self.inner.block_of(whole))

    def own_of_block(self, block: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of its tensor parallel block, which is the whole tensor where there is none."""
        return block.reshape(-1)[self.begin : self.end]

    def gather(self, value: FlatDTensor) -> torch.Tensor:
        """Gather a whole tensor, outside of autograd."""
        block = self.gather_block(value)
        if self.inner is None:
            return block
        with torch.no_grad():
            return self.inner.wrap(block).full_tensor()

    def gather_block(self, value: FlatDTensor) -> torch.Tensor:
        """Gather this rank's tensor parallel block, which is the whole tensor where there is none."""
        link, layout = self.link, self.layout
        lengths = [layout.part(self.slot, rank).elements for rank in range(link.ranks)]
        longest = max(lengths)
        buffer = torch.zeros(longest * link.ranks, dtype=value.dtype, device=self.device)
        with torch.no_grad():
            link.part(buffer)[: self.end - self.begin].copy_(value.local.reshape(-1))
        link.gather(buffer, GATHER_TAG, f"gather of {self.slot.names[0]!r}").wait()
        parts = [buffer[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]
        return torch.cat(parts).view(self.slot.shape)

    def alike(self, other: FlatSpec) -> bool:
        """Return whether both have the same elements on every rank."""
        return self is other or (
            type(self) is type(other)
            and self.begin == other.begin
            and self.slot.begin == other.slot.begin
            and self.slot.shape == other.slot.shape
            and self.layout.elements == other.layout.elements
            and self.layout.ranks == other.layout.ranks
            and self.link.members == other.link.members  # a model around this one may have groups of its own
            and (other.inner is None if self.inner is None else self.inner.alike(other.inner))
        )


class FlatDTensor(LocalDTensor):
    """Has the shape of the whole tensor, and in `local` this rank's elements of it. See Note [Flat DTensors]."""

    flat_spec: FlatSpec

    __torch_function__ = disabled_torch_function  # pyrefly: ignore[bad-override]

    @property
    def begin(self) -> int:
        """The first of this rank's elements of the flattened tensor."""
        return self.flat_spec.begin

    @property
    def end(self) -> int:
        """The element after this rank's last one."""
        return self.flat_spec.end

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"FlatDTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', "
            f"elements {self.begin}:{self.end} of {self.flat_spec.slot.elements} here)"
        )

    def data_ptr(self) -> int:
        """Return 0, as other DTensors do: the memory is that of `local`, whose offset the storage here has, too."""
        return 0

    @property
    def data(self) -> FlatDTensor:
        """The values, outside of autograd. What is put in their place is copied: the memory is the flat shard's."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values.shape != self.shape or values.dtype != self.dtype:
            raise StateError(
                f"{self!r} cannot get data of shape {tuple(values.shape)} in {values.dtype}: change dtype, device or "
                "shape before shard"
            )
        with torch.no_grad():
            self.copy_(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatDTensor:
        made: Any = self.flat_spec.wrap(self.local.clone())
        if isinstance(self, nn.Parameter):  # whose copies have no gradient, torch's too
            return nn.Parameter(made, requires_grad=self.requires_grad)  # type: ignore[return-value]
        made.requires_grad_(self.requires_grad)
        return made

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Refuse a hook that would never run: the gradients of autograd are those of gathered parameters."""
        if isinstance(self, nn.Parameter):
            raise StateError(
                f"a hook of {self!r} would never run: autograd works out gradients of gathered parameters, which are "
                "summed over ranks then; register_post_accumulate_grad_hook runs after that, and may change them"
            )
        return super().register_hook(hook)

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        raise StateError(
            f"{self!r} cannot be pickled: the file would have this rank's elements only. Save with "
            "memfit.sharded.save or torch.distributed.checkpoint.save, or give torch.save the result of "
            "memfit.sharded.full_state_dict(model)"
        )

    # -- what DTensor has ------------------------------------------------------------------------------------------

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Gather the whole tensor on every rank; all ranks must call it."""
        if grad_placements is not None and any(not each.is_replicate() for each in grad_placements):
            raise StateError(f"the gradient of {self!r} must be whole on every rank: leave grad_placements out")
        return _Gather.apply(self) if self.requires_grad and torch.is_grad_enabled() else gather(self)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's elements, flat: a view, which changes with the tensor."""
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise StateError(f"the gradient of {self!r} is sharded as it is: leave grad_placements out")
        if self.requires_grad and torch.is_grad_enabled():
            return _ToLocal.apply(self)
        local = self.local.detach()
        return LocalElements.of(local, self.flat_spec) if type(local) is torch.Tensor else local

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Return a DTensor of PyTorch's own with these placements; all ranks must call it."""
        mesh = device_mesh or self.flat_spec.mesh
        wanted = self.flat_spec.placements if placements is None else tuple(placements)
        same = [Replicate()] * mesh.ndim
        return DTensor.from_local(self.full_tensor(), mesh, same, run_check=False).redistribute(mesh, wanted)

    # -- what torch.distributed.checkpoint asks for ------------------------------------------------------------------

    def _boxes(self) -> list[Box]:
        spec = self.flat_spec
        if 0 in spec.shape:  # a tensor without elements has one box, on every rank
            return [Box(offsets=(0,) * len(spec.shape), sizes=spec.shape)]
        boxes = split_into_boxes(spec.slot.shape, self.begin, self.end)
        if spec.inner is None:
            return boxes
        offset = spec.inner.offset
        return [
            Box(offsets=tuple(at + by for at, by in zip(box.offsets, offset, strict=True)), sizes=box.sizes)
            for box in boxes
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:  # as DTensor names it
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
                if type(self.local) is not torch.Tensor:  # rows of a subclass, which are one box
                    return self.local
                return self.local.reshape(-1)[begin : begin + elements].view(box.sizes)
            begin += elements
        raise StateError(f"{self!r} of {index.fqn!r} has no box that begins at {index.offset} on this rank")

    # -- ops ---------------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return find_rule(func)(func, args, kwargs or {})


support_foreach(FlatDTensor)
attach_methods(FlatDTensor)


def gather(value: FlatDTensor) -> torch.Tensor:
    """Gather the whole tensor, outside of autograd."""
    return value.flat_spec.gather(value)


class _Gather(torch.autograd.Function):
    """The whole tensor, whose gradient, the same on every rank, is sharded again."""

    @staticmethod
    def forward(ctx: Any, value: FlatDTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.flat_spec, ctx.device = value.flat_spec, value.device
        return gather(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.flat_spec.wrap(ctx.flat_spec.own(gradient).clone().to(ctx.device))


class _ToLocal(torch.autograd.Function):
    """This rank's elements, whose gradient is that of a flat DTensor."""

    @staticmethod
    def forward(ctx: Any, value: FlatDTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.flat_spec = value.flat_spec
        return value.local.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.flat_spec.wrap(gradient)
