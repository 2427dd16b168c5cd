"""Parameters that tensor or expert parallel made DTensors, before they are sharded over another dimension of the mesh.

Note [Two meshes]
A DTensor on a mesh such as `mesh["tp"]` holds one block of the whole tensor. That block is what is sharded flat over
the ranks of `mesh["dp"]`; while a unit is gathered, its module holds the same DTensor around the gathered block, so
that what DTensor computes, and its gradients, are as without sharding. A gradient that comes in other placements, such
as a sum that is pending over `tp`, is redistributed before it is summed over `dp`. To users the parameter is a DTensor
on both meshes, first the one that shards it here, then its own (`covering`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from memfit.errors import InputError
from memfit.sharded.comm import ShardComm
from memfit.sharded.mesh import make_comm
from memfit.torch_private.distributed_tensors import local_tensor
from memfit.torch_private.dtensor import DTensorSpec, find_block, join_meshes, make_dtensor, make_spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelParallelSpec:
    """How a parameter was distributed before it was sharded: this rank's block of a whole tensor of `shape`.

    `links` are the groups along which other ranks have other blocks. See Note [Two meshes].
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    block: tuple[int, ...]
    offset: tuple[int, ...]
    covering: DeviceMesh
    links: tuple[ShardComm, ...]
    specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)

    def wrap(self, block: torch.Tensor) -> DTensor:
        """Return the DTensor that a block, which this rank has whole, is a part of."""
        spec = self.specs.get(block.dtype)
        if spec is None:
            spec = self.specs[block.dtype] = make_spec(self.mesh, self.placements, self.shape, block.dtype)
        return make_dtensor(block, spec)

    def block_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of a whole tensor, or of a DTensor that is one."""
        if isinstance(whole, DTensor):
            if self.same_as(whole):
                return _arrived(whole)
            whole = whole.full_tensor()
        return whole[tuple(slice(at, at + size) for at, size in zip(self.offset, self.block, strict=True))]

    def gradient_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of a gradient, in whatever placements autograd left it."""
        with torch.no_grad():
            if isinstance(gradient, DTensor) and not self.same_as(gradient):
                gradient = gradient.redistribute(self.mesh, self.placements)
            return _arrived(gradient)

    def same_as(self, value: DTensor) -> bool:
        """Return whether a DTensor is distributed as the parameter is."""
        return tuple(value.placements) == self.placements and value.device_mesh == self.mesh

    def alike(self, other: ModelParallelSpec | None) -> bool:
        """Return whether blocks of both are the same elements of a tensor."""
        return self is other or (
            other is not None
            and (self.shape, self.placements) == (other.shape, other.placements)
            and self.mesh == other.mesh
        )


class ModelParallelMeshes:
    """The meshes of a model's DTensor parameters, beside the one that shards them."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, timeout: timedelta | None) -> None:
        self._mesh = mesh
        self._device = device
        self._timeout = timeout
        self._links: dict[dist.ProcessGroup, ShardComm] = {}
        self._covering: dict[DeviceMesh, DeviceMesh] = {}

    @property
    def links(self) -> list[ShardComm]:
        """One for each dimension of these meshes that was met so far."""
        return list(self._links.values())

    def meet(self, meshes: Iterable[DeviceMesh]) -> None:
        """Make the groups along which parameters are distributed; every rank meets them in the same order."""
        for mesh in meshes:
            for dimension in range(mesh.ndim):
                self._link(mesh, dimension)

    def links_of(self, spec: ModelParallelSpec) -> tuple[ShardComm, ...]:
        """Return the groups along which other ranks have other blocks."""
        return tuple(
            self._link(spec.mesh, number) for number, each in enumerate(spec.placements) if isinstance(each, Shard)
        )

    def spec_of(self, parameter: torch.Tensor) -> ModelParallelSpec | None:
        """Return how a parameter is distributed; None for a plain one."""
        if not isinstance(parameter, DTensor):
            return None
        mesh, placements, shape = parameter.device_mesh, tuple(parameter.placements), tuple(parameter.shape)
        if mesh not in self._covering:
            self._covering[mesh] = join_meshes([self._mesh, mesh])
        block, offset = find_block(shape, mesh, placements)
        spec = ModelParallelSpec(
            mesh=mesh,
            placements=placements,
            shape=shape,
            block=block,
            offset=offset,
            covering=self._covering[mesh],
            links=(),
        )
        return replace(spec, links=self.links_of(spec))

    def _link(self, mesh: DeviceMesh, dimension: int) -> ShardComm:
        group = mesh.get_group(dimension)
        if group not in self._links:
            self._links[group] = make_comm(group, self._device, self._timeout)
        return self._links[group]


def check_distributed(name: str, parameter: torch.Tensor, mesh: DeviceMesh | None) -> None:
    """Refuse a DTensor that cannot be sharded over a mesh, which is None for all ranks."""
    if not isinstance(parameter, DTensor):
        return
    own, placements = parameter.device_mesh, parameter.placements  # all ranks must find the same text for an error
    wrong = [each for each in placements if type(each) is not Replicate and type(each) is not Shard]
    if wrong:
        raise InputError(
            f"parameter {name!r} is a DTensor with the placement {wrong[0]!r}; memfit shards blocks of tensors: "
            "redistribute it to Shard and Replicate placements first"
        )
    if mesh is not None and own.device_type != mesh.device_type:
        raise InputError(
            f"parameter {name!r} is a DTensor on a mesh of {own.device_type!r}, and the one given is of "
            f"{mesh.device_type!r}; make both parts of one mesh, init_device_mesh({mesh.device_type!r}, ...)"
        )
    ranks = set(own.mesh.flatten().tolist())
    others = set(range(dist.get_world_size())) if mesh is None else set(mesh.mesh.flatten().tolist())
    if len(ranks & others) > 1:
        given = "all ranks, as no mesh was given" if mesh is None else f"those given, {mesh.mesh_dim_names}"
        raise InputError(
            f"parameter {name!r} is a DTensor on the dimensions {own.mesh_dim_names} of a mesh, which overlap with "
            f"{given}; give the other dimension of the mesh, as mesh=mesh['dp'], and do not shard what fully_shard has "
            "sharded"
        )
    if mesh is not None:
        try:
            join_meshes([mesh, own])
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:  # TypeError: a mesh without names
            raise InputError(
                f"parameter {name!r} is a DTensor on a mesh that cannot be joined with the one given; make one mesh "
                "with a name for each dimension, init_device_mesh(..., mesh_dim_names=('dp', 'tp')), and use its parts "
                "for both"
            ) from error
    block, _ = find_block(tuple(parameter.shape), own, tuple(placements))
    found = tuple(local_tensor(parameter).shape)
    if found != block:
        raise InputError(
            f"parameter {name!r} is a DTensor with other elements here than its placements {tuple(placements)} give; "
            "distribute it with torch.distributed.tensor.distribute_tensor"
        )


def describe(parameter: torch.Tensor) -> str:
    """Say how a parameter is distributed, for ranks to compare."""
    if not isinstance(parameter, DTensor):
        return ""
    return f", a DTensor on {parameter.device_mesh.mesh_dim_names} with {tuple(parameter.placements)}"


def _arrived(value: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, when a collective that makes it has ended."""
    while isinstance(value, DTensor):
        value = value.to_local()
    wait = getattr(value, "wait", None)  # of AsyncCollectiveTensor
    return value if wait is None else wait()
