"""Whether all ranks were given the same: asked before anything else is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from memfit.sharded.errors import RankMismatch
from memfit.sharded.links import Link


def check_agreement(link: Link, facts: Sequence[str]) -> None:
    """Compare facts, one a line, between the ranks of a group; name the first that differs, and on which rank."""
    text = "\n".join(facts).encode()
    digests = link.tell(hashlib.sha256(text).digest(), "comparison of what ranks were given")
    if len(set(digests)) == 1:
        return
    told = [each.decode().split("\n") for each in link.tell(text, "comparison of what ranks were given")]
    for rank, other in enumerate(told[1:], 1):
        if other != told[0]:
            here, there = _difference(told[0], other)
            raise RankMismatch(
                f"ranks were given different models, units or options: rank {link.global_rank(0)} has {here}, rank "
                f"{link.global_rank(rank)} has {there}. Build the same model with the same options on every rank"
            )


def _difference(first: Sequence[str], second: Sequence[str]) -> tuple[str, str]:
    """The first facts that only one of two ranks has; where both have the same, the first in another place."""
    here = next((fact for fact in first if fact not in set(second)), None)
    there = next((fact for fact in second if fact not in set(first)), None)
    if here is None and there is None and len(first) == len(second):
        pairs = zip(first, second, strict=True)
        return next((f"{one} first", f"{other} first") for one, other in pairs if one != other)
    return here or "no such thing", there or "no such thing"
