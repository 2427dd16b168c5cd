"""Where offloaded storages go: pinned host memory beside a GPU, a file beside the CPU.

Note [Offload store]: a store sends the content of a storage away and brings it back into a new one, bit for bit. It
never frees anything: `wait_sent` says when whoever holds the storage may let go of it, and what is alive then does not
depend on how fast the link was. The host of a CUDA device is pinned memory, reached by copies on a stream of their own.
The host of the CPU is one unlinked file that threads write and read. It is not mapped: a mapping of a file that cannot
grow, or that somebody has truncated, ends the process with SIGBUS, where a read and a write give an error. Sums over
each page of the content are kept, and a content that has others when it comes back is an error and no gradient.
"""

from __future__ import annotations

import abc
import ctypes
import os
import queue
import shutil
import tempfile
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import IO

import numpy as np
import torch

from memfit.errors import InputError, MissingFeatureError, OffloadError
from memfit.summed_file import COPY_THREADS, OFFLOAD_FOLDER, Content, Sums, read_summed, write_summed
from memfit.torch_private.dispatch import DisableTorchDispatch
from memfit.units import display_bytes

_PAGE_BYTES = 4096


def open_store(device_type: str) -> OffloadStore:
    """Return a store for storages of this kind of device."""
    if device_type == "cuda":
        return PinnedStore()
    if device_type == "cpu":
        return FileStore(offload_folder())
    raise MissingFeatureError(
        f"this plan offloads results, which memfit does on CUDA and on the CPU, and the model is on {device_type!r}: "
        "plan without offloading"
    )


def offload_folder() -> str:
    """Return the folder for what the CPU offloads; refuse one that no file can be written in."""
    folder = os.environ.get(OFFLOAD_FOLDER) or tempfile.gettempdir()
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"{folder!r} is no folder that can be written in; set {OFFLOAD_FOLDER} to one with room for this plan"
        )
    return folder


class OffloadedStorage(abc.ABC):
    """The content of one storage: on its way to the host, there, or on its way back."""

    def __init__(self, unit: str, storage: torch.UntypedStorage) -> None:
        self.unit = unit
        self.size_bytes = storage.nbytes()
        self.device = storage.device

    @abc.abstractmethod
    def wait_sent(self) -> None:
        """Return when the storage may be freed; raise `OffloadError` where its content could not be sent."""

    @abc.abstractmethod
    def fetch(self) -> None:
        """Allocate a storage and begin to bring the content back."""

    @abc.abstractmethod
    def wait_fetched(self) -> torch.UntypedStorage:
        """Return the storage with its content; raise `OffloadError` where that is not what was sent."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give the room on the host back. What is under way is no longer wanted."""

    def __del__(self) -> None:
        self.release()


class OffloadStore(abc.ABC):
    """Sends storages away; lives as long as anything that it sent."""

    @abc.abstractmethod
    def send(self, unit: str, storage: torch.UntypedStorage) -> OffloadedStorage:
        """Begin to copy the content of a storage."""


# -- CUDA: pinned memory, and a stream for copies ---------------------------------------------------------------------


