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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from memfit.errors import StateError
from memfit.sharded.boxes import Box, split_into_boxes
from memfit.sharded.comm import ShardComm
from memfit.sharded.flat_methods import attach_methods
from memfit.sharded.flat_reductions import reduce_all, reduce_norms
from memfit.sharded.model_parallel import ModelParallelSpec
from memfit.sharding import FlatLayout, Slot
from memfit.torch_private.dispatch import DisableTorchFunction, disabled_torch_function, schema_of
from memfit.torch_private.dtensor import DTensorSpec, LocalDTensor, make_spec, support_foreach

GATHER_TAG = (1 << 28) + 1
_aten = torch.ops.aten


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

    home: Home

    @classmethod
    def of(cls, local: torch.Tensor, home: Home) -> LocalElements:
        """Return the same memory."""
        found = local.as_subclass(cls)
        found.home = home
        return found

    @classmethod
    def __torch_function__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunction():
            if func is torch.Tensor.copy_ and isinstance(args[0], cls):
                home = args[0].home
                if args[1].shape == home.shape:
                    args = (args[0], home.own(args[1]), *args[2:])
                elif args[1].shape == home.slot.shape:  # the block of a tensor parallel rank
                    args = (args[0], home.own_of_block(args[1]), *args[2:])
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Home:
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
    specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        slot: Slot,
        layout: FlatLayout,
        link: ShardComm,
        mesh: DeviceMesh,
        device: torch.device,
        inner: ModelParallelSpec | None = None,
    ) -> Home:
        """Return the home of one parameter of a flat layout; `mesh` is the one that shards it."""
        part = layout.part(slot, link.rank)
        mesh = mesh if inner is None else inner.covering
        return cls(
            slot=slot, layout=layout, link=link, mesh=mesh, device=device, begin=part.begin, end=part.end, inner=inner
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor; that of the slot is of this rank's block."""
        return self.slot.shape if self.inner is None else self.inner.shape

    @property
    def links(self) -> tuple[ShardComm, ...]:
        """The groups along which other ranks have other elements."""
        return (self.link,) if self.inner is None else (self.link, *self.inner.links)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Return what a DTensor at this home says of itself: replicas, then shards."""
        found = self.specs.get(dtype)
        if found is None:
            found = make_spec(self.mesh, self.placements, self.shape, dtype)
            self.specs[dtype] = found
        return found

    @property
    def placements(self) -> tuple[Placement, ...]:
        inner = () if self.inner is None else self.inner.placements
        return (*(Replicate() for _ in range(self.mesh.ndim - len(inner) - 1)), FlatPlacement(), *inner)

    def wrap(self, local: torch.Tensor) -> FlatDTensor:
        """Make a tensor of this rank's elements the DTensor that they are a part of."""
        made = FlatDTensor(local, self.spec(local.dtype), requires_grad=False)  # pyrefly: ignore
        made.home = self
        return made

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a whole tensor."""
        return self.own_of_block(whole if self.inner is None else self.inner.block_of(whole))

    def own_of_block(self, block: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of its tensor parallel block, which is the whole tensor where there is none."""
        return block.reshape(-1)[self.begin : self.end]

    def gather(self, value: FlatDTensor) -> torch.Tensor:
        """Gather a whole tensor at this home, outside of autograd."""
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

    def alike(self, other: Home) -> bool:
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

    home: Home

    __torch_function__ = disabled_torch_function  # pyrefly: ignore[bad-override]

    @property
    def begin(self) -> int:
        """The first of this rank's elements of the flattened tensor."""
        return self.home.begin

    @property
    def end(self) -> int:
        """The element after this rank's last one."""
        return self.home.end

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"FlatDTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', "
            f"elements {self.begin}:{self.end} of {self.home.slot.elements} here)"
        )

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
        made: Any = self.home.wrap(self.local.clone())
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
        return LocalElements.of(local, self.home) if type(local) is torch.Tensor else local

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Return a DTensor of PyTorch's own with these placements; all ranks must call it."""
        mesh = device_mesh or self.home.mesh
        wanted = self.home.placements if placements is None else tuple(placements)
        same = [Replicate()] * mesh.ndim
        return DTensor.from_local(self.full_tensor(), mesh, same, run_check=False).redistribute(mesh, wanted)

    # -- what torch.distributed.checkpoint asks for ------------------------------------------------------------------

    def _boxes(self) -> list[Box]:
        home = self.home
        if 0 in home.shape:  # a tensor without elements has one box, on every rank
            return [Box(offsets=(0,) * len(home.shape), sizes=home.shape)]
        boxes = split_into_boxes(home.slot.shape, self.begin, self.end)
        if home.inner is None:
            return boxes
        offset = home.inner.offset
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
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is None:
            rule = _RULES[func] = _find_rule(func)
        return rule(func, args, kwargs)


support_foreach(FlatDTensor)
attach_methods(FlatDTensor)


