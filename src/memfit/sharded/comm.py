"""Asynchronous collectives of one process group: in-place all-gathers, reduce-scatters and all-reduces.

Note [Pairs]
Gloo gathers into a buffer of its own and copies, and has no reduce-scatter: PyTorch emulates it by a copy, an all-
reduce and a slice, which is twice the traffic. On a CPU each rank therefore sends its part straight to every other
rank, and receives straight into place: the same bytes as a gather needs, no copy, and it is known which rank did not
answer. Tags keep the transfers of different units and passes apart, so that ranks which disagree wait in vain instead
of mixing parameters.

Note [Failures]
A wait that takes too long makes Gloo close every connection of the group, so there is no way on but a restart. The
group is marked then: nothing more is begun on it, and what is under way is dropped, not waited for. A dropped transfer
gives up its works first, since Gloo writes to their buffers as long as they exist.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from threading import Thread
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from memfit.errors import MemfitError
from memfit.torch_private.autograd import base_of

TELL_TAG = 1 << 29
"""Apart from the tags of units and of state."""

_FRAME_BYTES = 256
_LENGTH_BYTES = 8
_RESTART = "Start all ranks again and go on from the last save"

_gather_native: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_native: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transfer:
    """A collective under way. `about` says which, for errors."""

    __slots__ = ("_link", "_works", "about")

    def __init__(self, link: ShardComm, about: str, works: list[tuple[dist.Work, int | None]]) -> None:
        self._link = link
        self._works = works
        self.about = about

    def wait(self) -> None:
        """Return when it has ended; on CUDA, make the current stream wait."""
        works, self._works = self._works, []
        if works and self._link.failure is not None:
            works.clear()
            self._link.check(self.about)
        for work, peer in works:
            try:
                if self._link.waits_on_host and self._link.timeout is not None:
                    work.wait(self._link.timeout)
                else:  # NCCL's own watchdog has the group's timeout; with one here the host would stop at every wait
                    work.wait()
            except RuntimeError as error:
                del work
                works.clear()
                raise self._link.failed(self.about, peer, error) from error


def wait_all(transfers: Iterable[Transfer]) -> None:
    """Wait for several; where one fails the others are dropped. See Note [Failures]."""
    failure: CollectiveError | None = None
    for transfer in transfers:
        try:
            transfer.wait()
        except CollectiveError as error:
            failure = failure or error
    if failure is not None:
        raise failure


class SumTransfer:
    """The sum of this rank's part over all ranks, under way."""

    __slots__ = ("_own", "_parts", "_transfer")

    def __init__(self, transfer: Transfer, own: torch.Tensor | None, parts: list[torch.Tensor]) -> None:
        self._transfer = transfer
        self._own = own
        self._parts = parts

    def result(self) -> torch.Tensor:
        """Return the sum, in a tensor of its own."""
        self._transfer.wait()
        total = self._parts[0]
        if self._own is not None:
            total.add_(self._own)
        for part in self._parts[1:]:
            total.add_(part)
        return total


class ReplicaSum(Transfer):
    """The sum of a tensor over ranks, in the same order on each of them."""

    __slots__ = ("_parts",)

    def __init__(
        self, link: ShardComm, about: str, works: list[tuple[dist.Work, int | None]], parts: list[torch.Tensor]
    ) -> None:
        super().__init__(link, about, works)
        self._parts = parts

    def wait(self) -> None:
        """Return when the tensor of this rank has the sum."""
        parts, self._parts = self._parts, []
        super().wait()
        if parts:
            total = parts[0]
            for part in parts[1:]:
                total.add_(part)
            own = parts[self._link.rank]
            if own is not total:
                own.copy_(total)


