"""Process groups of a mesh."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit.errors import InputError
from memfit.sharded.comm import ShardComm
from memfit.torch_private.process_groups import group_of, timeout_of
from memfit.torch_private.wrappers import default_group

_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def resolve_mesh(model: nn.Module, mesh: DeviceMesh | None, *, replicas: int = 1) -> DeviceMesh:
    """Return the mesh that was given, or all ranks in one dimension, in two where there are replicas."""
    if mesh is None:
        kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
        kind = kinds.pop() if len(kinds) == 1 else ("cuda" if torch.cuda.is_available() else "cpu")
        ranks = dist.get_world_size()
        if replicas > 1:
            return init_device_mesh(kind, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
        return init_device_mesh(kind, (ranks,), mesh_dim_names=("shard",))
    if not isinstance(mesh, DeviceMesh):
        raise InputError(f"mesh is a {type(mesh).__name__}; give a DeviceMesh: init_device_mesh(device, {mesh!r})")
    if mesh.ndim not in (1, 2):
        raise InputError(
            f"mesh has {mesh.ndim} dimensions; give one, of ranks that shard, or two: replicas, then shards"
        )
    return mesh


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank computes on."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device(mesh.device_type)
    )


def make_comms(mesh: DeviceMesh, device: torch.device, timeout: timedelta | None) -> tuple[ShardComm, ShardComm | None]:
    """Make the group that shards, and that of replicas where there are any."""
    shards = make_comm(mesh.get_group(mesh.ndim - 1), device, timeout)
    return shards, make_comm(mesh.get_group(0), device, timeout) if mesh.ndim > 1 else None


def make_comm(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> ShardComm:
    """Make a `ShardComm` with a Gloo group for messages: NCCL has no tags, and would mix them with data."""
    if device.type == "cpu":
        return ShardComm(group, device, timeout)
    twin = group_of(dist.get_process_group_ranks(group), backend="gloo", timeout=timeout or timeout_of(group))
    return ShardComm(group, device, timeout, control=ShardComm(twin, torch.device("cpu"), timeout))


def make_reshard_comm(
    mesh: DeviceMesh, ranks: int | None, device: torch.device, timeout: timedelta | None
) -> ShardComm | None:
    """Return the group of so many ranks next to each other that this rank is in."""
    if ranks is None:
        return None
    every = mesh.size(mesh.ndim - 1)
    if every % ranks or ranks >= every:
        raise InputError(f"reshard_ranks is {ranks}; give a divisor of the {every} ranks that shard, smaller than it")
    row = next(row for row in mesh.mesh.reshape(-1, ranks).tolist() if dist.get_rank() in row)
    made = _groups.setdefault(default_group(), {})
    group = made.get(tuple(row))
    if group is None:
        made[tuple(row)] = group = group_of(row, timeout=timeout or timeout_of(mesh.get_group(mesh.ndim - 1)))
    return ShardComm(group, device, timeout)
