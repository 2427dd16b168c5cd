"""What ranks tell each other around a step: who goes on, who failed, and how all get out of a step that one has left.

Note [One vote a step]: before an optimizer writes, all ranks vote on a Gloo group of the guard's own. A rank that has
failed first cuts the connections of every other group, so that the ranks that wait for it raise at once, and votes as
well. So all meet at the same call, whatever each of them was at, and nobody has written to a parameter. The vote is one
all-gather of a few numbers; with it goes what each rank measured, so that drifts cost no message of their own.

Note [Waiting inside kernels]: with NCCL a rank waits on its device. Its host gets to the vote by itself, unless it
waits for the device too (`loss.item()`); for those a thread looks for a notice in the store, and aborts the
communicators from there. See docs/design/guard_on_ranks.md.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from memfit.errors import MissingFeatureError
from memfit.sharded import RankError
from memfit.torch_private.process_groups import (
    connect,
    cut,
    own_groups,
    renewal_bytes,
    replace_backends,
    unsupported_backend,
    waits_on_device,
)
from memfit.torch_private.wrappers import default_group
from memfit.verify import describe_failure, follows_another, forget_message_group, gather_objects, message_group

T = TypeVar("T")
_POLL_S = 0.25
_ROLL_CALL_S = 2.0
_generations: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_faults: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_spares: WeakKeyDictionary[dist.ProcessGroup, list[Any]] = WeakKeyDictionary()
"""Connections of a group that the next fault will need."""


class RankTalk:
    """The guard's own way between all ranks, which must make it together."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._world, self._group = default_group(), message_group()
        self._store = dist.PrefixStore("memfit/guard", self._world.get_group_store())
        self._alarm = threading.Event()
        self._watcher: _Watcher | None = None

    def check_backends(self) -> None:
        """Refuse groups whose collectives cannot be ended and begun again."""
        for group in self._groups():
            name = unsupported_backend(group)
            if name is not None:
                raise MissingFeatureError(
                    f"guard.step ends the collectives of ranks that wait for a failed one, which it can with Gloo and "
                    f"NCCL, and a process group has backend {name!r}; leave optimizer= out to watch steps only, and "
                    "TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps backends"
                )

    # -- telling ----------------------------------------------------------------------------------------------------

    def vote(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return a few numbers of every rank, rank 0's first."""
        own = torch.tensor(numbers, dtype=torch.int64)
        told = [torch.empty_like(own) for _ in range(self.ranks)]
        try:
            dist.all_gather(told, own, group=self._group)
        except RuntimeError as error:
            raise self._gone(error) from error
        return [each.tolist() for each in told]

    def gather(self, own: T) -> list[T]:
        """Return what every rank gave, rank 0's first."""
        try:
            return gather_objects(own, self._group)
        except RuntimeError as error:
            raise self._gone(error) from error

    def together(self, about: str, act: Callable[[], T]) -> T:
        """Run an action on every rank, one that fails before its collectives, if at all.

        Where it fails on one, all raise, the others `RankError`.
        """
        failure: Exception | None = None
        result: list[T] = []
        try:
            result.append(act())
        except Exception as error:
            failure = error
        told = self.gather(describe_failure(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(told):
            if text is not None:
                raise RankError(f"{about} failed on rank {rank}: {text}")
        return result[0]

    # -- getting out of a step --------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Begin to look for alarms of other ranks, where a rank may wait on its device (Note [Waiting in kernels])."""
        if self._watcher is None and any(waits_on_device(group) for group in self._groups()):
            self._watcher = _Watcher(self._store, self._key(), self._hear)

    def stop(self) -> None:
        """End the thread that looks for alarms."""
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None

    def cut(self, text: str | None) -> None:
        """Get every rank out of the step: end the collectives of all groups but the guard's.

        The rank where it began leaves a notice with its text, those that follow have None.
        """
        if text is not None:
            self._say(text)
        self._cut_groups()

    def leave(self, text: str) -> None:
        """Get every rank out, and out of its next vote: this rank does not come back."""
        self._say(text)
        self._cut_groups()
        cut(self._group)
        forget_message_group(self._world)

    def prepare(self) -> None:
        """Make the connections that the next fault will need, while there is memory; on every rank."""
        missing = [group for group in self._groups() if group not in _spares and not waits_on_device(group)]
        generation = self._next_generation()
        if all(self.gather(_has_room(missing))):  # asked by all: ranks are in different groups, and miss different ones
            for group in missing:
                _spares[group] = connect(group, generation)

    def renew(self) -> bool:
        """Give all groups new connections, on every rank, after each has cut its own; False where a rank has no room.

        A rank that failed in the middle would be waited for, so all say first whether they have the memory.
        """
        groups = self._groups()
        missing = [group for group in groups if group not in _spares]
        if not all(self.gather(_has_room(missing))):
            return False
        self._alarm.clear()
        watches = self._watcher is not None
        self.stop()
        _faults[self._world] = _faults.get(self._world, 0) + 1
        generation = self._next_generation()
        for group in missing:
            _spares[group] = connect(group, generation)
        for group in groups:
            replace_backends(group, _spares.pop(group))
        if watches:
            self.watch()
        return True

    def _next_generation(self) -> str:
        _generations[self._world] = _generations.get(self._world, 0) + 1
        return str(_generations[self._world])

    def follows(self, error: BaseException | None) -> bool:
        """Return whether an error says no more than that another rank has left the step."""
        if self._alarm.is_set() or follows_another(error):
            return True
        while error is not None:
            if "NCCL" in str(error) and "out of memory" not in str(error):  # NCCL may be what found no memory
                return True
            error = error.__cause__
        return False

    def notice(self) -> str | None:
        """Return what the first rank that failed said, where it can be read."""
        key = self._key()
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except (RuntimeError, ValueError):
            return None

    def _groups(self) -> list[dist.ProcessGroup]:
        return [group for group in own_groups() if group is not self._group]

    def _cut_groups(self) -> None:
        for group in self._groups():
            cut(group)

    def _key(self) -> str:
        return f"fault/{_faults.get(self._world, 0)}"

    def _say(self, text: str) -> None:
        key = self._key()
        try:
            if not self._store.check([key]):
                self._store.set(key, text)
        except RuntimeError:
            return  # a store that is gone: the error that is being told is the one that matters

    def _hear(self) -> None:
        self._alarm.set()
        self._cut_groups()

    def _gone(self, error: RuntimeError) -> RankError:
        """Say which ranks no longer answer: those that are there sign in the store."""
        self._cut_groups()
        forget_message_group(self._world)
        said = self.notice()
        if said is not None:
            return RankError(f"{said}, and does not go on. Start all ranks again and go on from the last save")
        missing = self._roll_call()
        names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        who = f"{names} no longer answers" if missing else "a rank closed its connections"
        reason = re.sub(r"\[[^]]*\.(cc|cpp|h):\d+\] ?", "", str(error)).split(". ")[0].splitlines()[0]
        return RankError(f"{who} ({reason}). Start all ranks again and go on from the last save")

    def _roll_call(self) -> list[int]:
        present: list[int] = []
        try:
            self._store.set(f"present/{self._key()}/{self.rank}", "")
            until = time.monotonic() + _ROLL_CALL_S
            while time.monotonic() < until:
                keys = [f"present/{self._key()}/{rank}" for rank in range(self.ranks)]
                present = [rank for rank, key in enumerate(keys) if self._store.check([key])]
                if len(present) == self.ranks:
                    break
                time.sleep(_POLL_S)
        except RuntimeError:
            return []
        return [rank for rank in range(self.ranks) if rank not in present]


class _Watcher:
    """A thread that looks for a notice in the store and calls a function once when there is one."""

    def __init__(self, store: dist.Store, key: str, hear: Callable[[], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(_own_connection(store), key, hear), name="memfit-guard", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_ROLL_CALL_S)

    def _run(self, store: dist.Store, key: str, hear: Callable[[], None]) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                heard = store.check([key])
            except RuntimeError:
                return
            if heard:
                hear()
                return


def _has_room(groups: Sequence[dist.ProcessGroup]) -> bool:
    try:
        torch.empty(sum(map(renewal_bytes, groups)), dtype=torch.uint8)
    except (RuntimeError, MemoryError):
        return False
    return True


def _own_connection(store: dist.Store) -> dist.Store:
    """Return a connection of the thread's own: one that waits in the store would keep the thread waiting."""
    clone = getattr(store, "clone", None)  # torch 2.9 and later; not in its type stubs
    return store if clone is None else clone()
