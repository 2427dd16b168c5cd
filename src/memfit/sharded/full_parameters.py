"""Full parameters on demand, between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from memfit.errors import InputError, StateError
from memfit.sharded.flat_param import FlatShard
from memfit.sharded.fully_shard import get_runtime
from memfit.sharded.runtime import ShardedRuntime
from memfit.sharded.unit import ShardedUnit, State, check_transition
from memfit.torch_private.autograd import in_backward
from memfit.torch_private.modules import parameter_table

STATE_TAG = 1 << 28
"""Apart from the tags of units, so that a rank which gathers state never meets one that trains."""


@contextmanager
def full_parameters(
    model: nn.Module, *, write_back: bool = False, units: Sequence[str] | None = None
) -> Iterator[nn.Module]:
    """Make the modules hold full parameters, in their own dtype and shape, while the block runs.

    With `write_back` every rank takes its part of what they hold at the end, also of parameters and data put in their
    place; make the same change on all ranks. A parameter that tensor or expert parallel has divided is the DTensor
    that it was before `shard`. After an exception nothing is written. `units` names some units instead
    of all; the root is the empty name.
    """
    runtime = get_runtime(model)
    chosen = _chosen(runtime, units)
    _recover(runtime)
    _check_between_steps(runtime, chosen)
    summoned: list[tuple[FlatShard, torch.Tensor]] = []
    shown: list[list[nn.Parameter]] = []
    try:
        for unit in chosen:
            unit.go(State.SUMMONED)
            for flat in unit.flats:
                summoned.append((flat, gather_shard(flat, f"gather of {unit.title} for full_parameters")))
        for flat, buffer in summoned:
            shown.append(_show(flat, buffer))
        yield model
        if write_back:
            for (flat, buffer), parameters in zip(summoned, shown, strict=True):
                _take_replacements(flat, buffer, parameters)
            for flat, buffer in summoned:
                with torch.no_grad():
                    flat.shard.copy_(flat.link.part(buffer))
    finally:
        for unit in chosen:
            if unit.state is State.SUMMONED:
                unit.to_sharded()
                unit.go(State.IDLE)


def gather_shard(flat: FlatShard, about: str) -> torch.Tensor:
    """Gather all elements of a flat shard into a buffer of their own."""
    flat.realign()
    return gather_alike(flat, flat.dtype, lambda own: own.copy_(flat.shard), about)


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


def _show(flat: FlatShard, buffer: torch.Tensor) -> list[nn.Parameter]:
    """Set parameters on the modules that are views of a buffer."""
    shown: list[nn.Parameter] = []
    for slot, places, own, inner in zip(flat.layout.slots, flat.places, flat.parameters, flat.inners, strict=True):
        block = buffer[slot.begin : slot.end].view(slot.shape).detach()
        parameter = nn.Parameter(block if inner is None else inner.wrap(block), requires_grad=own.requires_grad)
        shown.append(parameter)
        for place in places:
            place.put(parameter)
    return shown


def _take_replacements(flat: FlatShard, buffer: torch.Tensor, shown: Sequence[nn.Parameter]) -> None:
    """Copy into a buffer what was put in the place of its parameters, or of their data."""
    for slot, places, parameter, home in zip(flat.layout.slots, flat.places, shown, flat.homes, strict=True):
        target = buffer[slot.begin : slot.end].view(slot.shape)
        held = {
            id(each): each
            for place in places
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
        if found.shape != home.shape or found.dtype != flat.dtype:
            raise StateError(
                f"parameter {slot.names[0]!r} was {flat.dtype} of shape {home.shape}, and what was put in its place is "
                f"{found.dtype} of shape {tuple(found.shape)}; nothing was written: change dtype and shape before shard"
            )
        with torch.no_grad():
            block = found if home.inner is None else home.inner.block_of(found)
            if block.data_ptr() != target.data_ptr():
                target.copy_(block)
