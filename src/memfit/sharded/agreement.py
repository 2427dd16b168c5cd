"""Whether all ranks were given the same: asked before anything else is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from memfit.sharded.errors import RankMismatch


def check_agreement(group: dist.ProcessGroup, device: torch.device, facts: Sequence[str]) -> None:
    """Compare facts, one a line, between the ranks of a group; name the first that differs, and on which rank."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return
    text = "\n".join(facts).encode()
    digests = _gathered(torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8), group, device)
    if len({bytes(each.tolist()) for each in digests}) == 1:
        return
    lengths = [int(each) for each in _gathered(torch.tensor([len(text)]), group, device)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [
        bytes(each.tolist()[:length]).decode()
        for each, length in zip(_gathered(padded, group, device), lengths, strict=True)
    ]
    first = texts[0].splitlines()
    for rank, other in enumerate(texts[1:], 1):
        for here, there in zip_longest(first, other.splitlines(), fillvalue="nothing"):
            if here != there:
                numbers = [dist.get_global_rank(group, each) for each in (0, rank)]
                raise RankMismatch(
                    f"ranks were given different models, units or options: rank {numbers[0]} has {here}, rank "
                    f"{numbers[1]} has {there}. Build the same model with the same options on every rank"
                )


def _gathered(own: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> list[torch.Tensor]:
    own = own.to(device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [each.cpu() for each in found]
