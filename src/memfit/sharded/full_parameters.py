"""Full parameters on demand, between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from memfit.errors import InputError, StateError
from memfit.sharded.comm import check_agreement
from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.sharded.flat_param import FlatShard
from memfit.sharded.fully_shard import get_runtime
from memfit.sharded.model_parallel import ModelParallelSpec
from memfit.sharded.runtime import ShardedRuntime
from memfit.sharded.subclass_params import SubclassShard
from memfit.sharded.unit import ShardedUnit, State, check_transition
from memfit.torch_private.autograd import in_backward
from memfit.torch_private.modules import parameter_table

STATE_TAG = 1 << 28
"""Apart from the tags of units, so that a rank which gathers state never meets one that trains."""


@contextmanager
def full_parameters(
    model: nn.Module,
    *,
    write_back: bool = False,
    units: Sequence[str] | None = None,
    with_grads: bool = False,
    rank_0_only: bool = False,
    cpu: bool = False,
) -> Iterator[nn.Module]:
    """Make the modules hold full parameters, in their own dtype and shape, while the block runs.

    With `write_back` every rank takes its part of what they hold at the end, also of parameters and data put in their
    place; make the same change on all ranks. After an exception nothing is written. `units` names some units instead
    of all; the root is the empty name. `with_grads` shows the whole gradients in `.grad`, too, and writes them back.
    With `rank_0_only` the modules of other ranks keep their shards, which takes the memory of one unit there; with
    `cpu` full parameters are on the host. A parameter that tensor or expert parallel has divided is the DTensor that it
    was before `shard`; with `rank_0_only`, where no other rank could take part in what a DTensor does, it is whole.
    """
    runtime = get_runtime(model)
    if write_back and (rank_0_only or cpu):
        raise InputError(
            "write_back takes every rank's part of what the rank itself has changed; leave rank_0_only and cpu out"
        )
    chosen = _chosen(runtime, units)
    _recover(runtime)
    _check_between_steps(runtime, chosen)
    if with_grads:
        _check_gradients(runtime, chosen)
    keeps = not rank_0_only or all(link.rank == 0 for link in runtime.links)
    summoned: list[_Summoned] = []
    try:
        for unit in chosen:
            unit.enter(State.SUMMONED)
            for flat in unit.flats:
                about = f"gather of {unit.title} for full_parameters"
                each = _summon(flat, about, with_grads=with_grads, joins=rank_0_only)
                if keeps:
                    summoned.append(each.to_host() if cpu else each)
        for each in summoned:
            each.show()
        yield model
        if write_back:
            for each in summoned:
                each.take_replacements()
            for each in summoned:
                each.write_back(with_grads=with_grads)
    finally:
        for unit in chosen:
            if unit.state is State.SUMMONED:
                unit.to_sharded()
                unit.enter(State.IDLE)


def gather_values(flat: FlatShard, about: str) -> list[torch.Tensor]:
    """Gather the parameters of a flat shard: views of one buffer, or what a tensor subclass is."""
    flat.realign()
    if isinstance(flat, SubclassShard):
        return [flat.sharded_value(0).full_tensor()]
    buffer = gather_alike(flat, flat.dtype, lambda own: own.copy_(flat.shard), about)
    return [buffer[slot.begin : slot.end].view(slot.shape) for slot in flat.layout.slots]


def gather_alike(
    flat: FlatShard, dtype: torch.dtype, fill: Callable[[torch.Tensor], object], about: str
) -> torch.Tensor:
    """Gather values laid out as a flat shard is: `fill` writes this rank's part."""
    buffer = torch.empty(flat.layout.elements, dtype=dtype, device=flat.device)
    with torch.no_grad():
        fill(flat.link.part(buffer))
        flat.link.gather(buffer, STATE_TAG, about).wait()
    return buffer


def _chosen(runtime: ShardedRuntime, names: Sequence[str] | None) -> list[ShardedUnit]:
    if names is None:
        return runtime.units
    if isinstance(names, str):
        raise InputError(f"units is {names!r}; give a list of unit names, [{names!r}]")
    by_name = {name: unit for unit in runtime.units for name in unit.names}
    for name in names:
        if name not in by_name:
            raise InputError(f"{name!r} is no unit of this model; the units are {', '.join(map(repr, by_name))}")
    return list(dict.fromkeys(by_name[name] for name in names))


def _recover(runtime: ShardedRuntime) -> None:
    """Reset state after a backward that an exception ended, of which the runtime does not know yet."""
    running = in_backward() or any(unit.state is State.FORWARD for unit in runtime.units)
    if not runtime.idle and not running:
        runtime.recover()


def _check_between_steps(runtime: ShardedRuntime, chosen: Sequence[ShardedUnit]) -> None:
    for unit in runtime.units:
        if unit in chosen or unit.state is not State.SUMMONED:
            check_transition(unit.title, unit.state, State.SUMMONED)
    if not runtime.idle:
        raise StateError(
            "a forward or a backward is running; full parameters are for reading and writing between steps: enter "
            "full_parameters() after the backward"
        )


