"""Work beside other work, in a forked process: for commands, whose process is our own.

A process of somebody else's is never forked: it may have threads that hold locks, or a device. PyTorch's DataLoader
forks its workers in the same way, and like it the child computes on one thread (OpenMP's do not survive a fork).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

_Result = TypeVar("_Result")
_First = TypeVar("_First")
_own_process = False


def allow_fork() -> None:
    """Say that this process is our own: `Beside` may fork it."""
    global _own_process
    _own_process = True


def can_fork() -> bool:
    """Return whether a second process is safe and of use: our own process, two cores, and no device to share.

    With a device, autograd has threads of its own, and torch refuses a backward in the child.
    """
    import torch

    if not (_own_process and sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1):
        return False
    return not torch.accelerator.is_available()


class Beside(Generic[_Result]):
    """A function whose result can be pickled. It runs from now on in a process beside this one, where that is safe.

    Where it is not, and where that process fails for whatever reason, it runs here when its result is asked for, and
    raises here what it raises. What it prints beside is lost.
    """

    def __init__(self, function: Callable[[], _Result]) -> None:
        self._function = function
        self._process: ForkProcess | None = None
        if not can_fork():
            return
        import multiprocessing

        # The result is left in memory that outlives the process: one that waits for its reader would hold its own.
        self._memory = os.memfd_create("memfit")
        process = multiprocessing.get_context("fork").Process(target=_run, args=(function, self._memory), daemon=True)
        process.start()
        self._process = process

    def result(self) -> _Result:
        """Return what the function returns, when it has."""
        found = b""
        if self._process is not None:
            self._process.join()
            if self._process.exitcode == 0:
                found = os.pread(self._memory, os.fstat(self._memory).st_size, 0)
            self.stop()
        return pickle.loads(found) if found else self._function()

    def stop(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
            os.close(self._memory)


def both(first: Callable[[], _First], second: Callable[[], _Result]) -> tuple[_First, _Result]:
    """Return what two functions return; the second may run beside the first."""
    beside = Beside(second)
    try:
        return first(), beside.result()
    finally:
        beside.stop()


def _run(function: Callable[[], Any], memory: int) -> None:
    import torch

    torch.set_num_threads(1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    with contextlib.suppress(BaseException):  # the parent runs it again, and shows what happens
        found = pickle.dumps(function(), pickle.HIGHEST_PROTOCOL)
        with open(memory, "wb", closefd=False) as file:
            file.write(found)
