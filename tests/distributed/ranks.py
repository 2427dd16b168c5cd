"""Processes with a Gloo group, started once and used for many tests: starting them takes longer than most tests."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import Any

TIMEOUT = timedelta(seconds=60)
_WAIT_S = 240

_context = get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "memfit.sharded", "pytest"])


class RankFailure(AssertionError):
    """A function raised on some rank; the message has its traceback."""


class Ranks:
    """As many processes as ranks, each with one thread; `run` calls one function on all of them."""

    def __init__(self, count: int, timeout: timedelta = TIMEOUT) -> None:
        self.count = count
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[BaseProcess] = []
        self._pipes: list[connection.Connection] = []

    def start(self) -> None:
        """Start the processes, unless they run."""
        if self._processes:
            return
        store = tempfile.mktemp(dir=self._folder.name)
        for rank in range(self.count):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(theirs, rank, self.count, store, self._timeout), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    @property
    def pids(self) -> list[int]:
        self.start()
        return [process.pid or 0 for process in self._processes]

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a function of an importable module on every rank."""
        self.start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))

    def answers(self) -> list[Any]:
        """What every rank returned; an exception object where it raised, None where it died."""
        return [self.answer(rank) for rank in range(len(self._pipes))]

    def answer(self, rank: int) -> Any:
        """What one rank returned, as `answers` has it."""
        try:
            return self._pipes[rank].recv() if self._pipes[rank].poll(_WAIT_S) else TimeoutError("no answer")
        except (EOFError, ConnectionError):
            return None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank and return what each returned, rank 0's first."""
        self.begin(function, *args, **kwargs)
        return self.results()

    def results(self) -> list[Any]:
        """Return what each rank returned for the function that was begun, rank 0's first."""
        found = self.answers()
        failed = [(rank, each) for rank, each in enumerate(found) if isinstance(each, BaseException) or each is None]
        if failed:
            self.stop()
            raise RankFailure("\n".join(f"rank {rank}: {each}" for rank, each in failed))
        return [each[0] for each in found]

    def stop(self) -> None:
        """End the processes; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()


def _serve(pipe: connection.Connection, rank: int, ranks: int, store: str, timeout: timedelta) -> None:
    import torch
    import torch.distributed as dist

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timeout)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((function(*args, **kwargs),))
        except BaseException as error:
            pipe.send(
                type(error)(f"{error}\n{traceback.format_exc()}")
                if _simple(error)
                else AssertionError(traceback.format_exc())
            )


def _simple(error: BaseException) -> bool:
    try:
        return isinstance(type(error)("x"), BaseException)
    except Exception:
        return False