def gather(value: FlatDTensor) -> torch.Tensor:
    """Gather the whole tensor, outside of autograd."""
    return value.home.gather(value)


class _Gather(torch.autograd.Function):
    """The whole tensor, whose gradient, the same on every rank, is sharded again."""

    @staticmethod
    def forward(ctx: Any, value: FlatDTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.home, ctx.device = value.home, value.device
        return gather(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.home.wrap(ctx.home.own(gradient).clone().to(ctx.device))


class _ToLocal(torch.autograd.Function):
    """This rank's elements, whose gradient is that of a flat DTensor."""

    @staticmethod
    def forward(ctx: Any, value: FlatDTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.home = value.home
        return value.local.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.home.wrap(gradient)


# -- The rules of ops -------------------------------------------------------------------------------------------------

Rule = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


def _find_rule(func: Any) -> Rule:
    name = schema_of(func).name.partition("::")[2]
    if name in _REDUCTIONS:
        return _reduced
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _drawn if name in _DRAWS else _refused  # others read the values, too
    if func in _ALIKE:
        return _like
    if _is_on_lists(name):
        arguments = schema_of(func).arguments
        written = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
        return partial(_on_lists, [each.name for each in arguments], frozenset(written))
    if torch.Tag.pointwise in func.tags or name.rstrip("_") in _ELEMENTWISE:
        return _in_place if name.endswith("_") else _elementwise
    return _refused


def _is_on_lists(name: str) -> bool:
    """Return whether an op works on lists of tensors element by element."""
    if name.startswith("_foreach_"):
        single = name.removeprefix("_foreach_").rstrip("_")
        op = getattr(_aten, single, None)
        tagged = op is not None and any(torch.Tag.pointwise in getattr(op, each).tags for each in op.overloads())
        return single not in _REDUCTIONS and (tagged or single in ("copy", "zero", "clone"))
    return name.rstrip("_") in _FUSED_OPTIMIZERS


def _refused(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    first = next(_flats((args, tuple(kwargs.values()))))
    raise StateError(
        f"{func} would see the elements of this rank only: {first!r}. Gather first: value.full_tensor(), "
        "memfit.sharded.full_state_dict(model), `with full_parameters(model):`, or for a method of a module "
        "memfit.sharded.register_forward_method(module, name)"
    )


def _flats(values: Any) -> Iterator[FlatDTensor]:
    for each in values:
        if isinstance(each, FlatDTensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _flats(each)


def _like(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatDTensor:
    first = args[0]
    return first.home.wrap(func(first.local, *args[1:], **kwargs))


def _in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op that changes its first argument, and most of what an optimizer does, on the local tensors."""
    first = args[0]
    if type(first) is not FlatDTensor:
        _refused(func, args, kwargs)  # a whole tensor would be changed where this rank has elements, and only there
    home = first.home
    func(
        *[each.local if type(each) is FlatDTensor and each.home is home else _local(func, each, home) for each in args],
        **({name: _local(func, each, home) for name, each in kwargs.items()} if kwargs else kwargs),
    )
    return first


def _elementwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on the local tensors."""
    if schema_of(func).is_mutable:
        return _elementwise_out(func, args, kwargs)
    home = next(_flats((args, tuple(kwargs.values())))).home
    local = [_local(func, each, home) for each in args]
    result = func(*local, **{name: _local(func, each, home) for name, each in kwargs.items()})
    return home.wrap(result) if isinstance(result, torch.Tensor) else tuple(home.wrap(each) for each in result)


def _elementwise_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatDTensor:
    """Run an op with `out=`, a tensor that is sharded as an argument is: Adam keeps the largest of its squares so."""
    out = kwargs.get("out")
    if type(out) is not FlatDTensor or not any(each.home.alike(out.home) for each in _flats(args)):
        _refused(func, args, kwargs)
    func(*[_local(func, each, out.home) for each in args], **{**kwargs, "out": out.local})
    return out


def _local(func: Any, value: Any, home: Home) -> Any:
    """Return what an op on the local tensors is given for one of its arguments."""
    if isinstance(value, FlatDTensor) and value.home.alike(home):
        return value.local
    if isinstance(value, DTensor):
        if home.inner is not None and home.inner.same_as(value):
            return home.own(value)
        value = value.full_tensor().to(value.device)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.shape == home.shape:
        return home.own(value)
    if value.numel() == 1 and value.dim() <= len(home.shape):
        return value.reshape(())
    raise StateError(
        f"{func} of {home.slot.names[0]!r} and a tensor of shape {tuple(value.shape)}: the parameter is sharded, and "
        f"its elements here have no rows and columns; give a tensor of shape {home.shape}, or one number"
    )


def _on_lists(
    names: Sequence[str], written: frozenset[str], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run an op on lists of tensors on the local tensors: those with one number belong together.

    `names` are those of the op's arguments, `written` of those that it changes: a whole tensor would be changed where
    this rank has elements, and only there.
    """
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    homes: dict[int, Home] = {}
    for each in given.values():
        for number, value in enumerate(each) if isinstance(each, (list, tuple)) else ():
            if number not in homes and type(value) is FlatDTensor:
                homes[number] = value.home
    for name in written:
        changed = given.get(name)
        for number, value in enumerate(changed) if isinstance(changed, (list, tuple)) else ():
            if number in homes and type(value) is not FlatDTensor and value.dim():
                _refused(func, args, kwargs)

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [
                each.local
                if type(each) is FlatDTensor and each.home is homes[number]
                else _local(func, each, homes[number])
                if number in homes
                else each
                for number, each in enumerate(value)
            ]
        return value.full_tensor() if isinstance(value, DTensor) else value

    result = func(*[local(each) for each in args], **{name: local(each) for name, each in kwargs.items()})
    if not isinstance(result, (list, tuple)):
        return result
    return [homes[number].wrap(each) if number in homes else each for number, each in enumerate(result)]


def _drawn(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw random numbers of the whole tensor, and keep this rank's."""
    first = args[0]
    if not isinstance(first, FlatDTensor) or any(True for _ in _flats(args[1:])):
        _refused(func, args, kwargs)
    home = first.home
    whole = torch.empty(home.shape, dtype=first.dtype, device=first.device)
    drawn = home.own(func(whole, *args[1:], **kwargs)).clone()
    for number, placement in enumerate(home.placements):
        if type(placement) is Replicate:  # replicas that were seeded differently must not part
            sent = drawn.to(home.device)
            dist.broadcast(sent, group_src=0, group=home.mesh.get_group(number))
            drawn.copy_(sent)
    if schema_of(func).is_mutable:
        first.local.copy_(drawn)
        return first
    return first.home.wrap(drawn)


def _copied(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    value, source = args[0], args[1]
    if not isinstance(value, FlatDTensor):
        _refused(func, args, kwargs)
    value.local.copy_(_local(func, source, value.home), *args[2:])
    return value


def _viewed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Allow views that change nothing."""
    if tuple(args[1]) != tuple(args[0].shape):
        _refused(func, args, kwargs)
    return args[0].home.wrap(args[0].local.detach())


def _on_local(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


def _to_number(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(args[0].full_tensor())


def _compared(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    home = next(_flats(args)).home
    first, second = (_local(func, each, home) for each in args)
    same = torch.tensor(float(not torch.equal(first, second)), device=home.device)
    for link in home.links:
        link.all_reduce(same, f"comparison of {home.slot.names[0]!r}", largest=True).wait()
    return not same.item()


# -- reductions over all elements

_REDUCTIONS = {
    "sum", "mean", "max", "min", "amax", "amin", "any", "all", "linalg_vector_norm", "norm", "count_nonzero",
}  # fmt: skip


def _reduced(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    value = args[0]
    name = schema_of(func).name.partition("::")[2]
    given = dict(zip((each.name for each in schema_of(func).arguments), args, strict=False)) | dict(kwargs)
    dimensions = given.get("dim")
    dims = len(value.home.shape)
    whole = (
        dimensions is None
        or dimensions == []
        or (isinstance(dimensions, (list, tuple)) and sorted(each % dims for each in dimensions) == [*range(dims)])
    )
    if not whole or "other" in given or schema_of(func).is_mutable:
        _refused(func, args, kwargs)
    found = reduce_all(name, value, given)
    return found.reshape((1,) * value.dim()) if given.get("keepdim") else found


def _norms(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return reduce_norms(args[0], float(order), dtype)


def _unscaled(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Unscale gradients; what one rank finds infinite, every rank does."""
    gradients, found_inf, inverse = args
    func([each.local if isinstance(each, FlatDTensor) else each for each in gradients], found_inf, inverse)
    for link, home in {link: each.home for each in _flats(gradients) for link in each.home.links}.items():
        shared = found_inf.to(home.device)
        link.all_reduce(shared, "all-reduce of what gradients are finite", largest=True).wait()
        found_inf.copy_(shared)


_FUSED_OPTIMIZERS = ("_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd")
_DRAWS = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    "rand_like", "randint_like", "randn_like",
}  # fmt: skip
_ALIKE = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
}
_ELEMENTWISE = {"zero", "fill", "masked_fill"}
"""Ops that are elementwise and not tagged so, with or without a last underscore."""
_RULES: dict[Any, Rule] = {
    _aten.copy_.default: _copied,
    _aten.view.default: _viewed,
    _aten._unsafe_view.default: _viewed,
    _aten.expand.default: _viewed,
    _aten.equal.default: _compared,
    _aten._local_scalar_dense.default: _to_number,
    _aten.is_pinned.default: _on_local,
    _aten.record_stream.default: _on_local,
    _aten._foreach_norm.Scalar: _norms,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
}
