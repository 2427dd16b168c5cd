"""`memfit.shard`: make a model run fully sharded over the ranks of a mesh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit.errors import InputError, StateError
from memfit.sharded.agreement import check_agreement
from memfit.sharded.finding import FoundUnit, Units, find_units
from memfit.sharded.flat import FlatShard, Member
from memfit.sharded.gradients import Gradients
from memfit.sharded.links import Link
from memfit.sharded.options import Precision, Reduction, Schedule
from memfit.sharded.runtime import Runtime, attach
from memfit.sharded.streams import Streams
from memfit.sharded.unit import Unit

_runtimes: WeakKeyDictionary[nn.Module, Runtime] = WeakKeyDictionary()
_groups: dict[tuple[tuple[int, ...], int, int], dist.ProcessGroup] = {}


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    units: Units | None = None,
    precision: Precision | None = None,
    schedule: Schedule | None = None,
    reduction: Reduction | None = None,
    keep: bool = False,
    ignored: Iterable[str | nn.Parameter] = (),
    from_rank_0: bool = False,
    timeout: timedelta | None = None,
) -> nn.Module:
    """Shard a model's parameters, gradients and optimizer state over ranks; it stays the same plain module.

    `mesh` has one dimension, of ranks that shard, or two, of replicas and of ranks that shard within one; by default
    all ranks shard. `units` are gathered one at a time, by default the repeated blocks; what is in none belongs to the
    root. `keep` leaves every unit gathered between its forward and backward. `ignored` parameters stay whole.
    `from_rank_0` starts from rank 0's values.
    """
    precision, schedule, reduction = precision or Precision(), schedule or Schedule(), reduction or Reduction()
    _check(model)
    found = find_units(model, units, keep=keep, ignored=ignored)
    mesh = _mesh(model, mesh)
    device = _device(mesh)
    shards, replicas = _links(mesh, device, timeout)
    facts = _facts(found, precision, schedule, reduction)
    for link in (shards, replicas):
        if link is not None:
            check_agreement(link.group, device, facts)
    streams = Streams(device)
    made: list[Unit] = []
    for number, each in enumerate(found):
        flats = [FlatShard(members, shards, device, device, streams) for members in _alike(each.members)]
        made.append(
            Unit(
                number=number,
                name=each.name,
                module=each.module,
                flats=flats,
                gradients=[Gradients(flat, replicas, streams, precision, reduction) for flat in flats],
                options=each.options,
                precision=precision,
                streams=streams,
                nearby=_nearby(mesh, each.options.reshard_ranks, device, timeout),
            )
        )
    runtime = Runtime(
        model, made, [link for link in (shards, replicas) if link is not None], device, precision, schedule
    )
    if schedule.order is not None:
        runtime.order.expect(_ordered(made, schedule.order))
    for unit in made:
        for flat in unit.flats:
            flat.take_over()
        attach(runtime, unit)
    _runtimes[model] = runtime
    return model


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a model that was sharded."""
    runtime = _runtimes.get(model)
    if runtime is None:
        raise StateError(
            "this model is not sharded; call memfit.shard(model) first, and give the model it was called with"
        )
    return runtime


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"shard takes a model, an nn.Module, not a {type(model).__name__}")
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "there is no process group: start the script with torchrun, and call "
            "torch.distributed.init_process_group() first"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"this model is wrapped in {type(model).__name__}; shard model.module instead")
    if any(module in _runtimes for module in model.modules()):
        raise StateError("this model, or a part of it, is sharded already; shard it once, with all its units")
    if hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules()):
        raise InputError(
            "this model is compiled, and its parameters would be gathered inside of compiled code; shard it first, "
            "then compile the forwards of its units: unit.forward = torch.compile(unit.forward)"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.distributed.tensor.DTensor):
            raise InputError(
                f"parameter {name!r} is a DTensor; memfit shards plain parameters, before fully_shard is called"
            )


def _mesh(model: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
        kind = kinds.pop() if len(kinds) == 1 else ("cuda" if torch.cuda.is_available() else "cpu")
        return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("shard",))
    if mesh.ndim not in (1, 2):
        raise InputError(
            f"mesh has {mesh.ndim} dimensions; give one, of ranks that shard, or two: replicas, then shards"
        )
    return mesh


def _device(mesh: DeviceMesh) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device(mesh.device_type)
    )


def _links(mesh: DeviceMesh, device: torch.device, timeout: timedelta | None) -> tuple[Link, Link | None]:
    if mesh.ndim == 1:
        return Link(mesh.get_group(), device, timeout), None
    return Link(mesh.get_group(1), device, timeout), Link(mesh.get_group(0), device, timeout)


def _nearby(mesh: DeviceMesh, ranks: int | None, device: torch.device, timeout: timedelta | None) -> Link | None:
    """The group of so many ranks next to each other that this rank is in."""
    if ranks is None:
        return None
    every = mesh.size(mesh.ndim - 1)
    if every % ranks or ranks >= every:
        raise InputError(f"reshard_ranks is {ranks}; give a divisor of the {every} ranks that shard, smaller than it")
    key = (tuple(mesh.mesh.flatten().tolist()), every, ranks)
    if key not in _groups:
        row = next(row for row in mesh.mesh.reshape(-1, ranks).tolist() if dist.get_rank() in row)
        group = dist.new_group(row, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        _groups[key] = group
    return Link(_groups[key], device, timeout)


def _alike(members: Sequence[Member]) -> list[list[Member]]:
    """Members by dtype, those that train apart from those that do not: a frozen parameter has no gradient to sum."""
    found: dict[tuple[torch.dtype, bool], list[Member]] = defaultdict(list)
    for member in members:
        found[member.parameter.dtype, member.parameter.requires_grad].append(member)
    return list(found.values())


def _ordered(units: Sequence[Unit], names: Sequence[str]) -> list[Unit]:
    by_name = {unit.name: unit for unit in units}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise InputError(f"order names {unknown[0]!r}, which is no unit; the units are {', '.join(map(repr, by_name))}")
    return [by_name[name] for name in names]


def _facts(found: Sequence[FoundUnit], *options: object) -> list[str]:
    """What must be the same on every rank, one a line."""
    facts = [repr(each) for each in options]
    for unit in found:
        facts.append(f"unit {unit.name!r} with {unit.options}")
        for member in unit.members:
            parameter = member.parameter
            facts.append(
                f"{member.names[0]!r} of shape {tuple(parameter.shape)}, {parameter.dtype}, "
                f"{'trained' if parameter.requires_grad else 'frozen'}"
            )
    return facts
