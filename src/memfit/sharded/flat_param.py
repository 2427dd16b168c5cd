"""The parameters of a unit that have one dtype: their shard, their gathered buffer, and where modules hold them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memfit.errors import StateError
from memfit.sharded.comm import ShardComm, Transfer
from memfit.sharded.custom_comm import gather_by
from memfit.sharded.earlier_optimizers import give_up
from memfit.sharded.flat_dtensor import FlatDTensor, FlatSpec
from memfit.sharded.model_parallel import ModelParallelSpec
from memfit.sharded.streams import Streams
from memfit.sharding import FlatLayout, Part
from memfit.torch_private.autograd import set_version_counters, version_of
from memfit.torch_private.distributed_tensors import local_tensor
from memfit.torch_private.modules import parameter_table


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlot:
    """Where a module holds a parameter."""

    module: nn.Module
    attribute: str

    def put(self, parameter: nn.Parameter) -> None:
        """Hold another parameter; modules that keep lists of theirs, such as nn.LSTM, are told."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            parameter_table(self.module)[self.attribute] = parameter
        else:
            setattr(self.module, self.attribute, parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One parameter and every place that holds it."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    places: tuple[ParameterSlot, ...]


class FlatShard:
    """Parameters of one dtype in one flat layout, this rank's part of which is `shard`.

    `parameters` are those that the user and the optimizer see: flat DTensors around views of the shard, once it has
    taken over from the model's own.
    """

    def __init__(
        self,
        members: Sequence[Member],
        link: ShardComm,
        device: torch.device,
        compute_device: torch.device,
        streams: Streams,
        mesh: DeviceMesh,
        value: Callable[[Member], torch.Tensor],
        inners: Sequence[ModelParallelSpec | None],
        *,
        dtype: torch.dtype | None = None,
        pin_memory: bool = True,
    ) -> None:
        self.layout = FlatLayout.of(
            ((member.names, local_tensor(member.parameter.detach()).shape) for member in members), link.ranks
        )
        self.inners = inners
        self.link = link
        self.device = compute_device
        self.model_dtype = members[0].parameter.dtype
        self.dtype = dtype if dtype is not None and self.model_dtype.is_floating_point else self.model_dtype
        self.parameters = [member.parameter for member in members]
        self.places = [member.places for member in members]
        self.parts: list[Part] = [self.layout.part(slot, link.rank) for slot in self.layout.slots]
        self.flat_specs = [
            FlatSpec.of(slot, self.layout, link, mesh, compute_device, inner)
            for slot, inner in zip(self.layout.slots, inners, strict=True)
        ]
        self.shard = torch.zeros(
            self.layout.shard_elements,
            dtype=self.dtype,
            device=device,
            pin_memory=pin_memory and device.type == "cpu" and compute_device.type == "cuda",
        )
        self.listener: Callable[[int, torch.Tensor], None] | None = None
        self._addresses = [
            self.shard.data_ptr() + part.at * self.shard.element_size() if part.elements else 0 for part in self.parts
        ]
        self.custom_all_gather: Any = None
        self._streams = streams
        self._unsharded: dict[torch.dtype, UnshardedParams] = {}
        self._kept: torch.Tensor | None = None
        self._kinds = [type(member.parameter) for member in members]
        for member, part in zip(members, self.parts, strict=True):
            block = local_tensor(value(member))
            self.shard[part.at : part.at + part.elements].copy_(block.reshape(-1)[part.begin : part.end])

    @property
    def trains(self) -> bool:
        """Whether any of the parameters needs a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def changes(self) -> int:
        """How often the parameters were changed in place."""
        # ops on a DTensor are counted there, those on the shard and on `to_local()` here
        return version_of(self.shard) + sum(version_of(parameter) for parameter in self.parameters)

    def join(
        self,
        names: Sequence[tuple[str, ...]],
        link: ShardComm,
        mesh: DeviceMesh,
        inners: Sequence[ModelParallelSpec | None],
    ) -> None:
        """Belong to a model around its own, in which the parameters have these names."""
        slots = tuple(replace(slot, names=every) for slot, every in zip(self.layout.slots, names, strict=True))
        self.layout = replace(self.layout, slots=slots)
        self.link, self.inners = link, inners
        self.flat_specs = [
            type(spec).of(slot, self.layout, link, mesh, self.device, inner)
            for spec, slot, inner in zip(self.flat_specs, slots, inners, strict=True)
        ]
        for parameter, spec in zip(self.parameters, self.flat_specs, strict=True):
            for each in (parameter, parameter.grad):
                if isinstance(each, FlatDTensor):
                    each.flat_spec = spec

    def use_streams(self, streams: Streams) -> None:
        """Use the side streams of a model around its own."""
        self._streams = streams

    def local(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of one parameter in a tensor that is laid out as the shard is."""
        part = self.parts[number]
        return flat[part.at : part.at + part.elements]

    def take_over(self) -> None:
        """Put flat DTensors in the place of the model's parameters, whose whole data is given up."""
        for number, parameter in enumerate(self.parameters):
            with torch.no_grad():
                made = nn.Parameter(self.sharded_value(number), requires_grad=parameter.requires_grad)
            made.__dict__.update(_attributes(parameter))
            self.parameters[number] = made
            give_up(parameter, made)
        self.to_sharded()

    def sharded_value(self, number: int) -> FlatDTensor:
        """Return a parameter as the DTensor around its part of the shard."""
        return self.flat_specs[number].wrap(self.local(number, self.shard))

    def unsharded(self, dtype: torch.dtype) -> UnshardedParams:
        """Return the gathered parameters in a dtype; one rank alone computes on its shard."""
        found = self._unsharded.get(dtype)
        if found is None:
            if self.link.ranks == 1 and dtype == self.dtype and self.shard.device == self.device:
                found = UnshardedParams(self.layout, self.shard, self.inners, owned=False)
            else:
                found = UnshardedParams.empty(self.layout, dtype, self.device, self.inners)
            for parameter, kind in zip(found.parameters, self._kinds, strict=True):
                if kind is not nn.Parameter and type(parameter) is nn.Parameter:  # a class that only names it
                    parameter.__class__ = kind
            if self.listener is not None and (dtype.is_floating_point or dtype.is_complex):
                for number, parameter in enumerate(found.parameters):
                    parameter.requires_grad_(True)
                    parameter.register_post_accumulate_grad_hook(self._grad_hook(number))
            self._unsharded[dtype] = found
        found.require_gradients([parameter.requires_grad for parameter in self.parameters])
        return found

    def unshard(self, unsharded: UnshardedParams, tag: int, about: str) -> Transfer | None:
        """Begin to fill the buffer; None where nothing has to move."""
        self._kept = None
        if not unsharded.bytes:
            return None
        streams = self._streams
        unsharded.allocate()
        for stream in (streams.prepare, streams.gather):
            streams.after_current(stream)
        with torch.no_grad(), streams.on(streams.prepare):
            self.link.part(unsharded.buffer).copy_(self.shard, non_blocking=True)
            prepared = streams.event(streams.prepare)
        with streams.on(streams.gather):
            streams.wait(prepared)
            return self._gather(self.link, unsharded.buffer, tag, about)

    def keep_part(self, unsharded: UnshardedParams, link: ShardComm) -> None:
        """Keep this rank's part in a smaller group of the gathered parameters, and free them."""
        self._kept = link.part(unsharded.buffer).clone()
        unsharded.free()

    def begin_regather(self, unsharded: UnshardedParams, link: ShardComm, tag: int, about: str) -> Transfer | None:
        """Begin to gather from the ranks of a smaller group, which kept parts of the forward's parameters."""
        if self._kept is None:
            return self.unshard(unsharded, tag, about)
        streams = self._streams
        unsharded.allocate()
        with torch.no_grad():
            kept, self._kept = self._kept, None
            link.part(unsharded.buffer).copy_(kept)
        streams.after_current(streams.gather)
        with streams.on(streams.gather):
            return self._gather(link, unsharded.buffer, tag, about)

    def _gather(self, link: ShardComm, buffer: torch.Tensor, tag: int, about: str) -> Transfer | None:
        if self.custom_all_gather is None:
            return link.gather(buffer, tag, about)
        with torch.no_grad():
            gather_by(self.custom_all_gather, link, buffer, about)
        return None

    def to_unsharded(self, unsharded: UnshardedParams) -> None:
        """Set the gathered parameters on the modules."""
        for number, (places, parameter) in enumerate(zip(self.places, unsharded.parameters, strict=True)):
            for place in places:
                held = parameter_table(place.module).get(place.attribute)
                if held is not self.parameters[number] and held is not parameter and not self._gathers(number, held):
                    raise StateError(
                        f"module parameter {self.layout.slots[number].names[0]!r} was replaced after shard, by "
                        "torch.func.functional_call or an assignment; change values inside of "
                        "memfit.sharded.full_parameters(model, write_back=True)"
                    )
                place.put(parameter)

    def to_sharded(self) -> None:
        """Set the shards on the modules."""
        for places, parameter in zip(self.places, self.parameters, strict=True):
            for place in places:
                place.put(parameter)

    def _gathers(self, number: int, held: object) -> bool:
        """Return whether a tensor is the gathered parameter in another dtype."""
        return any(held is unsharded.parameters[number] for unsharded in self._unsharded.values())

    def free(self) -> None:
        """Free the buffer's memory; the parameters stay valid objects."""
        self._kept = None
        for unsharded in self._unsharded.values():
            unsharded.free()

    def realign(self) -> None:
        """Make every parameter a view of the shard, as `own` does."""
        for number, (parameter, address) in enumerate(zip(self.parameters, self._addresses, strict=True)):
            assert isinstance(parameter, FlatDTensor)
            if parameter.local.data_ptr() != address:
                self.own(number)

    def own(self, number: int) -> torch.Tensor:
        """Return the shard of one parameter; values that a user put in place of its data are taken over first."""
        parameter, part = self.parameters[number], self.parts[number]
        assert isinstance(parameter, FlatDTensor)
        local = self.local(number, self.shard)
        if parameter.local.data_ptr() == local.data_ptr() or not part.elements:
            return local
        if parameter.dtype != self.dtype or parameter.local.shape != local.shape or parameter.device != local.device:
            raise StateError(
                f"parameter {self.layout.slots[number].names[0]!r} was {self.dtype} on {local.device} with "
                f"{part.elements} elements here, and is {parameter.dtype} on {parameter.device} with "
                f"{parameter.local.numel()} now; change dtype or device before shard, and values inside of "
                "memfit.sharded.full_parameters(model, write_back=True)"
            )
        local.copy_(parameter.local)
        parameter.local = local
        return local

    def _grad_hook(self, number: int) -> Callable[[torch.Tensor], None]:
        """Return the hook of a gathered parameter; it keeps no model alive, as gc cannot see through autograd."""
        reference = weakref.ref(self)

        def collect(parameter: torch.Tensor) -> None:
            flat = reference()
            if flat is not None and flat.listener is not None:
                flat.listener(number, parameter)

        return collect


# -- The gathered parameters of a unit: views of one flat buffer whose memory comes and goes --------------------------
#
# Note [Aliases] Autograd keeps parameters, and views of them, between forward and backward. They share the buffer's
# storage object, so that its memory can be freed and allocated again under them, as FSDP2 does. The parameters have
# version counters of their own, which are raised while they are not gathered: autograd, which compares them before
# it reads a tensor that it kept, then says that the tensor was modified. This happens to what leaves a unit by
# another way than its return value, such as a loss kept as an attribute: its backward may begin before that of the
# unit. So does a change of the parameters between forward and backward.


def _attributes(parameter: nn.Parameter) -> dict[str, object]:
    """Return what users put on a parameter; a subclass keeps its inner tensors there, too, which every copy has."""
    own = set() if type(parameter) is nn.Parameter else set(parameter.detach().__dict__)
    return {name: value for name, value in parameter.__dict__.items() if name not in own}


class UnshardedParams:
    """A flat buffer in one dtype and the parameters that are its views."""

    def __init__(
        self, layout: FlatLayout, buffer: torch.Tensor, inners: Sequence[ModelParallelSpec | None], *, owned: bool
    ) -> None:
        self.buffer = buffer
        self._owned = owned
        self._bytes = buffer.untyped_storage().nbytes()
        with torch.inference_mode(False), torch.no_grad():
            blocks = [buffer.data[slot.begin : slot.end].view(slot.shape) for slot in layout.slots]
            self.parameters = [
                nn.Parameter(block if inner is None else inner.wrap(block), requires_grad=False)
                for block, inner in zip(blocks, inners, strict=True)
            ]
        # autograd may keep a DTensor, or the tensor in it
        inside = [block for block, inner in zip(blocks, inners, strict=True) if inner is not None]
        self._tensors: tuple[torch.Tensor, ...] = (*self.parameters, *inside)
        self._versions = tuple(version_of(tensor) for tensor in self._tensors)
        self.changes = 0
        """How often the shards had been changed when they were gathered for a forward."""
        self.free()

    @classmethod
    def empty(
        cls, layout: FlatLayout, dtype: torch.dtype, device: torch.device, inners: Sequence[ModelParallelSpec | None]
    ) -> UnshardedParams:
        """Build one with a buffer of its own, without memory for now."""
        with torch.inference_mode(False):
            return cls(layout, torch.empty(layout.elements, dtype=dtype, device=device), inners, owned=True)

    @property
    def bytes(self) -> int:
        """Bytes of the buffer when it has memory; none where the parameters are views of the shard itself."""
        return self._bytes if self._owned else 0

    @property
    def allocated(self) -> bool:
        return not self._owned or self.buffer.untyped_storage().nbytes() > 0

    def holds(self, address: int) -> bool:
        """Return whether memory at this address is going to be freed."""
        return bool(self.bytes) and 0 <= address - self.buffer.data_ptr() < self.bytes

    def allocate(self) -> None:
        """Allocate the buffer's memory."""
        if not self.allocated:
            self.buffer.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        """Free the buffer's memory; the parameters stay valid objects."""
        if self._owned:
            self.buffer.untyped_storage().resize_(0)
            self.hide()

    def hide(self) -> None:
        """Make autograd refuse to read the parameters, by raising their version counters."""
        set_version_counters(self._tensors, tuple(version + 1 for version in self._versions))

    def reveal(self) -> None:
        """Let autograd read the parameters, which are gathered."""
        set_version_counters(self._tensors, self._versions)

    def require_gradients(self, wanted: Sequence[bool]) -> None:
        """Make the same parameters need gradients as of the shards."""
        for parameter, requires_grad in zip(self.parameters, wanted, strict=True):
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
