"""Collectives of one process group: gathers in place and sums of parts, under way while the host goes on.

Note [Pairs]
Gloo gathers into a buffer of its own and copies, and has no reduce-scatter: PyTorch emulates it by a copy, an all-
reduce and a slice, which is twice the traffic. On a CPU each rank therefore sends its part straight to every other
rank, and receives straight into place: the same bytes as a gather needs, no copy, and it is known which rank did not
answer. Tags keep the transfers of different units apart, so that ranks which disagree wait in vain instead of mixing
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from memfit.sharded.errors import CollectiveError

_gather_native: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_native: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transfer:
    """A collective under way. `about` says which, for errors."""

    __slots__ = ("_link", "_works", "about")

    def __init__(self, link: Link, about: str, works: list[tuple[dist.Work, int | None]]) -> None:
        self._link = link
        self._works = works
        self.about = about

    def wait(self) -> None:
        """Return when it has ended; on CUDA, make the current stream wait."""
        works, self._works = self._works, []
        for work, peer in works:
            try:
                if self._link.timeout is None:
                    work.wait()
                else:
                    work.wait(self._link.timeout)
            except RuntimeError as error:
                raise CollectiveError(self._link.reason(self.about, peer, error)) from error


class SumTransfer:
    """The sum of this rank's part over all ranks, under way."""

    __slots__ = ("_own", "_parts", "_transfer")

    def __init__(self, transfer: Transfer, own: torch.Tensor | None, parts: list[torch.Tensor]) -> None:
        self._transfer = transfer
        self._own = own
        self._parts = parts

    def result(self) -> torch.Tensor:
        """The sum, in a tensor of its own."""
        self._transfer.wait()
        total = self._parts[0]
        if self._own is not None:
            total.add_(self._own)
        for part in self._parts[1:]:
            total.add_(part)
        return total


class Link:
    """A process group and this rank's place in it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.timeout = timeout
        self._pairs = device.type == "cpu" and dist.get_backend(group) != "mpi"
        self._others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor."""
        elements = whole.numel() // self.ranks
        return whole.narrow(0, self.rank * elements, elements)

    def gather(self, whole: torch.Tensor, tag: int, about: str) -> Transfer:
        """Fill a flat tensor with the parts of all ranks; this rank's own is already in its place."""
        if self.ranks == 1:
            return Transfer(self, about, [])
        if self._pairs:
            own = self.part(whole)
            return Transfer(self, about, self._exchange(lambda _: own, whole.chunk(self.ranks), tag, about))
        work = self._begin(about, lambda: _gather_native(whole, self.part(whole), group=self.group, async_op=True))
        return Transfer(self, about, [(work, None)])

    def sum_parts(self, whole: torch.Tensor, tag: int, about: str) -> SumTransfer:
        """Begin to sum a flat tensor over ranks; each rank gets its part. `whole` must stay as it is until then."""
        if self.ranks == 1:
            return SumTransfer(Transfer(self, about, []), None, [whole])
        own = self.part(whole)
        if self._pairs:
            sent = whole.chunk(self.ranks)
            received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.ranks)]
            works = self._exchange(lambda rank: sent[rank], received, tag, about)
            return SumTransfer(Transfer(self, about, works), own, [received[rank] for rank in self._others])
        total = torch.empty_like(own)
        work = self._begin(about, lambda: _reduce_native(total, whole, group=self.group, async_op=True))
        return SumTransfer(Transfer(self, about, [(work, None)]), None, [total])

    def all_reduce(self, tensor: torch.Tensor, about: str) -> Transfer:
        """Begin to sum a tensor over ranks, in place."""
        if self.ranks == 1:
            return Transfer(self, about, [])
        work = self._begin(about, lambda: dist.all_reduce(tensor, group=self.group, async_op=True))
        return Transfer(self, about, [(work, None)])

    def reason(self, about: str, peer: int | None, error: BaseException) -> str:
        """The message of an error: who waited for whom, and in which collective."""
        own = dist.get_global_rank(self.group, self.rank)
        other = "another rank" if peer is None else f"rank {dist.get_global_rank(self.group, peer)}"
        detail = str(error).strip().splitlines()
        return (
            f"rank {own}: {about} failed, {other} did not answer: {detail[0] if detail else type(error).__name__}. "
            "See what that rank printed last; training goes on from the last save with all ranks started again"
        )

    def _exchange(
        self,
        sent: Callable[[int], torch.Tensor],
        received: list[torch.Tensor] | tuple[torch.Tensor, ...],
        tag: int,
        about: str,
    ) -> list[tuple[dist.Work, int | None]]:
        """Send to and receive from every other rank; receives first, so that nothing waits for a place."""
        works: list[tuple[dist.Work, int | None]] = []
        for rank in reversed(self._others):
            works.append((self._begin(about, partial(self.group.recv, [received[rank]], rank, tag), rank), rank))
        for rank in self._others:
            works.append((self._begin(about, partial(self.group.send, [sent(rank)], rank, tag), rank), rank))
        return works

    def _begin(self, about: str, start: Callable[[], dist.Work], peer: int | None = None) -> dist.Work:
        try:
            return start()
        except RuntimeError as error:
            raise CollectiveError(self.reason(about, peer, error)) from error
