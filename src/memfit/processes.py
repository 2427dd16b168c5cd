"""Work beside other work, in a forked process: for commands, whose process is our own.

A process of somebody else's is never forked: it may have threads that hold locks, or a device. PyTorch's DataLoader
forks its workers in the same way, and like it the child computes on one thread (OpenMP's do not survive a fork).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

_Result = TypeVar("_Result")
_First = TypeVar("_First")
_PR_SET_PDEATHSIG = 1
_own_process = False


def allow_fork() -> None:
    """Say that this process is our own: a `ForkedCall` may fork it."""
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


class ForkedCall(Generic[_Result]):
    """A function whose result can be pickled. It runs from now on in a process beside this one, where that is safe.

    Where it is not, and where that process fails for whatever reason, it runs here when its result is asked for, and
    raises here what it raises. What it prints beside is lost. Only the process that made it may ask.
    """

    def __init__(self, function: Callable[[], _Result]) -> None:
        self._function = function
        self._process: ForkProcess | None = None
        if not can_fork():
            return
        import multiprocessing

        with contextlib.suppress(OSError):  # no room for a file, or for another process
            # The result is left in a file: a process that waits until somebody reads it would hold its memory.
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            process = multiprocessing.get_context("fork").Process(target=_run, args=(function, self._file), daemon=True)
            process.start()
            self._process = process

    def wait(self) -> None:
        """Wait until the process has ended, where there is one."""
        if self._process is not None:
            self._process.join()

    def result(self) -> _Result:
        """Return what the function returns, when it has."""
        self.wait()
        if self._process is not None and self._process.exitcode == 0:
            self._file.seek(0)
            found = self._file.read()
            self.stop()
            return pickle.loads(found)
        self.stop()
        return self._function()

    def stop(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
            self._file.close()


def both(first: Callable[[], _First], second: Callable[[], _Result]) -> tuple[_First, _Result]:
    """Return what two functions return; the second may run beside the first."""
    beside = ForkedCall(second)
    try:
        return first(), beside.result()
    finally:
        beside.stop()


def _run(function: Callable[[], Any], file: IO[bytes]) -> None:
    """Leave what a function returns in a file; an exit code other than 0 says that it could not."""
    # A spinner has put streams of its own there, with a lock that no thread of this process will ever give back.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    with contextlib.suppress(OSError, AttributeError):  # end with the parent, also where a signal ends that
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    import torch

    torch.set_num_threads(1)
    try:
        found = pickle.dumps(function(), pickle.HIGHEST_PROTOCOL)
        file.write(found)
        file.flush()
    except BaseException:  # the parent runs it again, and shows what happens
        os._exit(1)