def _check_gradients(runtime: ShardedRuntime, chosen: Sequence[ShardedUnit]) -> None:
    """Compare between ranks which parameters have gradients, since all ranks gather them."""
    described = [
        f"{slot.names[0]!r} {'without a gradient' if parameter.grad is None else f'with one in {parameter.grad.dtype}'}"
        for unit in chosen
        for flat in unit.flats
        for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True)
    ]
    for link in runtime.links:
        check_agreement(link, described)


def _summon(flat: FlatShard, about: str, *, with_grads: bool, joins: bool) -> _Summoned:
    """Gather parameters and gradients; `joins` makes those whole that are blocks of tensor or expert parallel."""
    values = gather_values(flat, about)
    gradients: list[torch.Tensor | None] = [None] * len(values)
    for number, parameter in enumerate(flat.parameters if with_grads else ()):
        gradient = parameter.grad
        if gradient is not None:
            spec = flat.flat_specs[number]
            gradients[number] = spec.gather_block(gradient) if isinstance(gradient, FlatDTensor) else gradient.clone()
    if not joins:
        return _Summoned(flat, values, gradients, flat.inners)
    for number, inner in enumerate(flat.inners):
        for blocks in (values, gradients) if inner is not None else ():
            block = blocks[number]
            if inner is not None and block is not None:
                blocks[number] = inner.wrap(block).full_tensor()
    return _Summoned(flat, values, gradients, [None] * len(values))


class _Summoned:
    """The full parameters of a flat shard while modules hold them, and their gradients where these are wanted.

    `inners` says of which DTensors they are blocks, as modules hold them.
    """

    def __init__(
        self,
        flat: FlatShard,
        values: list[torch.Tensor],
        gradients: list[torch.Tensor | None],
        inners: Sequence[ModelParallelSpec | None],
    ) -> None:
        self._flat = flat
        self._values = values
        self._gradients = gradients
        self._inners = inners
        self._shown: list[nn.Parameter] = []

    def to_host(self) -> _Summoned:
        """Return the same in host memory."""
        gradients = [None if each is None else each.cpu() for each in self._gradients]
        return _Summoned(self._flat, [each.cpu() for each in self._values], gradients, self._inners)

    def show(self) -> None:
        """Set them on the modules."""
        flat = self._flat
        members = zip(flat.places, flat.parameters, self._inners, self._values, self._gradients, strict=True)
        for places, own, inner, block, block_gradient in members:
            value, gradient = block.detach(), block_gradient
            if inner is not None:
                value = inner.wrap(value)
                gradient = None if gradient is None else inner.wrap(gradient)
            parameter = nn.Parameter(value, requires_grad=own.requires_grad)
            if gradient is not None and gradient.dtype != parameter.dtype:
                parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient
            self._shown.append(parameter)
            for place in places:
                place.put(parameter)

    def take_replacements(self) -> None:
        """Copy into the values what was put in the place of their parameters, or of their data."""
        flat = self._flat
        for number, (slot, parameter) in enumerate(zip(flat.layout.slots, self._shown, strict=True)):
            target, spec = self._values[number], flat.flat_specs[number]
            held = {
                id(each): each
                for place in flat.places[number]
                if (each := parameter_table(place.module).get(place.attribute)) is not None
            }
            if len(held) > 1 and id(parameter) in held:  # tied, and replaced in one place
                del held[id(parameter)]
            if len(held) != 1:
                what = "removed" if not held else "replaced by different ones in the places that share it"
                raise StateError(
                    f"parameter {slot.names[0]!r} was {what} inside of full_parameters; nothing was written: put one "
                    "parameter of the same shape there"
                )
            (found,) = held.values()
            if found.shape != spec.shape or found.dtype != flat.dtype:
                raise StateError(
                    f"parameter {slot.names[0]!r} was {flat.dtype} of shape {spec.shape}, and what was put in its "
                    f"place is {found.dtype} of shape {tuple(found.shape)}; nothing was written: change dtype and "
                    "shape before shard"
                )
            if found.grad is not None and found.grad.shape != spec.shape:
                raise StateError(
                    f"the gradient of {slot.names[0]!r} has shape {tuple(found.grad.shape)}; nothing was written"
                )
            with torch.no_grad():
                block, gradient = found.detach(), found.grad
                if spec.inner is not None:
                    block = spec.inner.block_of(block)
                    gradient = None if gradient is None else spec.inner.block_of(gradient)
                self._gradients[number] = gradient
                if isinstance(flat, SubclassShard):
                    self._values[number] = block
                elif block.data_ptr() != target.data_ptr():
                    target.copy_(block)

    def write_back(self, *, with_grads: bool) -> None:
        """Take this rank's part of the values, and of the gradients where they were shown."""
        flat = self._flat
        with torch.no_grad():
            for number, (value, gradient) in enumerate(zip(self._values, self._gradients, strict=True)):
                spec, parameter = flat.flat_specs[number], flat.parameters[number]
                flat.own(number).copy_(spec.own_of_block(value))
                if with_grads and gradient is None:
                    parameter.grad = None
                elif with_grads and gradient is not None:
                    own = spec.own_of_block(gradient).to(parameter.device, copy=True)
                    if own.dtype != parameter.dtype:
                        parameter.grad_dtype = own.dtype
                    parameter.grad = spec.wrap(own)
