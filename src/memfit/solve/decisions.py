"""The kinds of decisions that a plan may take beside checkpointing, and how a user names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from memfit.errors import InputError
from memfit.text import close_names, did_you_mean

Decided = Literal[
    "reshard",
    "prefetch",
    "offload",
    "segments",
    "loss",
    "optimizer",
    "units",
    "replicas",
    "cpu_offload",
    "micro_batch",
]
DecidedGroup = Literal["exact", "all"]
DECISIONS: tuple[Decided, ...] = get_args(Decided)
EXACT: tuple[Decided, ...] = ("reshard", "prefetch", "offload", "segments")
"""Those that keep losses, gradients and parameters bit for bit."""
DEFAULT_DECISIONS: tuple[Decided, ...] = ("reshard", "prefetch", "offload")
"""What plans decide unless they are told: how GPUs gather, where that may gain (`joint.searched_kinds`), and offload,
where host memory was granted."""
GROUPS: dict[DecidedGroup, tuple[Decided, ...]] = {"exact": EXACT, "all": DECISIONS}


def resolve_decisions(given: object, option: str) -> tuple[str, ...]:
    """Return kinds and names of groups as a tuple without repetitions; refuse what is neither."""
    names = (given,) if isinstance(given, str) else given
    groups = GROUPS if option == "decide" else {}
    known = (*groups, *DECISIONS)
    if not isinstance(names, tuple | list):
        raise InputError(f"{option} is {given!r}; give {', '.join(map(repr, known))}, or a tuple of them")
    for name in names:
        if name not in known:
            hint = did_you_mean(map(repr, close_names(str(name), known)), f"there are {', '.join(known)}")
            raise InputError(f"{option} has {name!r}, which is no decision; {hint}")
    return tuple(dict.fromkeys(names))


def expand_decisions(names: Iterable[str], given: Iterable[Decided]) -> tuple[Decided, ...]:
    """Return the kinds that are named, and those of named groups but for the ones whose values are `given`."""
    names, given = tuple(names), frozenset(given)
    of_groups = {kind for group, kinds in GROUPS.items() if group in names for kind in kinds if kind not in given}
    return tuple(kind for kind in DECISIONS if kind in names or kind in of_groups)
