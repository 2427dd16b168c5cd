"""Models that were sharded in calls of their own, inside of a model that is sharded later: FSDP2's recipe.

    for block in model.blocks:
        memfit.shard(block)
    memfit.shard(model)

The last call takes the units of the earlier ones into its runtime. They keep what their own call was given: precision,
reduction, whether they reshard, where their shards are. What is one for the whole pass is that of the last call: the
groups, the side streams, and the schedule, which an inner call must therefore not have been given another one of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from memfit.errors import InputError, StateError
from memfit.sharded.comm import ShardComm
from memfit.sharded.earlier_optimizers import is_given_up
from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.sharded.model_parallel import ModelParallelMeshes
from memfit.sharded.options import Schedule
from memfit.sharded.runtime import ShardedRuntime
from memfit.sharded.streams import Streams
from memfit.sharded.unit import ShardedUnit, State
from memfit.sharded.wrap_policy import FoundUnit, Units
from memfit.torch_private.wrappers import name_in_state


def reshard_inner(inner: Sequence[ShardedRuntime]) -> None:
    """Let modules that were gathered by `unshard()` hold their shards again."""
    for each in inner:
        each.settle()
        for unit in each.units:
            if unit.state is State.IDLE:
                unit.to_sharded()
                unit.free()


def check_inner(model: nn.Module, inner: Sequence[ShardedRuntime], units: Units | None, schedule: Schedule) -> None:
    """Refuse inner models that cannot be taken in, and parameters whose other places are sharded elsewhere."""
    known = {parameter for each in inner for parameter in each.parameters}
    for name, parameter in model.named_parameters():
        if is_given_up(parameter):
            raise StateError(
                f"parameter {name!r} is shared with a module that was sharded in a call of its own, and only there is "
                "it trained; shard the model that holds both in one call, with units="
            )
        if isinstance(parameter, FlatDTensor) and parameter not in known:
            raise StateError(
                f"parameter {name!r} belongs to a model around this one, which is sharded already; shard inner modules "
                "first, and the model around them last"
            )
    paths = {module: path for path, module in model.named_modules()}
    for each in inner:
        path = paths[each.model]
        if not each.idle or not each.communicates or any(unit.state is not State.IDLE for unit in each.units):
            raise StateError(
                f"{path!r} was sharded in a call of its own and is in use; shard the model around it between steps"
            )
        cap = schedule.bucket_cap_bytes  # it decided only what became a unit
        if replace(each.schedule, bucket_cap_bytes=cap) not in (Schedule(bucket_cap_bytes=cap), schedule):
            raise InputError(
                f"{path!r} was sharded with {each.schedule}, and the model around it with {schedule}; units of one "
                "pass have one schedule: give it to the last call"
            )
        for named in _names_in(units):
            if f"{named}.".startswith(f"{path}."):
                raise InputError(f"units names {named!r}, and {path!r} was sharded in a call of its own; leave it out")


def _names_in(units: Units | None) -> Iterator[str]:
    for named in units if isinstance(units, Mapping) else ():
        yield from (named,) if isinstance(named, str) else named


def check_found(found: Sequence[FoundUnit], inner: Sequence[ShardedRuntime]) -> None:
    """Refuse a group with a module that is inside of one which was sharded before: it would be of two units."""
    taken = {module for each in inner for module in each.model.modules()}
    for unit in found:
        for path, module in zip(unit.paths, unit.modules, strict=True):
            if module in taken:
                raise InputError(
                    f"unit {list(unit.paths)} has {path!r}, which was sharded in a call of its own; leave it out"
                )


def check_groups(model: nn.Module, inner: Sequence[ShardedRuntime], links: Sequence[ShardComm]) -> None:
    """Refuse an inner model that is sharded over other ranks."""
    paths = {module: path for path, module in model.named_modules()}
    wanted = [link.members for link in links]
    for each in inner:
        if [link.members for link in each.data_links] != wanted:
            raise InputError(
                f"{paths[each.model]!r} was sharded over other ranks than the model around it is to be; give every "
                "call the same mesh="
            )


def model_parallel_meshes(model: nn.Module) -> Iterator[DeviceMesh]:
    """Yield the meshes on which tensor and expert parallel put parameters, in the order of the parameters."""
    for parameter in model.parameters():
        if isinstance(parameter, FlatDTensor):
            if parameter.flat_spec.inner is not None:
                yield parameter.flat_spec.inner.mesh
        elif isinstance(parameter, DTensor):
            yield parameter.device_mesh


def inner_names(model: nn.Module, inner: Sequence[ShardedRuntime]) -> list[str]:
    """Return the names that units which were sharded before have in the model around them."""
    paths = {module: path for path, module in model.named_modules()}
    return [paths[module] for each in inner for unit in each.units for module in unit.modules]


def describe_inner(model: nn.Module, inner: Sequence[ShardedRuntime]) -> list[str]:
    """List the units that were sharded before, for ranks to compare."""
    paths = {module: path for path, module in model.named_modules()}
    return [
        f"unit {[paths[module] for module in unit.modules]} with {unit.options}, sharded before"
        for each in inner
        for unit in each.units
    ]


def take_in(
    model: nn.Module,
    inner: Sequence[ShardedRuntime],
    shards: ShardComm,
    replicas: ShardComm | None,
    streams: Streams,
    mesh: DeviceMesh,
    meshes: ModelParallelMeshes,
) -> list[ShardedUnit]:
    """Return the units of inner models, as units of the model around them."""
    paths = {module: path for path, module in model.named_modules()}
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name_in_state(name))
    found: list[ShardedUnit] = []
    for each in inner:
        root = each.units[0]
        if root.options is each.options_inside[0]:  # not changed since
            root.options = each.options_inside[1]
        root.was_root = True
        for unit in each.units:
            unit.names = tuple(paths[module] for module in unit.modules)
            unit.use_streams(streams)
            for flat, gradients in zip(unit.flats, unit.gradients, strict=True):
                flat.join(
                    [tuple(names[parameter]) for parameter in flat.parameters],
                    shards,
                    mesh,
                    [None if spec is None else replace(spec, links=meshes.links_of(spec)) for spec in flat.inners],
                )
                gradients.use_replicas(replicas)
        found += each.units
    return found