class PinnedStore(OffloadStore):
    """Pinned buffers, reused by size, and for each device one stream on which all copies are made."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream for copies from and to a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def take(self, unit: str, device: torch.device, size_bytes: int) -> torch.Tensor:
        """Return a pinned buffer of this size."""
        free = self.free[device, size_bytes]
        if free:
            # What the buffer was read for last is on the same stream as what will write it.
            return free.pop()
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise OffloadError(
                f"unit {unit!r} could not offload {display_bytes(size_bytes)}: the host has no more memory that can be "
                f"pinned ({error}). {_INTACT} Make room on the host, or plan with less offloading"
            ) from error

    def send(self, unit: str, storage: torch.UntypedStorage) -> OffloadedStorage:
        """Begin to copy the content of a storage, after what computes it."""
        return _Pinned(self, unit, storage)


class _Pinned(OffloadedStorage):
    """A storage of a CUDA device. Note [Copy stream]: who waits for whom.

    A copy begins after all that the compute stream was given before. A storage is let go of only after the compute
    stream was made to wait for the copy: its block goes back to that stream's pool, so whatever is computed in it comes
    after the copy. No `record_stream` is needed, which would make the time of reuse depend on the link.
    """

    def __init__(self, store: PinnedStore, unit: str, storage: torch.UntypedStorage) -> None:
        super().__init__(unit, storage)
        self._store = store
        self._buffer: torch.Tensor | None = None  # first, for `release` after an error below
        self._under_way: tuple[torch.cuda.Stream, torch.cuda.Event, torch.UntypedStorage] | None = None
        self._buffer = store.take(unit, self.device, self.size_bytes)
        self._copy(storage, to_host=True)

    def _copy(self, storage: torch.UntypedStorage, *, to_host: bool) -> None:
        assert self._buffer is not None
        compute, copies = torch.cuda.current_stream(self.device), self._store.stream(self.device)
        copies.wait_stream(compute)
        with torch.cuda.stream(copies):
            content = bytes_of(storage)
            target, source = (self._buffer, content) if to_host else (content, self._buffer)
            _copy_below_modes(target, source)
        event = torch.cuda.Event()
        event.record(copies)
        self._under_way = compute, event, storage

    def wait_sent(self) -> None:
        """Make the compute stream wait; the host does not."""
        self._settle()

    def fetch(self) -> None:
        """Allocate on the compute stream, and copy when what used the block before is done."""
        self._copy(torch.UntypedStorage(self.size_bytes, device=self.device), to_host=False)

    def wait_fetched(self) -> torch.UntypedStorage:
        """Make the compute stream wait for the copy."""
        assert self._under_way is not None
        storage = self._under_way[2]
        self._settle()
        return storage

    def _settle(self) -> None:
        if self._under_way is not None:
            compute, event, _ = self._under_way
            compute.wait_event(event)
            current = torch.cuda.current_stream(self.device)
            if current != compute:
                current.wait_event(event)
            self._under_way = None

    def release(self) -> None:
        """Give the buffer back, and let go of a storage that is being copied as if it were waited for."""
        if self._under_way is not None:
            compute, event, _ = self._under_way
            compute.wait_event(event)
            self._under_way = None
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._store.free[self.device, self.size_bytes].append(buffer)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of a storage as a tensor."""
    guard = DisableTorchDispatch()
    try:
        made = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return made.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]
    finally:
        del guard


def _copy_below_modes(target: torch.Tensor, source: torch.Tensor) -> None:
    guard = DisableTorchDispatch()
    try:
        target.copy_(source, non_blocking=True)
    finally:
        del guard


# -- CPU: a file, and threads that write and read ---------------------------------------------------------------------


_INTACT = (
    "Nothing of the training is lost: parameters, buffers of the optimizer and gradients of earlier passes are as they "
    "were, and the step can be run again."
)


class FileStore(OffloadStore):
    """One file without a name: it goes with the process, however that ends."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.extents = Extents()
        self._file: IO[bytes] | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._opening = threading.Lock()

    @property
    def file(self) -> int:
        """The descriptor of the file, which is made when it is first needed, and the threads with it."""
        with self._opening:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self.folder, prefix="memfit-offload-", buffering=0)  # noqa: SIM115
                for number in range(COPY_THREADS):
                    name = f"memfit-offload-{number}"
                    threading.Thread(target=_work_off, args=(self._jobs,), name=name, daemon=True).start()
                weakref.finalize(self, _close, self._file, self._jobs)
        return self._file.fileno()

    def submit(self, work: Callable[[], None]) -> _Job:
        """Have a thread do this."""
        job = _Job(work)
        self._jobs.put(job)
        return job

    def send(self, unit: str, storage: torch.UntypedStorage) -> OffloadedStorage:
        """Begin to write the content of a storage."""
        return _Filed(self, unit, storage)

    def room(self) -> str:
        """Return how much is free in the folder, in words."""
        try:
            return f"{display_bytes(shutil.disk_usage(self.folder).free)} are free there"
        except OSError:
            return "what is free there cannot be told"


def _close(file: IO[bytes], jobs: queue.SimpleQueue[_Job | None]) -> None:
    for _ in range(COPY_THREADS):
        jobs.put(None)
    file.close()


def _work_off(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job.run()
        del job  # it would be held until the next one comes


class _Job:
    """Something that a thread does. It holds nothing once it is done."""

    __slots__ = ("_done", "_error", "_work")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Do it."""
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            self._error = error.with_traceback(None)  # whose frames hold what is copied
        finally:
            self._work = None
            self._done.set()

    def wait(self) -> BaseException | None:
        """Return when it is done: with what went wrong, if anything did."""
        self._done.wait()
        return self._error


