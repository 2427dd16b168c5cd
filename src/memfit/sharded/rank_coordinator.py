"""The ranks that hold one model, and what they agree on when they save and load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from memfit.errors import MemfitError
from memfit.sharded.comm import CollectiveError, ShardComm
from memfit.sharded.runtime import ShardedRuntime


class _Said(msgspec.Struct, frozen=True):
    """What one rank tells the others."""

    failed: str | None
    content: bytes


class RankCoordinator:
    """All ranks of a sharded model, numbered through replicas; a plain model has one."""

    def __init__(self, runtime: ShardedRuntime | None) -> None:
        self._links: Sequence[ShardComm] = [] if runtime is None else runtime.links
        self.rank, self.ranks = 0, 1
        for link in self._links:  # ranks that shard first, then replicas, then those of tensor and expert parallel
            self.rank += self.ranks * link.rank
            self.ranks *= link.ranks
        self.writes = all(link.rank == 0 for link in self._links[1:])
        """Whether this rank's part is not another replica's too."""

    def together(self, about: str, act: Callable[[], bytes]) -> list[bytes]:
        """Run an action on every rank and exchange the results; where one fails, all do."""
        failure: Exception | None = None
        content = b""
        try:
            content = act()
        except Exception as error:
            failure = error
        said = _Said(None if failure is None else f"{type(failure).__name__}: {failure}", content)
        try:
            told = self._gather(msgspec.json.encode(said), about)
            answers = [msgspec.json.decode(each, type=_Said) for each in told]
        except CollectiveError as error:
            if failure is not None:
                raise failure from error
            raise
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer.failed is not None:
                raise RankError(f"{about} failed on rank {rank}: {answer.failed}")
        return [answer.content for answer in answers]

    def first(self, about: str, act: Callable[[], bytes]) -> bytes:
        """Run an action on rank 0 and broadcast its result."""
        return self.together(about, act if self.rank == 0 else lambda: b"")[0]

    def _gather(self, own: bytes, about: str) -> list[bytes]:
        found = [own]
        for link in self._links:
            told = link.tell(msgspec.json.encode(found), about)
            found = [each for every in told for each in msgspec.json.decode(every, type=list[bytes])]
        return found


class RankError(MemfitError, RuntimeError):
    """Another rank could not do its part of a save, a load or a verification."""
