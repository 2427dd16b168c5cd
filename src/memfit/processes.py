"""Two pieces of work at once, the second in a forked process: for commands, whose process is our own.

A process of somebody else's is never forked: it may have threads that hold locks, or a device. PyTorch's DataLoader
forks its workers in the same way, and like it the child computes on one thread (OpenMP's do not survive a fork).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_First = TypeVar("_First")
_Second = TypeVar("_Second")
_own_process = False


def allow_fork() -> None:
    """Say that this process is our own: `both` may fork it."""
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


def both(first: Callable[[], _First], second: Callable[[], _Second]) -> tuple[_First, _Second]:
    """Return what two functions return; `second`, whose result can be pickled, may run in a process beside this one.

    Where that process fails, for whatever reason, `second` runs here, and raises here what it raises.
    """
    if not can_fork():
        return first(), second()
    import multiprocessing

    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_run, args=(second, sender), daemon=True)
    child.start()
    sender.close()  # the child's copy is then the last one, and its end is the end of the pipe
    try:
        ours = first()
        with contextlib.suppress(EOFError):
            return ours, receiver.recv()
        return ours, second()
    finally:
        child.kill()
        child.join()
        receiver.close()


def _run(function: Callable[[], Any], sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(BaseException):  # the parent runs it again, and shows what happens
        sender.send(function())