class _Filed(OffloadedStorage):
    """A storage of the CPU."""

    def __init__(self, store: FileStore, unit: str, storage: torch.UntypedStorage) -> None:
        super().__init__(unit, storage)
        self._store = store
        self._place: _Place | None = None  # first, for `release` after an error below
        try:
            self._file = store.file
        except OSError as error:
            raise self._not_sent(error) from error
        self._place = place = _Place(store.extents, self.size_bytes)
        self._storage: torch.UntypedStorage | None = storage
        self._sums: list[Sums] = []
        self._writing: _Job | None = store.submit(_Write(self._file, place, storage, self._sums))
        self._reading: _Job | None = None

    def _not_sent(self, error: BaseException) -> OffloadError:
        return OffloadError(
            f"unit {self.unit!r} could not offload {display_bytes(self.size_bytes)} to a file in "
            f"{self._store.folder!r}: {_reason(error)}, and {self._store.room()}. {_INTACT} Make room, set "
            f"{OFFLOAD_FOLDER} to another folder and apply the plan again, or plan with less offloading"
        )

    def wait_sent(self) -> None:
        """Wait until all has been written."""
        if self._writing is not None:
            error = self._writing.wait()
            self._writing = None
            self._storage = None
            if error is not None:
                self.release()
                raise self._not_sent(error) from error

    def fetch(self) -> None:
        """Allocate here, and have a thread read."""
        assert self._place is not None
        self._storage = torch.UntypedStorage(self.size_bytes, device=self.device)
        self._reading = self._store.submit(_Read(self._file, self._place, self._storage, self._sums))

    def wait_fetched(self) -> torch.UntypedStorage:
        """Wait until all has been read, and compare it with what was written."""
        assert self._reading is not None and self._storage is not None
        error = self._reading.wait()
        if error is not None:
            raise OffloadError(
                f"unit {self.unit!r} did not get back the {display_bytes(self.size_bytes)} that it offloaded to a file "
                f"in {self._store.folder!r}: {_reason(error)}. No gradient was computed from them; parameters and the "
                "optimizer are as they were. Drop the gradients of this pass (optimizer.zero_grad()) and run it again"
            ) from error
        storage, self._storage, self._reading = self._storage, None, None
        return storage

    def release(self) -> None:
        """Give the room in the file back, when nothing reads or writes there any more."""
        place, self._place = self._place, None
        if place is not None:
            place.let_go()


class _Write:
    """Writes a storage."""

    def __init__(self, file: int, place: _Place, storage: torch.UntypedStorage, sums: list[Sums]) -> None:
        self._file, self._place, self._storage, self._sums = file, place, storage, sums
        place.take()

    def __call__(self) -> None:
        try:
            self._sums += write_summed(self._file, _memory_of(self._storage), self._place.offset)
        finally:
            self._place.let_go()


class _Read(_Write):
    """Reads what was written into another storage."""

    def __call__(self) -> None:
        try:
            read_summed(self._file, _memory_of(self._storage), self._place.offset, self._sums)
        finally:
            self._place.let_go()


def _memory_of(storage: torch.UntypedStorage) -> Content:
    """Return the bytes of a storage, without a tensor: threads must not hold one longer than the job."""
    memory = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    return np.frombuffer(memoryview(memory), np.uint8)


def _reason(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


class _Place:
    """A stretch of the file, given back when its storage and all jobs have let go of it.

    Without a lock: the garbage collector may run a finalizer on a thread that has it. Whoever takes the first token,
    which lies below all others, is the last.
    """

    def __init__(self, extents: Extents, size_bytes: int) -> None:
        self._extents = extents
        self._size_bytes = size_bytes
        self._tokens = [0]
        self.offset = extents.take(size_bytes)

    def take(self) -> None:
        """Hold it once more."""
        self._tokens.append(1)

    def let_go(self) -> None:
        """Hold it once less."""
        if self._tokens.pop() == 0:
            self._extents.give_back(self.offset, self._size_bytes)


class Extents:
    """Which stretches of a file are free: the first that is large enough is taken, neighbours become one."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []
        self._returned: deque[tuple[int, int]] = deque()  # by finalizers too, which must not wait for the lock
        self._lock = threading.Lock()
        self.end = 0
        """How long the file has become."""

    @property
    def used_bytes(self) -> int:
        """How much is taken, rounded up to pages."""
        with self._lock:
            self._merge()
            return self.end - sum(size for _, size in self._free)

    def take(self, size_bytes: int) -> int:
        """Return where so many bytes are free."""
        size = _whole_pages(size_bytes)
        with self._lock:
            self._merge()
            for place, (offset, free) in enumerate(self._free):
                if free >= size:
                    self._free[place : place + 1] = [(offset + size, free - size)] if free > size else []
                    return offset
            offset, self.end = self.end, self.end + size
            return offset

    def give_back(self, offset: int, size_bytes: int) -> None:
        """Free a stretch."""
        self._returned.append((offset, _whole_pages(size_bytes)))

    def _merge(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for begin, length in sorted(self._free):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = merged[-1][0], merged[-1][1] + length
            else:
                merged.append((begin, length))
        self._free = merged


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
