"""Whether all ranks were given the same: asked before anything else is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

from memfit.sharded.errors import RankMismatch
from memfit.sharded.links import Link


def check_agreement(link: Link, facts: Sequence[str]) -> None:
    """Compare facts, one a line, between the ranks of a group; name the first that differs, and on which rank."""
    text = "\n".join(facts).encode()
    digests = link.tell(hashlib.sha256(text).digest(), "comparison of what ranks were given")
    if len(set(digests)) == 1:
        return
    texts = [each.decode() for each in link.tell(text, "comparison of what ranks were given")]
    first = texts[0].splitlines()
    for rank, other in enumerate(texts[1:], 1):
        for here, there in zip_longest(first, other.splitlines(), fillvalue="nothing"):
            if here != there:
                raise RankMismatch(
                    f"ranks were given different models, units or options: rank {link.global_rank(0)} has {here}, rank "
                    f"{link.global_rank(rank)} has {there}. Build the same model with the same options on every rank"
                )
