"""Process groups of a mesh."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit.errors import InputError
from memfit.sharded.links import Link
from memfit.torch_private.wrappers import default_group

_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def resolve_mesh(model: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
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


def make_comms(mesh: DeviceMesh, device: torch.device, timeout: timedelta | None) -> tuple[Link, Link | None]:
    """The group that shards, and that of replicas where there are any."""
    shards = _link(mesh.get_group(mesh.ndim - 1), device, timeout)
    return shards, _link(mesh.get_group(0), device, timeout) if mesh.ndim > 1 else None


def _link(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> Link:
    """A link whose messages go by a Gloo group of the same ranks: NCCL has no tags, and would mix them with data."""
    if device.type == "cpu":
        return Link(group, device, timeout)
    twin = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    assert isinstance(twin, dist.ProcessGroup)
    return Link(group, device, timeout, talk=Link(twin, torch.device("cpu"), timeout))


def nearby(mesh: DeviceMesh, ranks: int | None, device: torch.device, timeout: timedelta | None) -> Link | None:
    """The group of so many ranks next to each other that this rank is in."""
    if ranks is None:
        return None
    every = mesh.size(mesh.ndim - 1)
    if every % ranks or ranks >= every:
        raise InputError(f"reshard_ranks is {ranks}; give a divisor of the {every} ranks that shard, smaller than it")
    row = next(row for row in mesh.mesh.reshape(-1, ranks).tolist() if dist.get_rank() in row)
    made = _groups.setdefault(default_group(), {})
    group = made.get(tuple(row))
    if group is None:
        new = dist.new_group(row, use_local_synchronization=True)
        assert isinstance(new, dist.ProcessGroup)
        made[tuple(row)] = group = new
    return Link(group, device, timeout)
