"""Whether a plan of a step that is parallel itself suits the model and the ranks that are here.

Note [Collectives run again]: a unit that is recomputed runs its collectives again, in the backward. That is right where
all ranks of a group do so in the same order. Ranks may have plans of their own (`Plan.rank`), because they differ:
stages of a pipeline, ranks of a context parallel sequence. So before anything is changed ranks tell each other which
collectives their plans run again, and those that share a group must run the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from memfit.errors import InputError, MemfitError
from memfit.plans import Plan

Collectives = Sequence[tuple[str, int, str, tuple[str, ...]]]
"""What runs again: unit, offset of the op in it, what it does, and along which dimensions of the mesh."""


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
