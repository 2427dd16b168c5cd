"""Parameters that are tensor subclasses, such as float8 or quantised weights: gathered as the subclass says.

Note [Extensions]
A subclass takes part by FSDP2's extension points, under FSDP2's names: `fsdp_pre_all_gather` turns a rank's part into
the plain tensors that are gathered, `fsdp_post_all_gather` makes the whole parameter of what came, the first time as a
new tensor, later in the one that it made. What modules hold while they run is what the subclass made, never a plain
tensor in its stead. Such methods count on rows: the part of a rank is a chunk of dimension 0, as with FSDP2, and not a
range of elements. So every such parameter has a layout of its own, whose ranks' shares are whole rows, and its local
tensor keeps its dimensions and its class. Its gradient is a plain tensor, summed and divided as any other.

The memory of what is gathered comes and goes under the tensors, as Note [Aliases] says: that of the gathered tensors,
and of the inner tensors that `fsdp_post_all_gather` names.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from memfit.errors import InputError, StateError
from memfit.sharded.comm import ShardComm, Transfer, wait_all
from memfit.sharded.flat_dtensor import GATHER_TAG, FlatDTensor, FlatSpec
from memfit.sharded.flat_param import FlatShard, Member, UnshardedParams
from memfit.sharded.streams import Streams
from memfit.sharding import FlatLayout, Slot
from memfit.torch_private.autograd import set_version_counters, version_of

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_PLAIN = (torch.Tensor, nn.Parameter)


# -- Which parameters are of a subclass, and which of those can be sharded --------------------------------------------


def is_subclass(tensor: torch.Tensor) -> bool:
    """Return whether a parameter is more than a plain tensor; a class that only names it is not, nor is a DTensor."""
    kind = type(tensor)
    if kind in _PLAIN or isinstance(tensor, DTensor):
        return False
    named_only = isinstance(tensor, nn.Parameter) and nn.Parameter in kind.__mro__
    own_function = kind.__torch_function__ is not nn.Parameter.__torch_function__
    return not named_only or own_function or hasattr(kind, _PRE) or "__torch_dispatch__" in _defined(kind)


def check_subclass(name: str, parameter: nn.Parameter, *, from_rank_0: bool) -> None:
    """Refuse a parameter of a subclass that would lose its class, with what to do about it."""
    kind = type(parameter).__name__
    if nn.parameter.is_lazy(parameter):
        raise InputError(
            f"parameter {name!r} of a lazy module has no shape yet; run the model once before shard, or build it with "
            "its sizes"
        )
    if not is_subclass(parameter):
        return
    found = [each for each in (_PRE, _POST) if hasattr(parameter, each)]
    if not found:
        raise InputError(
            f"parameter {name!r} is a {kind}, a tensor subclass that does not say how it is gathered, and would become "
            f"a plain tensor: give the class {_PRE} and {_POST}, FSDP2's extension points, leave the parameter whole "
            f"with ignored=[{name!r}], or make the {kind} after shard"
        )
    if len(found) == 1:
        raise InputError(f"parameter {name!r} is a {kind} with {found[0]} only; it needs both {_PRE} and {_POST}")
    arguments = len(inspect.signature(getattr(parameter, _PRE)).parameters)
    if arguments not in (1, 5):
        raise InputError(
            f"{_PRE} of {kind}, the class of parameter {name!r}, takes {arguments} arguments; it is called with (mesh) "
            "or with (mesh, outer_size, outer_stride, module, mp_policy)"
        )
    if not parameter.dim() or not parameter.numel():
        raise InputError(
            f"parameter {name!r} is a {kind} of shape {tuple(parameter.shape)}, which has no rows to divide between "
            f"ranks; leave it whole with ignored=[{name!r}]"
        )
    if from_rank_0:
        raise InputError(
            f"parameter {name!r} is a {kind}, whose values cannot be sent from rank 0; build the model with the same "
            "values on every rank, and leave from_rank_0 out"
        )


def _defined(kind: type) -> set[str]:
    """Return what a class and its bases above torch's define."""
    return {
        name for base in kind.__mro__ if base not in (*_PLAIN, torch.Tensor.__mro__[1], object) for name in vars(base)
    }


