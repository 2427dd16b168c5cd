"""The CUDA streams that copies and collectives run on beside compute; on a CPU there are none.

Note [Streams]
Every buffer is allocated and freed in the order of the compute stream, whatever stream fills it. A side stream waits
for the compute stream before it touches a buffer, so that a block which was just freed is no longer read; compute waits
for the side stream's event before it reads the buffer or gives it back. Nothing has to be recorded on a second stream,
and the allocator can use every block again at once. Gathers are begun before the compute of the unit that runs is
queued: they wait for the unit before it, and overlap with this one. Only the tensor that a sum leaves is allocated on
its own stream, which has waited for compute by then, and which does so again before the block can be used once more.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Streams:
    """Side streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on = device.type == "cuda"
        self.prepare = self._make(urgent=True)
        self.gather = self._make(urgent=True)
        self.reduce = self._make(urgent=True)
        self.all_reduce = self._make(urgent=False)

    def on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """Run what follows on a side stream."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def after_current(self, stream: torch.cuda.Stream | None) -> None:
        """Make a side stream wait for what is queued on the current stream so far."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def event(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """Return an event for what is queued on a side stream so far, None without one."""
        if stream is None:
            return None
        event = torch.cuda.Event()
        stream.record_event(event)
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _make(self, *, urgent: bool) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._device, priority=-1 if urgent else 0) if self._on else None
