"""What a rank says to the others when it fails: left in the group's store, and read by those who wait for it in vain.

A rank that gives up closes its connections, and the ones it leaves see only that. With what it said last, their errors
name the rank where it all began. A store may not answer either, so nobody waits for it long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread

import torch.distributed as dist

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
        """What a rank said last, if anything; one that has just closed its connection may be `late` to say why."""

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
    """The result of something that may hang or fail; None where it does."""
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