# -- The part of a rank: rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSpec(FlatSpec):
    """Where the rows of a DTensor are whose local tensor keeps its dimensions, and perhaps its class."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        inner = self.slot.shape[1:]
        return ((self.end - self.begin) // math.prod(inner), *inner)

    def wrap(self, local: torch.Tensor) -> FlatDTensor:
        """Make a tensor of this rank's rows, also a flat one, the DTensor that they are a part of."""
        return FlatSpec.wrap(self, local if local.shape == self.local_shape else local.view(self.local_shape))

    def own_of_block(self, block: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a whole tensor."""
        inner = math.prod(self.slot.shape[1:])
        return block.narrow(0, self.begin // inner, (self.end - self.begin) // inner)

    def gather_block(self, value: FlatDTensor) -> torch.Tensor:
        """Gather the whole tensor; a subclass is made anew of its inner tensors, where these have the same rows."""
        local = value.local.detach()
        if type(local) is torch.Tensor:
            return FlatSpec.gather_block(self, value)
        if not hasattr(local, "__tensor_flatten__"):
            raise StateError(
                f"{value!r} is a {type(local).__name__}, which cannot be gathered outside of a forward: its class has "
                "no __tensor_flatten__ and __tensor_unflatten__"
            )
        names, context = local.__tensor_flatten__()
        inner: dict[str, torch.Tensor] = {}
        for name in names:
            rows = getattr(local, name)
            if type(rows) is not torch.Tensor or not rows.dim() or rows.shape[0] != local.shape[0]:
                raise StateError(
                    f"{value!r} is a {type(local).__name__}, whose inner tensor {name!r} of shape "
                    f"{tuple(rows.shape)} has not the rows of the parameter, {local.shape[0]} here; it cannot be "
                    "gathered outside of a forward"
                )
            inner[name] = self._gather_rows(rows.to(self.device), name)
        stride = torch.empty(self.slot.shape, device="meta").stride()
        return type(local).__tensor_unflatten__(inner, context, torch.Size(self.slot.shape), stride)  # type: ignore

    def _gather_rows(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        chunk = -(-self.slot.shape[0] // self.link.ranks)
        whole = rows.new_empty((chunk * self.link.ranks, *rows.shape[1:]))
        whole.narrow(0, self.link.rank * chunk, rows.shape[0]).copy_(rows)
        about = f"gather of {name!r} in {self.slot.names[0]!r}"
        self.link.gather(whole.view(-1).view(torch.uint8), GATHER_TAG, about).wait()
        return whole.narrow(0, 0, self.slot.shape[0])


def _row_layout(member: Member, ranks: int) -> FlatLayout:
    """Return the layout of one parameter whose ranks keep whole rows."""
    shape = tuple(member.parameter.shape)
    slot = Slot(names=member.names, shape=shape, begin=0, end=math.prod(shape))
    chunk = -(-shape[0] // ranks)
    return FlatLayout(slots=(slot,), elements=chunk * math.prod(shape[1:]) * ranks, ranks=ranks)


class SubclassShard(FlatShard):
    """One parameter of a subclass; `shard` is this rank's rows of it, padded to as many as each rank has."""

    def __init__(
        self,
        member: Member,
        link: ShardComm,
        device: torch.device,
        compute_device: torch.device,
        streams: Streams,
        mesh: DeviceMesh,
        value: Callable[[Member], torch.Tensor],
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.layout = _row_layout(member, link.ranks)
        self.link = link
        self.device = compute_device
        self.dtype = self.model_dtype = member.parameter.dtype
        self.parameters = [member.parameter]
        self.places = [member.places]
        (slot,) = self.layout.slots
        self.parts = [self.layout.part(slot, link.rank)]
        spec = RowSpec.of(slot, self.layout, link, mesh, compute_device)
        assert isinstance(spec, RowSpec)
        self.flat_specs = [spec]
        self.inners = [None]
        self.listener = None
        self.custom_all_gather = None
        self.extension = _Extension(link, mesh, slot, member, policy)
        self._streams = streams
        self._unsharded: dict[torch.dtype, UnshardedParams] = {}
        self._kept = None
        with torch.no_grad():  # by the ops that FSDP2 uses, which such classes have
            whole = value(member)
            chunks = torch.chunk(whole, link.ranks, dim=0)
            self.shard = whole.new_zeros(chunks[0].size())
            rows = spec.local_shape[0]
            if rows:
                self.shard.narrow(0, 0, rows).copy_(chunks[link.rank])
            if self.shard.device != device:
                self.shard = self.shard.to(device)
            self._local = self.shard.narrow(0, 0, rows)

    def sharded_value(self, number: int) -> FlatDTensor:
        """Return the parameter as the DTensor around this rank's rows."""
        return self.flat_specs[number].wrap(self._local)

    def own(self, number: int) -> torch.Tensor:
        """Return this rank's rows."""
        return self._local

    def realign(self) -> None:
        """Leave the rows as they are: the parameter is around them."""

    def unsharded(self, dtype: torch.dtype) -> UnshardedParams:
        """Return the gathered parameter in a dtype of compute."""
        found = self._unsharded.get(dtype)
        if found is None:
            found = _UnshardedSubclass(self, dtype)
            self._unsharded[dtype] = found
        found.require_gradients([self.parameters[0].requires_grad])
        return found

    def unshard(self, unsharded: UnshardedParams, tag: int, about: str) -> Transfer | None:
        """Begin to gather what the subclass gives for its rows."""
        assert isinstance(unsharded, _UnshardedSubclass)
        streams = self._streams
        for stream in (streams.prepare, streams.gather):
            streams.after_current(stream)
        # in inference mode a class would get ops that others are made of, such as aten::to, and lose itself in them
        with torch.inference_mode(False), torch.no_grad():
            with streams.on(streams.prepare):
                inputs = self.extension.inputs(self._local.to(self.device, non_blocking=True))
            unsharded.allocate_for(inputs)  # in the order of the compute stream, as Note [Streams] says
            with streams.on(streams.prepare):
                for buffer, given in zip(unsharded.buffers, inputs, strict=True):
                    part = self.link.part(buffer)
                    part[: given.numel()].copy_(given.reshape(-1))
            prepared = streams.event(streams.prepare)
        with streams.on(streams.gather):
            streams.wait(prepared)
            begun = [self._gather(self.link, each.view(torch.uint8), tag, about) for each in unsharded.buffers]
        return _Transfers(self.link, about, [each for each in begun if each is not None])

    def keep_part(self, unsharded: UnshardedParams, link: ShardComm) -> None:
        """Free the parameter: what a smaller group would gather, only the subclass knows. All ranks gather it again."""
        unsharded.free()

    def heard(self) -> Callable[[torch.Tensor], None]:
        """Return the hook of the gathered parameter."""
        return self._grad_hook(0)

    def _gathers(self, number: int, held: object) -> bool:
        return any(held is each for unsharded in self._unsharded.values() for each in unsharded.parameters)


class _Transfers(Transfer):
    """Several collectives, which are waited for together."""

    __slots__ = ("_transfers",)

    def __init__(self, link: ShardComm, about: str, transfers: list[Transfer]) -> None:
        super().__init__(link, about, [])
        self._transfers = transfers

    def wait(self) -> None:
        transfers, self._transfers = self._transfers, []
        wait_all(transfers)


# -- What the subclass is asked for ------------------------------------------------------------------------------------


class _Extension:
    """Calls a subclass's extension points as FSDP2 does. See Note [Extensions]."""

    def __init__(
        self, link: ShardComm, mesh: DeviceMesh, slot: Slot, member: Member, policy: MixedPrecisionPolicy
    ) -> None:
        self._link = link
        self._mesh = mesh if mesh.ndim == 1 else DeviceMesh.from_group(link.group, mesh.device_type)
        self._slot = slot
        self._module = member.places[0].module
        self._policy = policy
        self._chunk = -(-slot.shape[0] // link.ranks)
        self._uneven = self._chunk * link.ranks != slot.shape[0]
        self._metadata: Any = None
        self._sizes: list[torch.Size] = []

    def inputs(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Return what is gathered of this rank's rows."""
        prepare = getattr(local, _PRE)
        if len(inspect.signature(prepare).parameters) == 1:
            given, self._metadata = prepare(self._mesh)
        else:
            size = torch.Size(self._slot.shape)
            stride = torch.empty(size, device="meta").stride()
            given, self._metadata = prepare(self._mesh, size, stride, self._module, self._policy)
        given = list(given)
        self._sizes = [each.size() for each in given]
        if self._uneven:  # ranks must send as much as each other: the rows are padded, by the subclass or here
            allowed = {(rows, *self._slot.shape[1:]) for rows in (self._chunk, local.shape[0])}
            wrong = [tuple(size) for size in self._sizes if tuple(size) not in allowed]
            if wrong:
                raise StateError(
                    f"{_PRE} of {type(local).__name__} gave a tensor of {wrong[0]} for {local.shape[0]} rows of "
                    f"{self._slot.names[0]!r}, which {self._link.ranks} ranks cannot divide evenly: give tensors of "
                    f"{tuple(local.shape)}, or make the number of rows a multiple of the ranks"
                )
            self._sizes = [torch.Size((self._chunk, *size[1:])) for size in self._sizes]
        return given

    def sizes(self) -> list[int]:
        """Return how many elements of each tensor a rank gives, padding included."""
        return [size.numel() for size in self._sizes]

    def rebuild(
        self, local: torch.Tensor, buffers: Sequence[torch.Tensor], dtype: torch.dtype, out: nn.Parameter | None
    ) -> Any:
        """Return the whole tensor made of what was gathered and its inner tensors, or make it in `out`."""
        gathered = tuple(each.view(-1, *size[1:]) for each, size in zip(buffers, self._sizes, strict=True))
        metadata, self._metadata = self._metadata, None
        finish = getattr(local, _POST)
        return finish(gathered, metadata, dtype) if out is None else finish(gathered, metadata, dtype, out=out)


class _UnshardedSubclass(UnshardedParams):
    """The tensors that were gathered, and the parameter that the subclass made of them."""

    def __init__(self, flat: SubclassShard, dtype: torch.dtype) -> None:
        self.buffers: list[torch.Tensor] = []
        self.parameters: list[nn.Parameter] = []
        self.changes = 0
        self._flat = flat
        self._dtype = dtype
        self._inner: list[torch.Tensor] = []
        self._requires_grad = False
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of what is gathered; before the first time, of a plain parameter."""
        if not self.buffers:
            return self._flat.layout.elements * self._dtype.itemsize
        return sum(each.numel() * each.itemsize for each in self.buffers)

    @property
    def allocated(self) -> bool:
        return all(_has_memory(each) for each in self.buffers)

    def holds(self, address: int) -> bool:
        """Return whether memory at this address is going to be freed."""
        return any(
            0 <= address - each.untyped_storage().data_ptr() < each.untyped_storage().nbytes() for each in self._freed()
        )

    def allocate_for(self, inputs: Sequence[torch.Tensor]) -> None:
        """Allocate what is gathered; it must be as much as the first time."""
        elements = [each * self._flat.link.ranks for each in self._flat.extension.sizes()]
        if not self.buffers:
            with torch.inference_mode(False):
                self.buffers = [
                    torch.empty(count, dtype=each.dtype, device=self._flat.device)
                    for count, each in zip(elements, inputs, strict=True)
                ]
        before = [(each.numel(), each.dtype) for each in self.buffers]
        now = [(count, each.dtype) for count, each in zip(elements, inputs, strict=True)]
        if before != now:
            raise StateError(
                f"{_PRE} of {self._flat.layout.slots[0].names[0]!r} gave tensors of {before} elements in all before, "
                f"and of {now} now; the memory of the gathered parameter cannot change"
            )
        for each in self.buffers:
            _allocate(each)

    def free(self) -> None:
        """Free the memory of what was gathered and of the inner tensors; the parameter stays a valid object."""
        for each in self._freed():
            if _has_memory(each):
                each.untyped_storage().resize_(0)
        self.hide()

    def reveal(self) -> None:
        """Let the subclass make the parameter of what was gathered."""
        flat = self._flat
        with torch.inference_mode(False), torch.no_grad():
            if self.parameters:
                for each in self._inner:
                    _allocate(each)
                flat.extension.rebuild(flat.own(0), self.buffers, self._dtype, self.parameters[0])
            else:
                self._make()
        set_version_counters(self._tensors, self._versions)

    def require_gradients(self, wanted: Sequence[bool]) -> None:
        """Make the parameter need a gradient as that of the shard does, also one that is made later."""
        (self._requires_grad,) = wanted
        for parameter in self.parameters:
            if parameter.requires_grad != self._requires_grad:
                parameter.requires_grad_(self._requires_grad)

    def _make(self) -> None:
        flat, (slot,) = self._flat, self._flat.layout.slots
        made, inner = flat.extension.rebuild(flat.own(0), self.buffers, self._dtype, None)
        self._inner = list(inner)
        stride = torch.empty(slot.shape, device="meta").stride()
        parameter = nn.Parameter(torch.as_strided(made, slot.shape, stride, 0), requires_grad=self._requires_grad)
        if parameter.dtype.is_floating_point:
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(self._check_then(flat.heard(), slot.names[0]))
            parameter.requires_grad_(self._requires_grad)
        self.parameters = [parameter]
        self._tensors = (parameter, *self._freed())
        self._versions = tuple(version_of(each) for each in self._tensors)

    def _freed(self) -> list[torch.Tensor]:
        return [*self.buffers, *self._inner]

    @staticmethod
    def _check_then(hear: Callable[[torch.Tensor], None], name: str) -> Callable[[torch.Tensor], None]:
        def check(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and type(gradient) is not torch.Tensor:
                raise StateError(
                    f"the gradient of {name!r} is a {type(gradient).__name__}, which cannot be summed over ranks; the "
                    f"ops of {type(parameter).__name__} must give plain gradients"
                )
            hear(parameter)

        return check


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _allocate(tensor: torch.Tensor) -> None:
    if not _has_memory(tensor):
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
