"""Whether ranks have plans that go together, and a plan of a step that is parallel itself suits the model and ranks.

Note [Kinds of plans]: some plans make ranks talk to each other when they are applied, and some do not. Where one rank
has a plan of another kind, the others would wait for it. So in a process group of several ranks the first thing that
`apply` does is to tell all ranks what this one is about to do, or why it refuses to, whatever the plan: all of them go
on, or all raise. Every rank calls `apply` for that, also where each has a model of its own.

Note [Collectives run again]: a unit that is recomputed runs its collectives again, in the backward. That is right where
all ranks of a group do so in the same order. Ranks may have plans of their own (`Plan.rank`), because they differ:
stages of a pipeline, ranks of a context parallel sequence. So before anything is changed ranks tell each other which
collectives their plans run again, and those that share a group must run the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memfit.errors import InputError, MemfitError
from memfit.plans import Plan

T = TypeVar("T")
Collectives = Sequence[tuple[str, int, str, tuple[str, ...]]]
"""What runs again: unit, offset of the op in it, what it does, and along which dimensions of the mesh."""


def kind_of(plan: Plan, wrappers: Sequence[str]) -> str:
    """Say what ranks do with a plan together, on a model in these wrappers."""
    if plan.mesh:
        return "a plan of a step on a mesh"
    if plan.shard is not None and not wrappers:
        return "a plan that shards its model"
    return "a plan that only checkpoints" + (", on a model that is wrapped" if plan.shard is not None else "")


def compare_kinds(kind: str, refusal: MemfitError | None, mesh: DeviceMesh | None) -> None:
    """Raise on every rank where one has another kind of plan or refuses its own (Note [Kinds of plans]).

    The ranks are those of `mesh`, else all of the process group. On this rank `refusal` is raised, where there is one.
    """
    told: list[tuple[int, str, str | None]] = []
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        told.append((dist.get_rank(), kind, None if refusal is None else str(refusal)))
        if mesh is None:
            told = _gathered(told, None)
        else:  # along one dimension after the other, so that each rank learns of all
            for dim in range(mesh.ndim):
                told = _gathered(told, mesh.get_group(dim))
    if refusal is not None:
        raise refusal
    for rank, _, said in told:
        if said is not None:
            raise InputError(f"rank {rank} refuses the plan, so no rank runs it: {said}")
    for rank, found, _ in told:
        if found != told[0][1]:
            raise InputError(
                f"rank {told[0][0]} has {told[0][1]}, and rank {rank} has {found}; give every rank a plan of the same "
                "step, and a model that is wrapped as the others are"
            )


def _gathered(told: list[T], group: dist.ProcessGroup | None) -> list[T]:
    if dist.get_backend(group) == "fake":  # ranks that are not there
        return told
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, told, group=group)
    return [each for one in found for each in one]


def check_wrapped(plan: Plan, wrappers: Sequence[str]) -> None:
    """Refuse a model that is not wrapped as the planned one was."""
    if isinstance(plan.wrappers, tuple):
        missing = [name for name in plan.wrappers if name not in wrappers]
    else:  # a plan of an earlier version; a stage of a pipeline need not be wrapped
        missing = ["a wrapper"] if not wrappers and not isinstance(plan.rank, int) else []
    if missing:
        raise InputError(
            f"the plan is for a model that is wrapped on a mesh ({plan.mesh}) in {', '.join(missing)}, and this one is "
            "not; wrap it as the step does that was planned, then apply the plan"
        )


def agree(plan: Plan, refusal: MemfitError | None) -> None:
    """Refuse other ranks than planned, and ranks that disagree; raise `refusal`, what this rank alone may refuse.

    Every rank must call it: they compare the collectives that run again, and no rank waits for one that refused.
    """
    assert isinstance(plan.mesh, dict)
    if not dist.is_available() or not dist.is_initialized():
        if refusal is not None:
            raise refusal
        return
    own = plan.collectives if isinstance(plan.collectives, tuple) else ()
    again = [(each.unit, each.offset, each.kind, each.dims) for each in own]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (None if refusal is None else str(refusal), list(plan.mesh.items()), again))
    if refusal is not None:
        raise refusal
    for rank, (said, mesh, _) in enumerate(told):
        if said is not None:
            raise InputError(f"rank {rank} refuses the plan, so no rank runs it: {said}")
        if mesh != told[0][1]:
            raise InputError(f"rank 0 has a plan for the mesh {dict(told[0][1])}, and rank {rank} for {dict(mesh)}")
    ranks = math.prod(plan.mesh.values())
    if dist.get_world_size() != ranks:
        raise InputError(
            f"the plan is for {ranks} ranks ({plan.mesh}), and here are {dist.get_world_size()}; start as many, or "
            "plan for the mesh that there is"
        )
    differing = find_disagreement(plan.mesh, [collectives for _, _, collectives in told])
    if differing is not None:
        one, other, what = differing
        raise InputError(
            f"ranks {one} and {other} share a group of the mesh, and their plans run different collectives again "
            f"({what}): they would wait for each other for ever. Give ranks of one group the same plan, made for the "
            "one that needs most"
        )


def find_disagreement(mesh: Mapping[str, int], told: Sequence[Collectives]) -> tuple[int, int, str] | None:
    """Return two ranks of one group that would run different collectives again, and the first of those; else None."""
    for dims in {tuple(each[3]) for collectives in told for each in collectives}:
        first: dict[tuple[int, ...], int] = {}
        for rank, collectives in enumerate(told):
            place = tuple(at for name, at in _coordinate(mesh, rank).items() if dims and name not in dims)
            leader = first.setdefault(place, rank)
            own, others = (
                [tuple(each[:3]) for each in found if tuple(each[3]) == dims] for found in (collectives, told[leader])
            )
            if own != others:
                length = next(
                    (at for at, pair in enumerate(zip(own, others, strict=False)) if pair[0] != pair[1]),
                    min(len(own), len(others)),
                )
                unit, _, kind = (own if length < len(own) else others)[length]
                return leader, rank, f"{kind} along {', '.join(dims) or 'the mesh'} in {unit}"
    return None


def _coordinate(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return where a rank is in the mesh, whose last dimension counts fastest."""
    found: dict[str, int] = {}
    for name, size in reversed(list(mesh.items())):
        rank, found[name] = divmod(rank, size)
    return found
