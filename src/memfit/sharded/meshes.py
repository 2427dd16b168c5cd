"""Process groups of a mesh."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit.errors import InputError
from memfit.sharded.links import Link

_groups: dict[tuple[tuple[int, ...], int, int], dist.ProcessGroup] = {}


def mesh_of(model: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh that was given, or all ranks in one dimension."""
    if mesh is None:
        kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
        kind = kinds.pop() if len(kinds) == 1 else ("cuda" if torch.cuda.is_available() else "cpu")
        return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("shard",))
    if mesh.ndim not in (1, 2):
        raise InputError(
            f"mesh has {mesh.ndim} dimensions; give one, of ranks that shard, or two: replicas, then shards"
        )
    return mesh


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device that this rank computes on."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device(mesh.device_type)
    )


def links_of(mesh: DeviceMesh, device: torch.device, timeout: timedelta | None) -> tuple[Link, Link | None]:
    """The group that shards, and that of replicas where there are any."""
    if mesh.ndim == 1:
        return Link(mesh.get_group(), device, timeout), None
    return Link(mesh.get_group(1), device, timeout), Link(mesh.get_group(0), device, timeout)


def nearby(mesh: DeviceMesh, ranks: int | None, device: torch.device, timeout: timedelta | None) -> Link | None:
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