def join_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join parts into a flat tensor, without a copy where they are views of one."""
    first = parts[0]
    base = base_of(first)
    whole = first if base is None else base
    return whole if whole.numel() == sum(part.numel() for part in parts) else torch.cat(list(parts))


_failures: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
_notices: WeakKeyDictionary[dist.ProcessGroup, Notices] = WeakKeyDictionary()


class ShardComm:
    """A process group and this rank's place in it; `members` are the numbers that its ranks have among all."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta | None = None,
        control: ShardComm | None = None,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self.timeout = timeout
        self._control = control
        self.notices = _notices.setdefault(group, Notices(group))
        self._device = device
        self._pairs = device.type == "cpu" and dist.get_backend(group) != "mpi"
        self._others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    @property
    def waits_on_host(self) -> bool:
        """Whether a wait ends when the collective does, and not when the device has been told to wait."""
        return self._device.type == "cpu"

    @property
    def separate_parts(self) -> bool:
        """Whether the parts of a sum may lie anywhere, or must be one tensor."""
        return self._pairs

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a flat tensor."""
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

    def sum_parts(self, parts: Sequence[torch.Tensor], tag: int, about: str) -> SumTransfer:
        """Begin to sum over ranks the part of each; this rank gets its own. They must stay as they are until then."""
        own = parts[self.rank]
        if self.ranks == 1:
            return SumTransfer(Transfer(self, about, []), None, [own])
        if self._pairs:
            received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.ranks)]
            works = self._exchange(lambda rank: parts[rank], received, tag, about)
            return SumTransfer(Transfer(self, about, works), own, [received[rank] for rank in self._others])
        total, whole = torch.empty_like(own), join_parts(parts)
        work = self._begin(about, lambda: _reduce_native(total, whole, group=self.group, async_op=True))
        return SumTransfer(Transfer(self, about, [(work, None)]), None, [total])

    def sum_replicas(self, tensor: torch.Tensor, tag: int, about: str) -> Transfer:
        """Begin to sum a tensor over ranks, in place."""
        if self.ranks == 1 or not self._pairs:
            return self.all_reduce(tensor, about)
        parts = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.ranks)]
        return ReplicaSum(self, about, self._exchange(lambda _: tensor, parts, tag, about), parts)

    def all_reduce(self, tensor: torch.Tensor, about: str, *, largest: bool = False) -> Transfer:
        """Begin to sum a tensor over ranks, in place, or to take the largest of each element."""
        if self.ranks == 1:
            return Transfer(self, about, [])
        options = dist.AllreduceOptions()
        if largest:
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        if self.timeout is not None:  # else Gloo's thread would wait on, and keep the process from ending
            options.timeout = self.timeout
        peer = self._others[0] if self.ranks == 2 else None
        work = self._begin(about, lambda: self.group.allreduce([tensor], options), peer)
        return Transfer(self, about, [(work, peer)])

    def broadcast(self, tensor: torch.Tensor, about: str) -> Transfer:
        """Begin to give every rank the first one's values."""
        if self.ranks == 1:
            return Transfer(self, about, [])
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self.timeout is not None:
            options.timeout = self.timeout
        peer = None if self.rank == 0 and self.ranks > 2 else self._others[0] if self.rank == 0 else 0
        return Transfer(
            self, about, [(self._begin(about, lambda: self.group.broadcast([tensor], options), peer), peer)]
        )

    def tell(self, content: bytes, topic: str, detail: str = "") -> list[bytes]:
        """Exchange what every rank has to say on a topic, this rank's own included; `detail` is for errors."""
        if self.ranks == 1:
            return [content]
        if self._control is not None:
            return self._control.tell(content, topic, detail)
        about = topic + detail
        answers = [each.partition(b"\0") for each in self._told(topic.encode() + b"\0" + content, about)]
        for rank, (theirs, _, _) in enumerate(answers):
            if theirs != topic.encode():
                raise self.failed(about, rank, f"is at {theirs.decode(errors='replace')} meanwhile")
        return [each for _, _, each in answers]

    @property
    def failure(self) -> str | None:
        """What made this rank give the group up, if anything did."""
        return _failures.get(self.group)

    def check(self, about: str) -> None:
        """Refuse to begin anything on a group that was given up."""
        if self.failure is not None:
            raise CollectiveError(f"{about} is impossible, since an earlier collective failed. {self.failure}")

    def failed(self, about: str, peer: int | None, error: BaseException | str) -> CollectiveError:
        """Give the group up. The error says who waited for whom in which collective, and what the other said last."""
        if self.failure is not None:
            return CollectiveError(f"{about} failed too. {self.failure}")
        other = "another rank" if peer is None else f"rank {self.global_rank(peer)}"
        what, closed = (error, False) if isinstance(error, str) else _said(str(error), self.timeout)
        reason = f"rank {self.global_rank(self.rank)}: {about} failed, {other} {what}"
        asked = self._others if peer is None else [peer]
        told = next((said for said in (self.notices.of(rank, late=closed) for rank in asked) if said), None)
        if told == self.notices.said:  # what this rank said itself, passed on
            told = None
        self.notices.say(told or reason)
        text = f"{reason}. {'' if told is None else f'What it said last: {told}. '}{_RESTART}"
        _failures[self.group] = text
        return CollectiveError(text)

    def renewed(self) -> None:
        """Take the group up again, whose connections were made anew on all of its ranks."""
        _failures.pop(self.group, None)
        self.notices.clear()

    def global_rank(self, rank: int) -> int:
        """Return the number that a rank of this group has among all."""
        return self.members[rank]

    def _told(self, message: bytes, about: str) -> list[bytes]:
        """Messages of any length: what does not fit into a frame follows."""
        first = len(message).to_bytes(_LENGTH_BYTES, "little") + message[: _FRAME_BYTES - _LENGTH_BYTES]
        frames = self._rows(first, _FRAME_BYTES, about)
        lengths = [int.from_bytes(frame[:_LENGTH_BYTES], "little") for frame in frames]
        heads = [frame[_LENGTH_BYTES:] for frame in frames]
        rest = max(lengths) - len(heads[0])
        tails = self._rows(message[len(heads[0]) :], rest, about) if rest > 0 else [b""] * self.ranks
        return [(head + tail)[:length] for head, tail, length in zip(heads, tails, lengths, strict=True)]

    def _rows(self, own: bytes, length: int, about: str) -> list[bytes]:
        padded = bytearray(own.ljust(length, b"\0"))
        whole = torch.empty(self.ranks * length, dtype=torch.uint8, device=self._device)
        self.part(whole).copy_(torch.frombuffer(padded, dtype=torch.uint8))
        self.gather(whole, TELL_TAG, about).wait()
        return [row.numpy().tobytes() for row in whole.cpu().split(length)]

    def _exchange(
        self,
        sent: Callable[[int], torch.Tensor],
        received: list[torch.Tensor] | tuple[torch.Tensor, ...],
        tag: int,
        about: str,
    ) -> list[tuple[dist.Work, int | None]]:
        """Send to and receive from every other rank; receives first, so that nothing waits for a place."""
        works: list[tuple[dist.Work, int | None]] = []
        try:
            for rank in reversed(self._others):
                works.append((self._begin(about, partial(self.group.recv, [received[rank]], rank, tag), rank), rank))
            for rank in self._others:
                works.append((self._begin(about, partial(self.group.send, [sent(rank)], rank, tag), rank), rank))
        except CollectiveError:
            works.clear()
            raise
        return works

    def _begin(self, about: str, start: Callable[[], dist.Work], peer: int | None = None) -> dist.Work:
        self.check(about)
        try:
            return start()
        except RuntimeError as error:
            raise self.failed(about, peer, error) from error


