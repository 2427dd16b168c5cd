"""Processes with a Gloo group, started once and used for many tests: starting them takes longer than most tests."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT = timedelta(seconds=60)
_WAIT_S = 200
"""For all ranks together; less than pytest's own timeout, so that the stacks are told and the processes ended."""

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
            arguments = (theirs, rank, self.count, store, self._timeout, self._folder.name)
            process = _context.Process(target=_serve, args=arguments, daemon=True)
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
        until = time.monotonic() + _WAIT_S
        return [self.answer(rank, until) for rank in range(len(self._pipes))]

    def answer(self, rank: int, until: float | None = None) -> Any:
        """What one rank returned, as `answers` has it; the stacks of its threads where it does not in time."""
        wait = _WAIT_S if until is None else max(0.0, until - time.monotonic())
        try:
            return self._pipes[rank].recv() if self._pipes[rank].poll(wait) else TimeoutError(self._stacks(rank))
        except (EOFError, ConnectionError):
            return None

    def _stacks(self, rank: int) -> str:
        os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(1)
        return f"no answer\n{_stacks_file(self._folder.name, rank).read_text()}"

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


def _stacks_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stacks.{rank}")


def _serve(pipe: connection.Connection, rank: int, ranks: int, store: str, timeout: timedelta, folder: str) -> None:
    with _stacks_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        _answer_calls(pipe, rank, ranks, store, timeout)


def _answer_calls(pipe: connection.Connection, rank: int, ranks: int, store: str, timeout: timedelta) -> None:
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
