"""How fast a step is captured, how its cost grows with depth, and how it compares with PyTorch's own MemTracker.

The peer runs in the same process on the same model: `torch.distributed._tools.mem_tracker.MemTracker` around one
step on fake CPU tensors, which is how PyTorch's prototypes collect memory. Ratios are of medians of interleaved runs.
Repeated blocks are captured once (Note [Repeated blocks]); how much faster that is than running all of them is measured
on the same step, and both traces must have the same bytes. The growth with depth is that of a capture that runs them.
"""

from __future__ import annotations

import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import memfit
from memfit.memory import Timeline

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama import Llama, Shape, next_token_loss, training_step

LLAMA_405B = Shape(layers=126, hidden=16384, heads=128, key_value_heads=8, feed_forward=53248)
PEER = Shape(layers=16, hidden=1024, heads=16, key_value_heads=16, feed_forward=4096, vocabulary=32000)
REPEATS = 5


class ResidentPeak:
    """The highest resident memory of this process while the block runs, sampled."""

    def __enter__(self) -> ResidentPeak:
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.peak_bytes = max(self.peak_bytes, pages * 4096)


def timed(function: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def capture(shape: Shape, length: int = 8192, target: str = "h100-sxm", *, replicate: bool = True) -> memfit.Trace:
    trace = memfit.trace(training_step(shape, length=length), target=target, replicate=replicate)
    assert Timeline.of(trace).peak_bytes > 0
    return trace


def track_with_pytorch(length: int = 512) -> None:
    """Two steps, since the first one has no optimizer state: what PyTorch's documentation shows."""
    with FakeTensorMode():
        model = Llama(PEER, length)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        tokens = torch.randint(0, PEER.vocabulary, (1, length))
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                next_token_loss(model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        tracker.get_tracker_snapshot("peak")


def compare_with_full_capture() -> None:
    """Print how much faster 126 layers are captured when equal ones run once."""
    times: dict[bool, list[float]] = {False: [], True: []}
    traces: dict[bool, bytes] = {}
    for _ in range(REPEATS):
        for replicate in (False, True):
            gc.collect()
            began = time.perf_counter()
            trace = capture(LLAMA_405B, replicate=replicate)
            times[replicate].append(time.perf_counter() - began)
            traces[replicate] = msgspec.msgpack.encode(trace)
    assert traces[False] == traces[True]
    full, replicated = statistics.median(times[False]), statistics.median(times[True])
    print(f"126 layers: all of them run {full:.2f} s, replicated {replicated:.2f} s, with the same bytes")
    print(f"times faster with replication: {full / replicated:.2f} (must be at least 4)")


def main() -> None:
    capture(Shape(layers=1))
    with ResidentPeak() as resident:
        began = time.perf_counter()
        trace = capture(LLAMA_405B)
        seconds = time.perf_counter() - began
    ops = len(trace.ops)
    print(f"Llama 3 405B, 126 layers, sequence 8192: {ops} ops in {seconds:.2f} s, {1e6 * seconds / ops:.0f} us per op")
    print(f"resident memory while capturing it: {resident.peak_bytes / 2**30:.2f} GiB (must be below 2)")

    compare_with_full_capture()

    short: list[float] = []
    long: list[float] = []
    for _ in range(REPEATS):
        short.append(timed(lambda: capture(Shape(layers=32), replicate=False)))
        long.append(timed(lambda: capture(Shape(layers=64), replicate=False)))
    growth = statistics.median(long) / statistics.median(short)
    print(f"32 layers {statistics.median(short):.2f} s, 64 layers {statistics.median(long):.2f} s")

    same_kernels: list[float] = []
    for_gpu: list[float] = []
    theirs: list[float] = []
    for _ in range(3):
        same_kernels += [timed(lambda: capture(PEER, length=512, target="cpu")) for _ in range(3)]
        theirs.append(timed(track_with_pytorch))
        for_gpu += [timed(lambda: capture(PEER, length=512)) for _ in range(3)]
    peer = statistics.median(theirs)
    cpu, gpu = statistics.median(same_kernels), statistics.median(for_gpu)
    print(f"16 layers, MemTracker on fake CPU tensors, two steps (the first makes the optimizer's state): {peer:.2f} s")
    print(f"16 layers, memfit capture and timeline: {cpu:.2f} s for the CPU, {gpu:.2f} s for an H100")
    print(f"growth from 32 to 64 layers: {growth:.2f} (must be at most 2.3)")
    print(f"times faster than MemTracker, with the CPU kernels that it sees: {peer / cpu:.1f}")
    print(f"times faster than MemTracker, for an H100: {peer / gpu:.1f} (must be at least 30)")


if __name__ == "__main__":
    main()
