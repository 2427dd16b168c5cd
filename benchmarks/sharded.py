"""memfit's sharded runtime beside PyTorch's FSDP2 and DDP: step time and peak memory on two ranks over Gloo.

One process a rank with one thread each. For time, all ways to train take steps in turn, in another order each round;
the figure is the median over rounds of one step's time over the other's. "Kept" leaves gathered parameters between
forward and backward (`reshard_after_forward=False`); the root is kept by all. For memory every way has processes of its
own: what stays between steps, and by how much a process grows in a step (`VmHWM` after `clear_refs`). A step divides
into ops of the model (compute), ops of the runtime (copies), the optimizer, time in which the thread did not run
(waiting, or robbed by another), and the rest (host); ops are timed under the profiler, so parts add up roughly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from fully_sharded.measure import parts_of, resident_bytes, rise_bytes, timed
from fully_sharded.model import KINDS, SIZES, Size, trained

RANKS = 2
PARTS = ("compute", "copies", "optimizer", "waiting", "host")
PAIRS = (("memfit", "FSDP2", 0.88), ("memfit kept", "FSDP2 kept", 0.95))


def join(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(minutes=10)
    )


def measure_time(rank: int, folder: str, number: int, rounds: int) -> None:
    """Train one size in all ways in turn, and write down what was measured on this rank."""
    join(rank, f"{folder}/time-{number}")
    steps = {kind: trained(SIZES[number], kind)[2] for kind in KINDS}
    for step in steps.values():
        step()
        step()
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    order = deque(KINDS)
    for _ in range(rounds):
        for kind in order:
            dist.barrier()
            times[kind].append(timed(steps[kind]))
        order.rotate()
    found = {}
    for kind, step in steps.items():
        dist.barrier()
        parts = parts_of(step)
        wall = statistics.median(wall for wall, _ in times[kind])
        own = statistics.median(own for _, own in times[kind])
        parts["waiting"] = max(wall - own, 0.0)
        parts["host"] = max(own - parts["compute"] - parts["copies"] - parts["optimizer"], 0.0)
        found[kind] = {"step_ms": wall, "steps_ms": [wall for wall, _ in times[kind]], "parts": parts, "loss": step()}
    Path(folder, f"time-{number}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure_memory(rank: int, folder: str, number: int, kind: str) -> None:
    """Train one size in one way, and write down what this rank takes."""
    join(rank, f"{folder}/memory-{number}-{kind}")
    model, optimizer, step = trained(SIZES[number], kind)
    for _ in range(3):
        step()
    peak = resident_bytes(model, optimizer) + rise_bytes(step)
    Path(folder, f"memory-{number}-{kind}-{rank}.json").write_text(json.dumps(peak))
    dist.barrier()
    dist.destroy_process_group()


def show(size: Size, times: dict[str, Any], peaks: dict[str, int]) -> list[str]:
    """Print a table; the ratios of memfit over FSDP2, in words."""
    print(f"\n{size.name}, batch {size.batch} x {size.length}, {RANKS} ranks")
    print(f"{'':14}{'step':>9}{'peak a rank':>14} " + "".join(f"{part:>11}" for part in PARTS))
    for kind in KINDS:
        one = times[kind]
        parts = "".join(f"{one['parts'][part] / one['step_ms']:>11.0%}" for part in PARTS)
        print(f"{kind:14}{one['step_ms']:>6.0f} ms{peaks[kind] / 2**20:>10.1f} MiB {parts}   loss {one['loss']:.6f}")
    said = []
    for ours, theirs, bar in PAIRS:
        paired = [a / b for a, b in zip(times[ours]["steps_ms"], times[theirs]["steps_ms"], strict=True)]
        medians = times[ours]["step_ms"] / times[theirs]["step_ms"]
        memory = peaks[ours] / peaks[theirs]
        said.append(
            f"{size.name}: {ours} over {theirs}: time {statistics.median(paired):.3f} (at most {bar}; ratio of medians "
            f"{medians:.3f}), memory {memory:.3f} (at most 1)"
        )
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(range(len(SIZES))), help="which sizes, by number")
    args = parser.parse_args()
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in args.sizes:
            torch.multiprocessing.spawn(measure_time, (folder, number, args.rounds), nprocs=RANKS)
            peaks = {}
            for kind in KINDS:
                torch.multiprocessing.spawn(measure_memory, (folder, number, kind), nprocs=RANKS)
                files = [Path(folder, f"memory-{number}-{kind}-{rank}.json") for rank in range(RANKS)]
                peaks[kind] = max(json.loads(file.read_text()) for file in files)
            said += show(SIZES[number], json.loads(Path(folder, f"time-{number}-0.json").read_text()), peaks)
    print("", *said, sep="\n")


if __name__ == "__main__":
    main()