def _said(error: str, timeout: timedelta | None) -> tuple[str, bool]:
    """Return a backend's error in plain words, and whether the other rank closed the connection."""
    if "imed out" in error:
        waited = re.search(r"(\d+) ?ms", error)
        seconds = int(waited[1]) / 1000 if waited else timeout.total_seconds() if timeout else None
        return "did not answer" + ("" if seconds is None else f" within {seconds:g} s"), False
    if re.search("by peer|[Cc]losed|Broken pipe", error):
        return "closed its connection: it ended, or gave up", True
    lines = re.sub(r"\[[^]]*\.(cc|cpp|h|hpp):\d+\] ?", "", error).strip().splitlines()
    return f"cannot be reached: {lines[0] if lines else 'no reason given'}", False


# -- What can go wrong between ranks ----------------------------------------------------------------------------------


class CollectiveError(MemfitError, RuntimeError):
    """A collective did not end: a rank died, stopped, or does something else."""


class OrderError(MemfitError, RuntimeError):
    """Ranks run units in different orders, so that their collectives would not meet."""


class RankMismatch(MemfitError, ValueError):
    """Ranks were given different models, units or options."""


# What a rank says to the others when it fails: left in the group's store, and read by those who wait for it in vain.
#
# A rank that gives up closes its connections, and the ones it leaves see only that. With what it said last, their
# errors name the rank where it all began. A store may not answer either, so nobody waits for it long.


_ANSWER_S = 2.0
_LATE_S = 0.5
_POLL_S = 0.05


class Notices:
    """The notices of one process group, one for each rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.said: str | None = None
        self._store = group.get_group_store()
        self._rank = dist.get_rank(group)

    def say(self, text: str) -> None:
        """Leave a notice, unless there is one: what came first is the cause of the rest."""
        if self.said is None:
            self.said = text
            _bounded(lambda: self._store.set(_key(self._rank), text))

    def clear(self) -> None:
        """Take the notice back: this rank goes on."""
        if self.said is not None:
            self.said = None
            _bounded(lambda: self._store.set(_key(self._rank), ""))

    def of(self, rank: int, *, late: bool = False) -> str | None:
        """Return what a rank said last, if anything; one that just closed its connection may be `late` to say why."""

        def read() -> str:
            until = time.monotonic() + (_LATE_S if late else 0)
            while not self._store.check([_key(rank)]):
                if time.monotonic() > until:
                    return ""
                time.sleep(_POLL_S)
            return self._store.get(_key(rank)).decode()

        return _bounded(read) or None


def _key(rank: int) -> str:
    return f"memfit/notice/{rank}"


def _bounded(act: Callable[[], str | None]) -> str | None:
    """Return the result of a call that may hang or fail; None where it does."""
    found: list[str | None] = []

    def run() -> None:
        try:
            found.append(act())
        except Exception:
            return  # a store that is gone: the error that is being told is the one that matters

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    return found[0] if found else None


# -- Whether all ranks were given the same: asked before anything else is sent ----------------------------------------


def check_agreement(link: ShardComm, settings: Sequence[str]) -> None:
    """Compare settings, one a line, between the ranks of a group; name the first that differs, and on which rank."""
    text = "\n".join(settings).encode()
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
    """Return the first settings that only one of two ranks has, or the first in another place."""
    here = next((fact for fact in first if fact not in set(second)), None)
    there = next((fact for fact in second if fact not in set(first)), None)
    if here is None and there is None and len(first) == len(second):
        pairs = zip(first, second, strict=True)
        return next((f"{one} first", f"{other} first") for one, other in pairs if one != other)
    return here or "no such thing", there or "no such thing"
