"""The ranks of one verification: what each did is told to all, and no rank waits for one that has failed.

Note [Groups]: the step's collectives run on a process group made for the verification, or on one of each dimension of a
hybrid mesh, messages between the ranks on another. A rank that fails closes the connections of the first, and the
others' collectives raise at once instead of waiting for the timeout; these fail in turn and close theirs, so that ranks
which share no group with the first learn it, too. Then all meet on the second and learn which rank it was. The user's
groups are not touched. On NCCL nothing but the group's timeout ends a collective that other ranks wait in. All groups
stay for the next verification, until the process group is destroyed; closed ones are replaced then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memfit.sharded import RankError
from memfit.torch_private.distributed import clear_dtensor_caches
from memfit.torch_private.process_groups import cut, waits_on_device
from memfit.torch_private.wrappers import default_group
from memfit.verify.rank_messages import describe_failure, follows_another, gather_objects, message_group

T = TypeVar("T")
_steps: WeakKeyDictionary[dist.ProcessGroup, dict[int, list[dist.ProcessGroup]]] = WeakKeyDictionary()
"""Of each number of replicas, the groups of this rank: of the replicas where there are several, then of the shards."""


class RankGroup:
    """All ranks, which must make it together; `mesh` has a dimension of `replicas` where there are several."""

    def __init__(self, device_type: str, replicas: int = 1) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        world = default_group()
        self._talk, self._replicas = message_group(), replicas
        self._made = _steps.setdefault(world, {})
        shape = torch.arange(self.ranks).view(replicas, -1)
        if replicas not in self._made:
            self._made[replicas] = [_own_group(shape.T)] if replicas > 1 else []
            self._made[replicas].append(_own_group(shape))
        self._step = self._made[replicas]
        if replicas > 1:
            names = ("replicate", "shard")
            self.mesh = DeviceMesh.from_group(self._step, device_type, mesh=shape, mesh_dim_names=names)
        else:
            self.mesh = DeviceMesh.from_group(self._step[0], device_type, mesh_dim_names=("shard",))

    def run(self, about: str, act: Callable[[], T], *, sends: bool = True) -> T:
        """Run an action on every rank and return this rank's result; where one fails, all raise.

        The rank that failed raises its own error, the others a `RankError` with its text. `sends`: the action has
        collectives, which ranks may be waiting in when one fails.
        """
        failure: Exception | None = None
        result: list[T] = []
        try:
            result.append(act())
        except Exception as error:
            failure = error
            if sends:
                self._close()
        followed = follows_another(failure)
        told = self.gather((describe_failure(failure), followed))
        if sends and any(what is not None for what, _ in told):
            self._made.pop(self._replicas, None)
            clear_dtensor_caches()  # they have the mesh of the closed group, and take it for any that is equal
        failed = [(rank, what) for rank, (what, _) in enumerate(told) if what is not None]
        first = next(((rank, what) for rank, what in failed if not told[rank][1]), None)
        if failure is not None and (first is None or not followed):
            raise failure
        if first is not None:
            raise RankError(f"{about} failed on rank {first[0]}: {first[1]}") from failure
        return result[0]

    def gather(self, own: T) -> list[T]:
        """Return what every rank gave, rank 0's first."""
        return gather_objects(own, self._talk)

    def _close(self) -> None:
        """Close this rank's connections of the step's groups, where that ends a wait of others."""
        for group in self._step:
            if not waits_on_device(group):
                cut(group)


def _own_group(rows: torch.Tensor) -> dist.ProcessGroup:
    """Make a group of each row of ranks, and return the one that this rank is in."""
    made = [(row, dist.new_group(row)) for row in rows.tolist()]
    return next(group for row, group in made if dist.get_rank() in row and isinstance(group, dist.ProcessGroup))
